"""What Prometheus reads: by its own parser, and by its own linter where that is there."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving.fakes import FakeSampler, device, process, span, watched

from oomph.records.machine import Process
from oomph.serving.feed import Feed
from oomph.showing.serve import as_metrics
from oomph.units import GIB

Values = dict[tuple[str, ...], float]


def exposition(*processes: Process, per_process: bool = False, **more: float | None) -> bytes:
    """Of one GPU, after two seconds."""
    sampler = FakeSampler((device(processes=processes),), (watched(),))
    sampler.spans += [span(0, 0.0, 1.0, **more), span(0, 1.0, 1.0, **more)]
    sampler.now_s = 2.1
    return as_metrics(Feed(sampler).newest, 3, per_process=per_process)


def values(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """By name, then by the labels beside those of the GPU."""
    found: dict[str, Values] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = sorted(sample.labels.items())
            rest = tuple(v for k, v in labels if k not in ("uuid", "gpu", "name"))
            found.setdefault(sample.name, {})[rest] = sample.value
    return found


def test_figures_are_in_base_units() -> None:
    told = values(exposition(received_bytes=100, sm_active_ratio=0.25))
    assert told["oomph_gpu_memory_total_bytes"] == {(): 80 * GIB}
    assert told["oomph_gpu_memory_used_bytes"] == {(): 20 * GIB}
    assert told["oomph_gpu_kernel_active_ratio"] == {(): 0.5}
    assert told["oomph_gpu_sm_active_ratio"] == {(): 0.25}
    assert told["oomph_gpu_power_watts"] == {(): 200}
    assert told["oomph_gpu_energy_joules_total"] == {(): 400}
    assert told["oomph_gpu_kernel_active_seconds_total"] == {(): 1}
    assert told["oomph_gpu_kernel_known_seconds_total"] == {(): 2}
    assert told["oomph_gpu_pcie_received_bytes_total"] == {(): 200}
    assert told["oomph_gpu_samples_total"] == {(): 2}
    assert told["oomph_serve_viewers"] == {(): 3}


def test_what_is_not_known_is_not_there() -> None:
    told = values(exposition(busy_ratio=None, power_w=None, temperature_c=None))
    missing = {"kernel_active_ratio", "power_watts", "temperature_celsius", "sm_active_ratio"}
    missing |= {"kernel_active_seconds_total", "kernel_known_seconds_total", "energy_joules_total"}
    assert not {f"oomph_gpu_{name}" for name in missing} & told.keys()
    assert told["oomph_gpu_up"] == {(): 1}


def test_there_is_no_series_for_a_process_unless_asked_for() -> None:
    some = (process(11), process(12, owner="others", user="eve", command="secret"))
    told = values(exposition(*some))
    assert told["oomph_gpu_processes"] == {("mine",): 1, ("others",): 1, ("unknown",): 0}
    assert told["oomph_gpu_memory_held_bytes"][("mine",)] == 10 * GIB
    assert "oomph_gpu_process_memory_bytes" not in told
    text = exposition(*some, per_process=True)
    assert values(text)["oomph_gpu_process_memory_bytes"] == {
        ("mine", "11", "ada"): 10 * GIB,
        ("others", "12", "eve"): 10 * GIB,
    }
    assert b"secret" not in text


def test_a_process_that_has_ended_is_gone_at_the_next_scrape() -> None:
    sampler = FakeSampler((device(processes=(process(11),)),), (watched(),))
    sampler.spans.append(span())
    sampler.now_s = 1.1
    feed = Feed(sampler)
    assert b'pid="11"' in as_metrics(feed.newest, 0, per_process=True)
    sampler.devices = (device(processes=()),)
    feed.look()
    assert b'pid="11"' not in as_metrics(feed.newest, 0, per_process=True)


def test_hostile_names_break_no_line() -> None:
    sampler = FakeSampler((device(name='A"\n100\\'),), (watched(),))
    sampler.spans.append(span())
    text = as_metrics(Feed(sampler).newest, 0, per_process=True).decode()
    families = list(text_string_to_metric_families(text))
    names = {s.labels["name"] for f in families for s in f.samples if "name" in s.labels}
    assert names == {'A"\n100\\'}


def test_prometheus_own_linter_has_nothing_to_say() -> None:
    if not shutil.which("promtool"):
        pytest.skip("there is no promtool here: apt-get install prometheus has it")
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=exposition(process(11), per_process=True, received_bytes=1),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
