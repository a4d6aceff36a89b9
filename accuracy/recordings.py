"""`make recordings`: strangers' recorded programs, rehearsed and compared block by block.

The recordings are other people's and not part of this repository. OOMPH_RECORDINGS names their
folder; without one there is nothing to compare. Their code is rehearsed as a user's script would
be, in a sandbox, and the snapshots are read without running anything in them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from accuracy.libraries import FOLDER as LIBRARIES
from oomph.errors import OomphError
from oomph.predicting.alignment import align, blocks_of, blocks_of_trace
from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.recorded import recorded_settings
from oomph.predicting.reductions import sized_on
from oomph.predicting.reproduction import reproduce
from oomph.records.alignment import Alignment, Block, Unmatched
from oomph.records.generation import generation_of
from oomph.records.trace import Trace
from oomph.units import format_bytes

_REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = Path(
    os.environ.get("OOMPH_RECORDINGS", _REPOSITORY.parent / "shared" / "data" / "recordings")
)
PREDICTING = _REPOSITORY / "docs" / "predicting.md"
_BLOCK = "recordings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A program, what it was started with, and the snapshot of its GPU."""

    name: str
    snapshot: str  # in the folder
    sha256: str
    source: str  # repository and commit
    code: str  # the folder in which it is started
    script: str
    arguments: str
    gpu: str  # as in the catalogue
    gpu_known_from: str
    torch: str
    python: str
    # Lines of the script that came after the recording, as the recorded stacks show.
    later_lines: tuple[str, ...] = ()


_SMALL: dict[str, Any] = {
    "source": "Okazaki-Yumemi/CS336 c719a58c",
    "code": "cs336_small/code",
    "script": "scripts/benchmark.py",
    "gpu": "rtx4090",
    "gpu_known_from": "not known; nothing in this recording depends on it but the workspace, which"
    " says that it is not of compute capability 9.0",
    "torch": "2.11",
    "python": "3.13.12",
}
_LARGE: dict[str, Any] = {
    "source": "LINYUNLinYun/CS336-assignment2-systems d7b9b891",
    "code": "cs336_xl/code",
    "script": "cs336_systems/benchmark_nvtx.py",
    "gpu": "rtx-pro-6000",
    # Of the cards with 94.97 GiB for torch. An H100 NVL has 93.1 GiB and an H20, of 96 GB as well,
    # is of compute capability 9.0, where cuBLAS takes 32 MiB: here it takes 8,519,680 bytes.
    "gpu_known_from": "its 94.97 GiB and cuBLAS's workspace: 96 GB, and not of capability 9.0",
    "torch": "2.11",
    "python": "3.12.3",
    # The recorded stacks call run_step from line 284, not 335, and the first frees recorded are
    # those of the gradients that the last step of the warm-up left.
    "later_lines": ("    optimizer.zero_grad(set_to_none=True)", "    torch.cuda.empty_cache()"),
}


def _small(mode: str, sha256: str) -> Recording:
    return Recording(
        name=f"small LM, {mode}, 128 tokens",
        snapshot=f"cs336_small/memory_small_{mode}_128.pickle",
        sha256=sha256,
        arguments=f"--model-size small --mode {mode} --context-length 128 --memory-profile",
        **_SMALL,
    )


def _large(mode: str, length: str, precision: str, sha256: str) -> Recording:
    named = {"none": "fp32"}.get(precision, precision)
    return Recording(
        name=f"2.7 B LM, {mode.replace('_', ' ')}, {length} tokens, {named}",
        snapshot=f"cs336_xl/xl_ctx{length}_{mode}_{precision}.pickle",
        sha256=sha256,
        arguments=f"--model-size xl --context-length {length} --batch-size 4 --mode {mode}"
        " --warmup-steps 5 --measurement-steps 1 --device cuda:0"
        f" --mixed-precision {precision} --profile-memory",
        **_LARGE,
    )


_LARGE_ROWS = """\
forward 512 none b179faa688f6a46367e16ee961f3cfeafcb0b8fd288955422b01eab9156f3965
forward 512 bf16 14770fbd112efa4dd2b47ddddf219f1567366e9c7d6869e4bfaff50cae407e72
full_step 128 none 9be5067b37d7ff1c03b53bb8d21e8313a753fc6a2b284d355ab4e516169c75fb
full_step 128 bf16 94a3380f9b8d0f9bfff1fcf1a0cdbd5889cb1299829407951650f34e2b688a83
full_step 512 none 796e9412a43bc251c638ad44682060d6eea2e45e7c9363f8abd15ef53d91b83c
full_step 512 bf16 a4069a94f03933ae73c5bd8cb67187fc8411df9e471742794fa26e5a69e1703a
"""
RECORDINGS = (
    _small("forward", "d9cea195a006890d82e7394b918b3c8cebb7598a56d664951703c9f953cd553c"),
    _small("train", "c7f115bf832c6224d4409b8b6f241b6d3b2353530b19e8db619fa8ffefab2cb1"),
    *(_large(*row.split()) for row in _LARGE_ROWS.splitlines()),
)

# ---- what the GPU did ----------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dicts, texts and numbers; whatever would run code is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:  # noqa: ARG002
        raise pickle.UnpicklingError("a snapshot has no classes")

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002
        raise pickle.UnpicklingError("a snapshot refers to nothing outside")


@dataclass(frozen=True, slots=True)
class Span:
    """The recorded part of a program: what is there when it begins, its requests, its peaks."""

    blocks: Sequence[Block]
    live_bytes: int
    allocated_bytes: int  # the most in it
    reserved_bytes: int


def recorded_span(recording: Recording) -> tuple[Span, AllocatorSettings]:
    """Read a snapshot. Raises LookupError if it is another file than the figures are about."""
    content = (FOLDER / recording.snapshot).read_bytes()
    if hashlib.sha256(content).hexdigest() != recording.sha256:
        raise LookupError(f"{recording.snapshot} is another file")
    snapshot = _PlainUnpickler(io.BytesIO(content)).load()
    device = max(range(len(snapshot["device_traces"])), key=_num_events(snapshot))
    segments = [each for each in snapshot["segments"] if each["device"] == device]
    trace = snapshot["device_traces"][device]
    settings = recorded_settings(snapshot.get("allocator_settings"), segments)
    exact = reproduce(segments, trace, settings)  # a large block may be longer than requested
    if exact.problem is not None:
        raise LookupError(f"the allocator is not reproduced: {exact.problem}")
    span = Span(
        _recorded_blocks(trace),
        exact.begin_allocated_bytes,
        exact.peak_allocated_bytes,
        exact.peak_reserved_bytes,
    )
    return span, settings


def _num_events(snapshot: Any) -> Any:
    return lambda device: len(snapshot["device_traces"][device])


def _recorded_blocks(trace: Sequence[Any]) -> list[Block]:
    sizes: list[int] = []
    labels: list[str] = []
    events: list[int] = []
    numbers: dict[int, int] = {}
    for event in trace:
        if event["action"] == "alloc":
            sizes.append(event["size"])
            labels.append(_label(event.get("frames", ())))
            numbers[event["addr"]] = len(sizes)
            events.append(len(sizes))
        elif event["action"] == "free_requested" and event["addr"] in numbers:
            events.append(-numbers.pop(event["addr"]))
    return blocks_of(sizes, events, labels)


_OP = re.compile(r"at::_ops::(\w+)::")
_NODE = re.compile(r"torch::autograd::generated::(\w+)::apply")
_KERNELS = ("gpu_reduce_kernel", "index_put_with_sort", "radix_sort", "getNewWorkspace")


def _label(frames: Sequence[Any]) -> str:
    """Return the op that a block was made for, inside which kernel, and of which gradient."""
    names = [frame["name"] for frame in frames]
    found = next((match[1] for name in names if (match := _OP.match(name))), "no op")
    inside = [kernel for kernel in _KERNELS if any(kernel in name for name in names)]
    node = next((match[1] for name in names if (match := _NODE.match(name))), None)
    return " in ".join([found, *inside, *([node] if node else [])])


# ---- what the rehearsal does ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """One recording beside its rehearsal."""

    recording: Recording
    recorded: Span
    predicted: Span
    alignment: Alignment
    without: Alignment  # what the kernels take by themselves left out


def compare(recording: Recording) -> Compared:
    """Rehearse a recorded program. Raises OomphError, LookupError."""
    recorded, settings = recorded_span(recording)
    trace = _as_recorded(_rehearsed(recording), recording)
    begin, end = trace.recorded or (trace.step_starts[-1], len(trace.events))
    blocks = blocks_of_trace(trace, begin, end)
    bare = blocks_of_trace(_without_insides(trace), begin, end)
    return Compared(
        recording,
        recorded,
        _replayed(trace, settings, begin, end, blocks),
        align(blocks, recorded.blocks),
        align(bare, recorded.blocks),
    )


def _rehearsed(recording: Recording) -> Trace:
    """Rehearse a copy of the program, as it was when it was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        shutil.copytree(FOLDER / recording.code, code, copy_function=shutil.copyfile)
        script = code / recording.script
        lines = script.read_text("utf-8").splitlines()
        kept = [line for line in lines if line not in recording.later_lines]
        script.write_text("\n".join(kept), "utf-8")
        return _rehearsed_in(code, recording)


def _rehearsed_in(code: Path, recording: Recording) -> Trace:
    from oomph.records.script import Script
    from oomph.rehearsing.script.sandboxed import rehearser_of
    from oomph.sensing.target import find_target

    places = [str(code / "cs336-basics"), str(LIBRARIES.parent / "recordings")]
    before, path = os.environ.get("PYTHONPATH"), list(sys.path)
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    sys.path[:0] = places
    script = Script(
        path=recording.script, arguments=tuple(recording.arguments.split()), directory=str(code)
    )
    try:
        with rehearser_of(script, find_target(recording.gpu, None), lambda _: None) as rehearser:
            return rehearser.first.trace
    finally:
        sys.path[:] = path
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _as_recorded(trace: Trace, recording: Recording) -> Trace:
    """Return the trace on the recording's GPU and with its torch's workspace of cuBLAS."""
    from oomph.sensing.target import find_target

    target = find_target(recording.gpu, None)
    workspace = generation_of(target.capability).cublas_workspace_bytes(recording.torch)
    sized = sized_on(trace, target.multiprocessors)
    return replace(
        sized,
        allocations=[
            replace(each, size_bytes=workspace) if each.category == "workspace" else each
            for each in sized.allocations
        ],
    )


def _without_insides(trace: Trace) -> Trace:
    """Return the trace without what is taken inside kernels."""
    return replace(
        trace,
        allocations=[
            replace(each, size_bytes=0) if each.op.endswith("(inside)") else each
            for each in trace.allocations
        ],
    )


def _replayed(
    trace: Trace, settings: AllocatorSettings, begin: int, end: int, blocks: Sequence[Block]
) -> Span:
    """Replay the whole program and return its peaks between two events."""
    allocator = CachingAllocator(settings)
    emptied = set(trace.emptied_at)
    addresses: dict[int, int] = {}
    live_bytes = most_allocated = most_reserved = 0
    for at, event in enumerate([*trace.events[:end], 0]):
        if at in emptied and at < end:
            allocator.empty_cache()
        if at == begin:
            live_bytes = allocator.allocated_bytes
        if at >= begin:
            most_allocated = max(most_allocated, allocator.allocated_bytes)
            most_reserved = max(most_reserved, allocator.reserved_bytes)
        if event > 0 and trace.allocations[event - 1].size_bytes:
            one = trace.allocations[event - 1]
            addresses[event] = allocator.malloc(one.size_bytes, one.stream)
        elif -event in addresses:
            allocator.free(addresses.pop(-event))
    return Span(blocks, live_bytes, most_allocated, most_reserved)


# ---- the report ----------------------------------------------------------------------------------


def table(found: Sequence[Compared]) -> list[str]:
    """Return a row for each recording."""
    head = (
        "| recorded program | blocks | in order | only predicted | only recorded | allocated |"
        " reserved | live at its start | in order without what kernels take inside |"
    )
    return [head, "|---|--:|--:|--:|--:|--:|--:|--:|--:|", *(_row(each) for each in found)]


def _row(each: Compared) -> str:
    alignment, recorded, predicted = each.alignment, each.recorded, each.predicted
    cells = (
        each.recording.name,
        f"{alignment.num_recorded:,}",
        _share(alignment),
        _num(alignment.only_predicted),
        _num(alignment.only_recorded),
        _difference(predicted.allocated_bytes, recorded.allocated_bytes),
        _difference(predicted.reserved_bytes, recorded.reserved_bytes),
        _difference(predicted.live_bytes, recorded.live_bytes),
        _share(each.without),
    )
    return f"| {' | '.join(cells)} |"


def _share(alignment: Alignment) -> str:
    """Return the share in order, never rounded up to all."""
    return f"{int(alignment.matched_ratio * 1e5) / 1e3:.2f} %"


def _num(unmatched: Sequence[Unmatched]) -> str:
    return f"{sum(each.num_blocks for each in unmatched):,}"


def _difference(predicted: int, recorded: int) -> str:
    if predicted == recorded:
        return f"{format_bytes(recorded)}, equal"
    return f"{format_bytes(recorded)}, {predicted / recorded - 1:+.3%}"


def details(each: Compared) -> Iterator[str]:
    """Yield what one recording is, and where its rehearsal differs."""
    one = each.recording
    yield f"## {one.name}"
    yield f"{one.source}: python {one.script} {one.arguments}"
    yield f"torch {one.torch}, Python {one.python}, {_gpu(one)} ({one.gpu_known_from})"
    yield f"{one.snapshot}, SHA-256 {one.sha256}"
    if one.later_lines:
        yield f"rehearsed without what came later: {'; '.join(map(str.strip, one.later_lines))}"
    yield f"freed before or after another block: {each.alignment.num_freed_elsewhere:,}"
    for side, unmatched in (
        ("only recorded", each.alignment.only_recorded),
        ("only predicted", each.alignment.only_predicted),
    ):
        for block in unmatched:
            size = format_bytes(block.size_bytes)
            yield f"{side}: {block.num_blocks:,} x {size} of {block.label}"
    difference = each.alignment.first_difference
    if difference is not None:
        yield f"the first difference is after {difference.at:,} blocks:"
        yield f"  predicted {_block(difference.predicted)}, recorded {_block(difference.recorded)}"
    yield ""


def _gpu(recording: Recording) -> str:
    from oomph.sensing.target import find_target

    target = find_target(recording.gpu, None)
    return f"{target.model.title} with {target.multiprocessors.num} SMs"


def _block(block: Block | None) -> str:
    return "nothing" if block is None else f"{format_bytes(block.size_bytes)} of {block.label}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy.recordings", description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write it into docs/predicting.md")
    parser.add_argument("--only", default="", help="only recordings with this in their name")
    options = parser.parse_args()
    if options.docs and options.only:
        parser.error("--docs wants all recordings")
    found: list[Compared] = []
    for recording in RECORDINGS:
        if options.only not in recording.name:
            continue
        if not (FOLDER / recording.snapshot).exists():
            print(f"{recording.name}: not here ({recording.snapshot})", file=sys.stderr)
            continue
        print(f"rehearsing {recording.name}", file=sys.stderr)
        try:
            found.append(compare(recording))
        except (OomphError, LookupError) as error:
            print(f"{recording.name}: {error}", file=sys.stderr)
    if not found:
        print("there are no recordings to compare; OOMPH_RECORDINGS names their folder")
        return
    print("\n".join(line for each in found for line in details(each)))
    lines = "\n".join(table(found))
    print(lines)
    if options.docs:
        from docs.generate import replace_block

        PREDICTING.write_text(replace_block(PREDICTING.read_text("utf-8"), _BLOCK, lines), "utf-8")


if __name__ == "__main__":
    main()
