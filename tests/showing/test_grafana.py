"""The dashboard for Grafana: its queries against what is told, and against a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvml.machine import Gpu, Proc
from serving.fakes import FakeSampler, device, process, span, watched
from serving.served import GUARD_S, Server, serving

from oomph.serving.feed import Feed
from oomph.showing.serve import as_metrics, dashboard

# What Grafana puts in for its variables.
FILLED_IN = {"$__rate_interval": "8s", "$instance": ".*", "$gpu": ".*"}
POWER_W = 250


def queries() -> dict[str, str]:
    panels = json.loads(dashboard())["panels"]
    return {panel["title"]: target["expr"] for panel in panels for target in panel["targets"]}


def variables() -> list[str]:
    listed = json.loads(dashboard())["templating"]["list"]
    return [one["query"]["query"] for one in listed if one["type"] == "query"]


def test_every_metric_that_is_asked_for_is_told() -> None:
    sampler = FakeSampler((device(processes=(process(),)),), (watched(),))
    sampler.spans.append(span())
    text = as_metrics(Feed(sampler).newest, 0, per_process=False).decode()
    told = set(re.findall(r"^(oomph_\w+)\{", text, re.MULTILINE))
    asked = set(re.findall(r"oomph_\w+", " ".join([*queries().values(), *variables()])))
    assert len(asked) >= 9
    assert asked <= told


def test_panels_have_a_place_of_their_own() -> None:
    panels = json.loads(dashboard())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    assert all(panel["description"] and panel["title"] for panel in panels)


class Prometheus:
    """A real one, that scrapes the server each second."""

    def __init__(self, server: Server, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        target = f"127.0.0.1:{server.port}"
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            "scrape_configs:\n"
            "  - job_name: oomph\n"
            f"    static_configs: [{{targets: ['{target}']}}]\n"
            "    authorization: {credentials: " + str(server.token) + "}\n"
        )
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The result; [] while there is none yet."""
        address = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(address) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        except OSError:  # it has not started yet
            return []
        assert content["status"] == "success", query
        result: list[dict[str, Any]] = content["data"]["result"]
        return result

    def wait_for(self, query: str) -> list[dict[str, Any]]:
        for _ in range(2 * GUARD_S):
            if found := self.ask(query):
                return found
            assert self.process.poll() is None
            time.sleep(0.5)
        raise AssertionError(f"nothing ever answers {query}")


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    if not shutil.which("prometheus"):
        pytest.skip("there is no Prometheus here: apt-get install prometheus has it")
    gpus = [Gpu(util=25, processes=[Proc(4_000_000)], event_reasons=4), Gpu(lost=True)]
    with serving(tmp_path, gpus, "--token") as server:
        server.machine.rate(0, "energy_mj", POWER_W * 1000)
        running = Prometheus(server, tmp_path)
        try:
            yield running
        finally:
            running.process.kill()
            running.process.wait()


@pytest.mark.slow
def test_every_query_is_answered_by_a_real_prometheus(prometheus: Prometheus) -> None:
    prometheus.wait_for(f"rate(oomph_gpu_energy_joules_total[8s]) > {0.7 * POWER_W}")
    prometheus.wait_for("rate(oomph_gpu_throttled_seconds_total[8s]) > 0")
    answers = {}
    for title, query in queries().items():
        for name, value in FILLED_IN.items():
            query = query.replace(name, value)
        answers[title] = prometheus.wait_for(query)
    assert {title for title, found in answers.items() if not found} == set()
    busy = float(answers["Kernel-active time"][0]["value"][1])
    assert busy == pytest.approx(0.25, abs=0.01)
    power = float(answers["Power"][0]["value"][1])
    assert power == pytest.approx(POWER_W, rel=0.3)  # over few seconds, and at its own moments
    assert answers["GPUs that do not answer"][0]["metric"]["gpu"] == "1"
    assert answers["Clocks held down"][0]["metric"]["cause"] == "power"
    assert prometheus.ask('up{job="oomph"}')[0]["value"][1] == "1"
