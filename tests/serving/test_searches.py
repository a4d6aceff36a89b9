""" "Will it fit?": one search at a time, in a sandbox, for as long as somebody waits for it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from sandbox.insiders import needs_namespaces

from serving.served import GUARD_S, Server, serving
from serving.test_questions import WORKLOAD

# So that a test of too much memory takes little.
SMALL = "from oomph.serving import searches; searches._LEAST_BYTES = 700 << 20;"
SMALL += "searches._MOST_OF_FREE_MEMORY = 0.0"
NEVER_ENDS = "import time, oomph\nwhile True: time.sleep(1)\nworkload = oomph.Workload()"
SOON_S = 5 * GUARD_S  # a loaded machine imports torch in half a minute


class Search:
    """A search under way, line by line."""

    def __init__(self, server: Server, **asked: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON_S)
        address = f"/api/fit?{urlencode({'gpu': 'rtx4090', **asked})}"
        self._connection.request("GET", address, headers={"X-Oomph": "fit"})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status

    def __iter__(self) -> Iterator[Any]:
        while line := self._answer.readline():
            yield json.loads(line)

    def until(self, is_right: Callable[[Any], object]) -> Any:
        return next(line for line in self if is_right(line))

    def end(self) -> Any:
        """The last line."""
        last = list(self)[-1]
        self.leave()
        return last

    def leave(self) -> None:
        self._answer.close()
        self._connection.close()


def is_at_work(line: Any) -> bool:
    return bool(line["kind"] == "progress" and line["elapsed_s"] > 0)


def searching_below(server: Server) -> list[int]:
    """The processes of searches of this server."""
    own = str(server.process.pid)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == own and b"search_child" in command:
                found.append(int(entry.name))
    return found


def wait_until(is_so: Callable[[], object]) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    directory = tmp_path / "workloads"
    directory.mkdir()
    return directory


@pytest.fixture
def server(tmp_path: Path, workloads: Path) -> Iterator[Server]:
    with serving(tmp_path, (), "--workloads", str(workloads), first=SMALL) as running:
        yield running


def test_only_a_page_of_this_server_starts_a_search(server: Server) -> None:
    address = "/api/fit?model=openai-community/gpt2&gpu=rtx4090"
    assert server.get(address).status == 403
    assert server.get(address, method="HEAD", X_Oomph="fit").status == 403
    assert server.get(address, method="POST", X_Oomph="fit").status == 405
    foreign = server.get(address, X_Oomph="fit", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")
    assert foreign.status == 403
    assert searching_below(server) == []


def test_what_cannot_be_asked_is_refused_in_words_and_starts_nothing(server: Server) -> None:
    answer = server.get("/api/fit?model=openai-community/gpt2&gpu=rtx409", X_Oomph="fit")
    assert answer.status == 400
    assert "rtx409" in answer.json["error"]
    assert searching_below(server) == []


@needs_namespaces
@pytest.mark.slow
def test_a_workload_file_is_planned_without_leaving_a_trace(
    server: Server, workloads: Path
) -> None:
    evil = "import os\nopen('written', 'w').write('x')\nopen(os.path.join("
    evil += f"{str(workloads)!r}, 'here'), 'w').write('x')\n"
    (workloads / "train.py").write_text(evil + WORKLOAD)
    search = Search(server, workload="train.py:workload")
    assert next(iter(search)) == {
        "kind": "asked",
        "command": f"oomph plan {workloads}/train.py:workload --gpu rtx4090",
    }
    found = search.end()
    assert found["kind"] == "plans", found
    plans = found["plans"]
    assert (plans["workload"], plans["batch_size"]) == ("train.py:workload", 8)
    assert plans["plans"][0]["timeline"]["positions"]
    assert "train" in plans["plans"][0]["code"]
    assert [path.name for path in workloads.iterdir()] == ["train.py"]
    wait_until(lambda: not searching_below(server))


@needs_namespaces
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise RuntimeError('no luck')", "no luck"),
        ("kept = [bytearray(1 << 24) for _ in range(1 << 20)]", "memory"),
        (
            "import os, time\nfor _ in range(80): os.fork() or time.sleep(99)\ntime.sleep(99)",
            "more than 64 processes",
        ),
        ("import os; os.kill(os.getpid(), 9)", "ended"),
        ("import os; os.write(3, b'x' * 100); os.closerange(0, 4096); os._exit(0)", "ended"),
    ],
    ids=["raises", "takes memory", "starts processes", "dies", "talks nonsense"],
)
def test_a_hostile_file_gets_an_error_and_the_server_goes_on(
    server: Server, workloads: Path, code: str, told: str
) -> None:
    (workloads / "train.py").write_text(f"{code}\nworkload = oomph.Workload()")
    found = Search(server, workload="train.py:workload").end()
    assert found["kind"] == "error", found
    assert told in f"{found['what']} {found['because']}".lower()
    wait_until(lambda: not searching_below(server))
    assert server.get("/api/fit/choices").json["workloads"] == ["train.py:workload"]


@needs_namespaces
def test_searches_take_turns_end_with_their_page_and_are_limited(
    server: Server, workloads: Path
) -> None:
    """One server for all of it: each search imports torch."""
    (workloads / "train.py").write_text(NEVER_ENDS)
    first = Search(server, workload="train.py:workload")
    first.until(is_at_work)
    waiting = [Search(server, workload="train.py:workload") for _ in range(4)]
    line = waiting[0].until(lambda line: line["kind"] != "asked")
    assert (line["kind"], line["num_ahead"]) == ("waiting", 1)
    assert len(searching_below(server)) == 1

    refused = Search(server, workload="train.py:workload")
    assert refused.status == 503
    refused.leave()

    before = searching_below(server)
    first.leave()  # as a browser does when its page is closed
    waiting[0].until(lambda line: line["kind"] == "progress")
    wait_until(lambda: searching_below(server) and searching_below(server) != before)
    (pid,) = searching_below(server)

    code, said = server.end()
    assert (code, said) == (0, "")
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    for search in waiting:
        search.leave()


@pytest.mark.slow
def test_a_model_by_name_is_planned(server: Server) -> None:
    pytest.importorskip("transformers")
    search = Search(server, model="openai-community/gpt2", seq_len="64", batch_size="4")
    command = "oomph plan hf:openai-community/gpt2 --seq-len 64 --batch-size 4 --gpu rtx4090"
    assert next(iter(search))["command"] == command
    found = search.end()
    assert found["kind"] == "plans", found
    assert found["plans"]["workload"] == "hf:openai-community/gpt2"
    assert found["plans"]["batch_size"] == 4
    assert found["plans"]["plans"][0]["prediction"]["fits"] == "yes"
