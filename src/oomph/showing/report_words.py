"""Report -> the sentences that the terminal and the page have in common."""

from __future__ import annotations

import shlex
import time

from oomph.records.report import Finding, GpuFigures, HostFigures, Report, Spread, StepFigures
from oomph.units import format_bytes, format_duration, format_rate, format_ratio

SOURCES = {"torch": "torch, exact", "accounting": "driver, exact", "polled": "polled"}


def title(report: Report) -> str:
    """What ran."""
    return f"{report.run}: {shlex.join(report.command)}"


def circumstances(report: Report) -> str:
    """Where, when, how long, and how it ended."""
    by = f" by {report.user}" if report.user else ""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.started_at))
    lasted = format_duration(report.lasted_s)
    if report.halted_s:
        lasted += f" (of which it was halted for {format_duration(report.halted_s)})"
    return f"on {report.host}{by}, {when}, for {lasted}, {_end(report)}"


def _end(report: Report) -> str:
    if not report.has_ended:
        return "not seen to end"
    if report.signal:
        return f"ended by {report.signal}"
    return "exit unknown" if report.exit_code is None else f"exit {report.exit_code}"


def whose(finding: Finding, report: Report) -> str:
    """Which GPUs it is about; empty where there is only one."""
    labels = {one.gpu: one.index for one in report.gpus}
    if not finding.gpus or len(labels) < 2:
        return ""
    if set(finding.gpus) == set(labels):
        return "both GPUs" if len(labels) == 2 else f"all {len(labels)} GPUs"
    listed = ", ".join(str(labels.get(gpu, gpu)) for gpu in finding.gpus)
    return f"GPU {listed}" if len(finding.gpus) == 1 else f"GPUs {listed}"


def headline(finding: Finding, report: Report) -> str:
    """The sentence, with the GPUs in front where that is needed."""
    of = whose(finding, report)
    return f"{of}: {finding.sentence}" if of else finding.sentence


def peak(gpu: GpuFigures) -> str:
    memory = gpu.memory
    if memory.peak_bytes is None:
        return "unknown"
    if not memory.total_bytes:
        return format_bytes(memory.peak_bytes)
    share = format_ratio(memory.peak_bytes / memory.total_bytes)
    return f"{format_bytes(memory.peak_bytes)} of {format_bytes(memory.total_bytes)} ({share})"


def peak_note(gpu: GpuFigures) -> str:
    """Who says so, and what that can miss."""
    memory = gpu.memory
    if memory.peak_source is None:
        return ""
    source = {
        "torch": "reserved by torch's allocator, exact",
        "accounting": "by the driver's accounting, exact",
        "polled": "as polled",
    }[memory.peak_source]
    told = [source]
    if memory.allocated_bytes is not None:
        told.append(f"{format_bytes(memory.allocated_bytes)} of it in tensors")
    if memory.peak_misses:
        told.append(memory.peak_misses)
    if memory.peak_source != "polled" and memory.seen_bytes is not None:
        told.append(f"the GPU as a whole was seen at {format_bytes(memory.seen_bytes)}")
    return "; ".join(told)


def busy(gpu: GpuFigures) -> str:
    """Its mean while the run worked; of one that never did, of the whole run."""
    if gpu.busy is None:
        return "unknown"
    return format_ratio((gpu.busy.working or gpu.busy.whole).mean)


def busy_note(gpu: GpuFigures) -> str:
    """Mean and quantiles, of the training and of the whole run."""
    if gpu.busy is None:
        return "nobody could read it"
    told = []
    if gpu.busy.working:
        told.append(f"while it worked {_spread(gpu.busy.working)}")
    told.append(f"over the whole run {_spread(gpu.busy.whole)}")
    if gpu.busy.source == "polled":
        told.append("polled: short bursts can be missed")
    return "; ".join(told)


def _spread(one: Spread) -> str:
    p10, p50, p90 = map(format_ratio, (one.p10, one.p50, one.p90))
    return f"{format_ratio(one.mean)} (p10 {p10}, median {p50}, p90 {p90})"


def power(gpu: GpuFigures) -> str:
    one = gpu.power
    if one.mean_w is None:
        return "unknown"
    limit = f" of {one.limit_w:.0f}" if one.limit_w else ""
    return f"{one.mean_w:.0f}{limit} W"


def idle(gpu: GpuFigures) -> str:
    """How often and how long it stood still."""
    if gpu.busy is None:
        return "unknown"
    count, total = gpu.busy.num_gaps, format_duration(gpu.busy.gaps_s)
    return "none" if not count else f"{count} gap{'s' * (count > 1)}, {total}"


def steps(one: StepFigures) -> str:
    parts = [
        f"{one.num_steps} steps of {_short(one.step_s)} (longest {_short(one.longest_step_s)})"
    ]
    if one.samples_per_s is not None:
        parts.append(f"{format_rate(one.samples_per_s)} samples a second")
    if one.data_wait_ratio is not None:
        parts.append(f"waits for data {format_ratio(one.data_wait_ratio)} of the time")
    return ", ".join(parts)


def host(one: HostFigures) -> str:
    parts = []
    if one.cpu_cores is not None:
        of = f" of {one.num_cpus}" if one.num_cpus else ""
        parts.append(f"{one.cpu_cores:.1f}{of} CPUs busy")
    if one.busiest_cpu_cores is not None:
        parts.append(f"its busiest process {one.busiest_cpu_cores:.1f}")
    if one.memory_bytes is not None:
        parts.append(f"up to {format_bytes(one.memory_bytes)}")
    if one.num_processes is not None:
        parts.append(f"up to {one.num_processes} process{'es' * (one.num_processes != 1)}")
    if one.others_cpu_cores is not None and one.others_cpu_cores >= 0.1:
        parts.append(f"other processes used {one.others_cpu_cores:.1f} CPUs")
    if one.throttled_ratio:
        parts.append(f"held back by its CPU limit {format_ratio(one.throttled_ratio)} of the time")
    if one.swapping_ratio:
        parts.append(f"swapping {format_ratio(one.swapping_ratio)} of the time")
    return ", ".join(parts)


def _short(seconds: float) -> str:
    """
    >>> _short(0.0421), _short(1.5), _short(125)
    ('42.1 ms', '1.5 s', '2 min 5 s')
    """
    if seconds >= 60:
        return format_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
