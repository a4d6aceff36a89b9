"""GPUs that are lost and drivers that hang: the server goes on, and says so."""

from __future__ import annotations

from pathlib import Path

from nvml.machine import Gpu

from serving.served import frames, serving, until

HANGS_US = 6_000_000


def test_a_gpu_that_is_lost_is_told_and_its_metrics_vanish(tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu(util=30), Gpu(util=60)]) as server:
        stream = frames(server.watch())
        until(stream, lambda frame: frame["gpus"][1]["busy_ratio"])
        assert server.metric("oomph_gpu_up", gpu="1") == 1
        server.machine.gpus[1].lost = True
        server.machine.write()
        lost = until(stream, lambda frame: frame["gpus"][1]["used_bytes"] is None)
        assert "lost" in lost["gpus"][1]["problem"]
        assert lost["gpus"][1]["processes"] is None
        assert lost["gpus"][0]["busy_ratio"] is not None
        assert server.metric("oomph_gpu_up", gpu="1") == 0
        told = [line for line in server.get("/metrics").text.splitlines() if 'gpu="1"' in line]
        assert not [line for line in told if "power_watts" in line or "used_bytes" in line]
        # Counters go on to be there: what was used up stays used up.
        assert [line for line in told if line.startswith("oomph_gpu_kernel_active_seconds_total")]


def test_a_driver_that_hangs_stops_neither_the_stream_nor_the_pages(tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu(util=30)]) as server:
        stream = frames(server.watch())
        until(stream, lambda frame: frame["gpus"][0]["busy_ratio"])
        server.machine.latency(HANGS_US, "nvmlDeviceGetMemoryInfo_v2")
        hung = until(stream, lambda frame: frame["problem"])
        assert "the driver has not answered for" in hung["problem"]
        assert next(stream)["number"] == hung["number"] + 1
        assert server.get("/").status == 200
        server.machine.clear_latencies()
        back = until(stream, lambda frame: not frame["problem"])
        assert back["gpus"][0]["busy_ratio"] is not None


def test_it_can_be_ended_while_the_driver_hangs(tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu(util=30)]) as server:
        stream = frames(server.watch())
        next(stream)
        server.machine.latency(600_000_000, "nvmlDeviceGetMemoryInfo_v2")
        until(stream, lambda frame: frame["problem"])
        assert server.end() == (0, "")
