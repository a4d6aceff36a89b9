"""Who is answered and who is not: a real server, and real requests of every bad kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvml.machine import Gpu, Proc

from serving.served import Server, frames, is_cut_off, serving, until

SECRET = "--password=hunter2"  # noqa: S105
EVERYWHERE = "0.0.0.0"  # noqa: S104
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For this user on this machine."""
    directory = tmp_path_factory.mktemp("own")
    (directory / "secret.json").write_text('{"secret": 1}')
    (directory / "plans").mkdir()
    with serving(directory, [Gpu()], "--plans", str(directory / "plans")) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For other machines."""
    with serving(tmp_path_factory.mktemp("open"), [Gpu()], "--host", EVERYWHERE) as running:
        yield running


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "localhost:9", "[::1]:8765"])
def test_this_machine_is_answered_under_its_names(server: Server, name: str) -> None:
    assert server.get("/api/machine", Host=name).status == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8765", "localhost.evil.example", "", "127.0.0.1.nip.io"]
)
def test_a_page_that_points_its_own_name_here_is_refused(server: Server, name: str) -> None:
    answer = server.get("/api/machine", Host=name)
    assert answer.status == 421
    assert b"gpus" not in answer.body


def test_pages_of_other_sites_may_link_here_and_no_more(server: Server) -> None:
    foreign = {"Sec_Fetch_Site": "cross-site"}
    assert server.get("/api/live", **foreign, Sec_Fetch_Mode="cors").status == 403
    assert server.get("/api/machine", **foreign, Sec_Fetch_Mode="no-cors").status == 403
    assert server.get("/", **foreign, Sec_Fetch_Mode="navigate").status == 200
    own = {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}
    assert server.get("/api/machine", **own).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert server.get("/api/runs", method=method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/dashboard.js/../../../../../etc/passwd",
        "/api/runs/..%2f..%2f..%2fetc%2fpasswd",
        "/api/runs/%2e",
        "/api/runs/%2e%2e",
        "/api/runs/last",
        "/api/plans/..%2fsecret.json",
        "/api/plans/%2e%2e%2fsecret.json",
        "/api/plans/secret.json%00.html",
    ],
)
def test_no_address_leads_out_of_what_is_served(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 404
    assert b"root:" not in answer.body
    assert b'"secret": 1' not in answer.body


def test_what_is_too_long_is_refused_and_the_server_stays(server: Server) -> None:
    assert server.get("/?" + "x" * 2000).status == 414
    assert server.get("/" + "x" * 2000).status == 414
    endless = server.connect()
    endless.sendall(b"GET / HTTP/1.1\r\nCookie: ")
    assert is_cut_off(endless, b"x" * 65_536)
    viewer = server.connect()
    viewer.sendall(b"\x16\x03\x01\x02\x00 this is no HTTP\r\n\r\n")
    assert viewer.recv(100).startswith(b"HTTP/1.1 400")
    assert server.get().status == 200
    assert server.process.poll() is None


@pytest.mark.parametrize("path", ["/", "/api/machine", "/metrics", "/nothing", "/?" + "x" * 2000])
def test_every_answer_tells_the_browser_to_load_nothing_from_elsewhere(
    server: Server, path: str
) -> None:
    headers = server.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers


@needs_root
def test_another_user_of_this_machine_sees_the_metrics_only(server: Server) -> None:
    code = (
        "import sys, http.client as h\n"
        "for path in sys.argv[2:]:\n"
        "    c = h.HTTPConnection('127.0.0.1', int(sys.argv[1])); c.request('GET', path)\n"
        "    print(c.getresponse().status); c.close()"
    )
    paths = ["/", "/api/live", "/api/runs", "/metrics"]
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable  # noqa: PTH110
    done = subprocess.run(
        [python, "-I", "-c", code, str(server.port), *paths],
        user="nobody",
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["403", "403", "403", "200"]


# ---- with a token --------------------------------------------------------------------------------


def test_an_open_address_demands_the_token_for_everything(open_server: Server) -> None:
    assert open_server.token
    assert len(open_server.token) >= 40
    assert open_server.url.endswith(f"/?token={open_server.token}")
    for path in ("/", "/dashboard.js", "/api/machine", "/api/live", "/metrics", "/nothing"):
        answer = open_server.get(path)
        assert answer.status == 401
        assert b"gpu" not in answer.body.lower()


@pytest.mark.parametrize("wrong", ["x", "", "é", "%00", "a" * 43])
def test_a_wrong_token_is_refused(open_server: Server, wrong: str) -> None:
    from urllib.parse import quote

    assert open_server.get(f"/?token={quote(wrong)}").status == 401
    ascii_wrong = wrong.encode("ascii", "ignore").decode()
    assert open_server.get("/metrics", Authorization=f"Bearer {ascii_wrong}").status == 401
    assert open_server.get("/", Cookie=f'oomph-00000000={ascii_wrong}; "=;;').status == 401


def test_the_right_token_opens_by_header_and_by_cookie(open_server: Server) -> None:
    token = str(open_server.token)
    assert open_server.get("/metrics", Authorization=f"Bearer {token}").status == 200
    assert open_server.get("/metrics", Authorization=f"Basic {token}").status == 401
    answer = open_server.get(f"/?run=7&token={token}")
    assert answer.status == 303
    assert answer.headers["location"] == "./?run=7"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert open_server.get("/", Cookie=cookie.partition(";")[0]).status == 200
    assert open_server.get("/", Cookie=f"other=1; {cookie.partition(';')[0]}").status == 200


def test_a_token_of_ones_own_is_not_printed(tmp_path: Path) -> None:
    token = "a-token-of-my-own-making"  # noqa: S105
    with serving(tmp_path, [Gpu()], OOMPH_TOKEN=token) as server:
        assert server.token is None
        assert token not in server.url
        assert server.get("/").status == 401
        assert server.get("/", Authorization=f"Bearer {token}").status == 200


@needs_root
@pytest.mark.parametrize("has_token", [False, True], ids=["without", "with token"])
def test_command_lines_of_others_are_shown_with_a_token_only(
    tmp_path: Path, start_process: Callable[..., int], has_token: bool
) -> None:
    others = start_process(f"train.py {SECRET}", user="nobody")
    mine = start_process("my-own.py")
    gpu = Gpu(processes=[Proc(others), Proc(mine)])
    arguments = ["--token"] if has_token else []
    with serving(tmp_path, [gpu], *arguments, "--per-process") as server:
        headers = {"Authorization": f"Bearer {server.token}"} if has_token else {}
        request = "\r\n".join(f"{name}: {value}" for name, value in headers.items())
        viewer = server.connect()
        head = "GET /api/live HTTP/1.1\r\nHost: localhost\r\n"
        viewer.sendall(f"{head}{request}{chr(13) + chr(10) if request else ''}\r\n".encode())
        told_of = until(frames(viewer), lambda frame: frame["gpus"][0]["processes"])
        processes = told_of["gpus"][0]["processes"]
        told = {process["pid"]: process for process in processes}
        assert "my-own.py" in told[mine]["command"]
        assert told[others]["user"] == "nobody"
        assert (SECRET in (told[others]["command"] or "")) is has_token
        assert told[others]["is_hidden"] is not has_token
        everything = b"".join(server.get(p, **headers).body for p in ("/api/machine", "/metrics"))
        assert (SECRET.encode() in everything) is has_token
        assert SECRET.encode() not in server.get("/metrics", **headers).body
