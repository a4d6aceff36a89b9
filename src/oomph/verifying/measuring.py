"""A workload or a script -> what a few of its training steps take on the GPU of this process.

Runs in a child process of its own, so that the peaks and the CUDA context are those of the training
alone. The first two steps are recorded by torch's memory history; it slows the host, so the steps
that are timed come after it is off.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import oomph
from oomph.errors import Unreadable, UserCodeError
from oomph.out_of_memory import which_memory
from oomph.pretending.emulated import EmulatedGpu
from oomph.pretending.emulated_run import settings_text
from oomph.pretending.patches import Patches
from oomph.records.script import Script
from oomph.records.verification import Measured, Measurement, OnGpu, Recorded, Site
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.fault import is_installed
from oomph.rehearsing.rehearse import make_batch, tensors_of
from oomph.rehearsing.script.run import run_as_main, start_as_python_does
from oomph.rehearsing.traces import MOST_MICRO_STEPS
from oomph.tricks.apply import around_forward, put_on_built, put_on_model, put_on_optimizer
from oomph.tricks.apply import set_precision as switch_precision
from oomph.tricks.offload_optimizer import scaler_on_host, to_clip
from oomph.tricks.trick import to_put_on
from oomph.units import format_bytes

NUM_RECORDED = 2  # steps, as many as a rehearsal has
# Judgement: enough for a median, and a zoo of a dozen models in two minutes.
_LEAST_TIMED, _MOST_TIMED, _TIMED_FOR_S = 5, 20, 3.0
_MOST_ROUNDS = 12  # judgement: a GradScaler finds its scale in fewer skipped steps
_MOST_EVENTS = 2_000_000  # judgement: some 10^5 are usual; each takes a hundred bytes and its stack
_GROWS_BY = 1.005  # judgement: a leak shows in a few steps
_LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}

_SAYS_MORE = "python -c 'import torch; torch.ones(1).cuda()', which says more"
_SKIPPED = (
    "the loss scaler skipped {} of the first steps, as it does until it has found its scale; they"
    " are left out of the comparison"
)
_GROWS = (
    "memory went on growing: at most {} allocated in the {} steps that oomph rehearses, {} in {}"
    " steps; does the loop keep something of every step?"
)
_SHORT = "the history of the run was too long to keep, so its requests are not compared"
_NOT_TIMED = "times are not compared: the emulated GPU computes on the CPU"


@contextlib.contextmanager
def using(gpu: OnGpu, *, attempt: str = _SAYS_MORE) -> Iterator[None]:
    """Emulate the GPU, or check that torch can use it. Raises Unreadable."""
    if gpu.emulated_bytes is None:
        _check_cuda(attempt)
        yield
        return
    with EmulatedGpu(gpu.emulated_bytes, None, None):
        yield


def _check_cuda(attempt: str) -> None:
    version = torch.__version__
    if not torch.version.cuda:
        raise Unreadable(
            f"torch {version} cannot use a GPU",
            because="it was built without CUDA",
            attempt="pip install torch, in the build for your driver",
        )
    if not torch.cuda.is_available():
        raise Unreadable(
            f"torch {version} finds no GPU, though the driver has one",
            because=f"it was built for CUDA {torch.version.cuda}, or may not open the device",
            attempt=attempt,
        )


def site_of(gpu: OnGpu) -> Site:
    """Describe the GPU and the software of this process."""
    properties = torch.cuda.get_device_properties(0)
    is_emulated = gpu.emulated_bytes is not None
    cudnn = None if is_emulated else torch.backends.cudnn.version()
    return Site(
        gpu_name=properties.name,
        is_emulated=is_emulated,
        total_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        num_sms=None if is_emulated else properties.multi_processor_count,
        driver_version=gpu.driver_version,
        torch_version=str(torch.__version__),
        cuda_version=None if is_emulated else torch.version.cuda,
        cudnn_version=None if cudnn is None else str(cudnn),
        python_version=platform.python_version(),
        oomph_version=oomph.__version__,
        allocator=settings_text(),
    )


# ---- following a run, step by step ---------------------------------------------------------------


class Follower:
    """Records the first steps of a training run, and times the next ones.

    The run says when its model is built and when it has made a step; `is_done` says when to stop.
    """

    def __init__(self, gpu: OnGpu) -> None:
        self._gpu = gpu
        self._times = gpu.emulated_bytes is None
        self._marks: list[tuple[int, bool]] = []  # microseconds, and whether a step was made
        self._recorded: Recorded | None = None
        self._recorded_peak_bytes = 0  # allocated
        self.num_made = self._num_rounds = 0
        self.has_begun = False
        self._ends: list[Any] = []  # CUDA events
        self._timed_since_s = 0.0
        self.is_done = False

    def begin(self) -> None:
        """Start the history, before the model is built. CUDA must have started."""
        self.has_begun = True
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=_MOST_EVENTS
        )

    def built(self) -> None:
        """Note that the model is built and the first step begins."""
        self._mark(is_made=True)

    def stepped(self, *, is_made: bool = True) -> None:
        """Note the end of a step; not made is one that the loss scaler skipped."""
        self.num_made += is_made
        self._num_rounds += 1
        if self._recorded is None:
            self._mark(is_made=is_made)
            if self.num_made >= NUM_RECORDED or self._num_rounds >= _MOST_ROUNDS:
                self._end_history()
        elif self._times:
            self._time()
        else:
            self.is_done = True

    def _mark(self, *, is_made: bool) -> None:
        """Put a snapshot into the history: among its events it marks this moment."""
        self._marks.append((time.time_ns() // 1000, is_made))
        _snapshot_without_events()

    def _end_history(self) -> None:
        events = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
        here = events[torch.cuda.current_device()] if events else []
        recorded = recorded_of(here, self._marks)
        has_all = self.num_made >= NUM_RECORDED
        self._recorded = replace(recorded, is_whole=recorded.is_whole and has_all)
        self._recorded_peak_bytes = torch.cuda.max_memory_allocated()

    def _time(self) -> None:
        """Note the end of a step without waiting for the GPU, which a training loop does not do."""
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._ends.append(end)
        if len(self._ends) == 1:  # the first step without history is left out
            self._timed_since_s = time.monotonic()
            return
        num_timed = len(self._ends) - 1
        is_long = time.monotonic() - self._timed_since_s >= _TIMED_FOR_S
        self.is_done = num_timed >= (_LEAST_TIMED if is_long else _MOST_TIMED)

    def answer(self, *, ran_out: bool = False, notes: Sequence[str] = ()) -> Measurement:
        """Return what was measured so far."""
        if self._recorded is None:
            self._end_history()
        assert self._recorded is not None  # noqa: S101 - set by the call above
        step_s = None
        if not ran_out:
            torch.cuda.synchronize()
            pairs = zip(self._ends, self._ends[1:], strict=False)
            taken_s = [begin.elapsed_time(end) / 1000 for begin, end in pairs]
            step_s = median(taken_s) if taken_s else None
        measured = Measured(
            allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.max_memory_reserved(),
            device_bytes=None,  # known to the driver alone
            step_s=step_s,
            num_steps=self.num_made,
            num_timed=max(len(self._ends) - 1, 0),
            ran_out=ran_out,
            tf32=_uses_tf32(),
            cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
            notes=(*notes, *self._notes()),
        )
        return Measurement(
            site=site_of(self._gpu),
            measured=measured,
            recorded=self._recorded,
            reserved_bytes=torch.cuda.memory_reserved(),
        )

    def _notes(self) -> Iterator[str]:
        if self.num_made >= NUM_RECORDED and self._recorded and not self._recorded.is_whole:
            yield _SHORT
        num_skipped = sum(not is_made for _, is_made in self._marks)
        if num_skipped:
            yield _SKIPPED.format(num_skipped)
        peak_bytes = torch.cuda.max_memory_allocated()
        if peak_bytes > self._recorded_peak_bytes * _GROWS_BY:
            before, now = map(format_bytes, (self._recorded_peak_bytes, peak_bytes))
            yield _GROWS.format(before, NUM_RECORDED, now, self.num_made)
        if not self._times:
            yield _NOT_TIMED


def _uses_tf32() -> bool | None:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the script has set torch's newer switches, and torch refuses to mix them
        return None


def _snapshot_without_events() -> None:
    try:
        torch.cuda.memory.memory_snapshot(include_traces=False)
    except TypeError:  # torch before 2.10 has no such argument
        torch.cuda.memory._snapshot()


# ---- a history -> the requests of the steps that were made ---------------------------------------


def recorded_of(events: Sequence[Mapping[str, Any]], marks: Sequence[tuple[int, bool]]) -> Recorded:
    """Return the requests of a history, without those of steps that were skipped.

    What a skipped step takes for good stays: cuBLAS's workspace, the scaler's own tensors. A free
    is where the program drops the block. The GPU may need it a little longer.
    """
    ends = _ends_of_pieces(events, [at_us for at_us, _ in marks])
    is_whole = len(events) < _MOST_EVENTS and len(ends) == len(marks)
    pieces = list(zip([0, *ends], ends, (is_made for _, is_made in marks), strict=False))
    stays = _made_or_for_good(events, pieces)
    sizes: list[int] = []
    lines: list[str] = []
    found: list[int] = []
    live: dict[int, int] = {}
    counts: list[int] = []
    for begin, end, is_made in pieces:
        for place in range(begin, end):
            event = events[place]
            address = event.get("addr", 0)
            if place in stays:
                sizes.append(int(event["size"]))
                lines.append(_line_of(event.get("frames", ())))
                found.append(len(sizes))
                live[address] = len(sizes)
            elif event["action"] == "free_requested" and address in live:
                found.append(-live.pop(address))
        if is_made:
            counts.append(len(found))
    return Recorded(
        sizes=tuple(sizes),
        lines=tuple(lines),
        events=tuple(found),
        marks=tuple(counts),
        is_whole=is_whole,
    )


def _made_or_for_good(
    events: Sequence[Mapping[str, Any]], pieces: Sequence[tuple[int, int, bool]]
) -> set[int]:
    """Return the places of the requests that count."""
    made: set[int] = set()
    live: dict[int, int] = {}
    for begin, end, is_made in pieces:
        for place in range(begin, end):
            event = events[place]
            if event["action"] == "alloc":
                live[event["addr"]] = place
                if is_made:
                    made.add(place)
            elif event["action"] == "free_requested":
                live.pop(event["addr"], None)
    return made | set(live.values())


def _ends_of_pieces(events: Sequence[Mapping[str, Any]], marks_us: Sequence[int]) -> list[int]:
    """Return the place of each mark's snapshot; a script may take others between them."""
    places = [at for at, event in enumerate(events) if event["action"] == "snapshot"]
    found: list[int] = []
    for at_us in marks_us:
        later = [place for place in places if not found or place > found[-1]]
        if not later:
            break
        found.append(min(later, key=lambda place: abs(events[place].get("time_us", 0) - at_us)))
    return found


def _line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the user's innermost line of a stack, as "train.py:12"."""
    for frame in frames:
        if frame["filename"] == __file__:  # what called it is no part of the training
            break
        if _is_users(frame["filename"]):
            return f"{Path(frame['filename']).name}:{frame['line']}"
    return ""


@cache
def _is_users(path: str) -> bool:
    return path.endswith(".py") and not is_installed(path)


# ---- a workload ----------------------------------------------------------------------------------


def measure_workload(workload: Workload, variant: Variant, gpu: OnGpu) -> Measurement:
    """Train a workload for a few steps, and return what they took."""
    for trick in to_put_on(variant):
        trick.before_cuda()
    with using(gpu):
        follower = Follower(gpu)
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        switch_precision(variant)
        follower.begin()
        try:
            _train(workload, variant, follower)
        except Exception as error:
            if which_memory(error) != "gpu":
                raise
            ran_out = True
        else:
            ran_out = False
        return follower.answer(ran_out=ran_out)


def _train(workload: Workload, variant: Variant, follower: Follower) -> None:
    training = _Training(workload, variant)
    follower.built()
    most = min(variant.accumulation, MOST_MICRO_STEPS)  # as in the rehearsal
    num_steps = 0
    while not follower.is_done:
        is_recorded = num_steps < NUM_RECORDED
        training.is_timed = not is_recorded
        is_made = training.step(most if is_recorded else variant.accumulation)
        num_steps += is_made
        follower.stepped(is_made=is_made)


class _Training:
    """The training loop of a rehearsal, for real: it holds the same references."""

    def __init__(self, workload: Workload, variant: Variant) -> None:
        self.workload, self.variant = workload, variant
        model = put_on_built(workload.model(), variant)
        for trick in to_put_on(variant):
            if trick.cast is not None:
                trick.cast(model)
        self.model = model.to("cuda").train()
        self.model = put_on_model(self.model, variant)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = put_on_optimizer(workload.optimizer, parameters, variant)
        self.scaler = _scaler() if variant.precision == "fp16" else None
        self.loss: Any = None
        self.batch: Any = None
        self.kept_outputs: Any = None
        if workload.keeps == "outputs":
            self.model.register_forward_hook(self._keep)
        self._has_stepped = False
        self.is_timed = False
        self._host_batch = _made_once(workload.batch)
        if self.scaler is not None:
            self.optimizer.register_step_post_hook(self._note_step)
        gc.collect()

    def _keep(self, _: Any, __: Any, returned: Any) -> None:
        self.kept_outputs = returned

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def step(self, accumulation: int) -> bool:
        """Make one optimizer step; return whether the optimizer made it."""
        self._has_stepped = self.scaler is None
        self.optimizer.zero_grad(set_to_none=self.workload.zero_grad_to_none)
        for _ in range(accumulation):
            self._micro_step(accumulation)
        if self.workload.clip_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            clipped = to_clip(self.model.parameters(), [self.optimizer])
            torch.nn.utils.clip_grad_norm_(clipped, self.workload.clip_grad_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        return self._has_stepped

    def _micro_step(self, accumulation: int) -> None:
        self.batch = None  # `for batch in loader` drops the old batch before the new one is copied
        dtype = torch.bfloat16 if self.variant.precision == "pure-bf16" else None
        self.batch = make_batch(
            self._host_batch if self.is_timed else self.workload.batch,
            self.variant.micro_batch,
            dtype,
            batch_size=self.workload.batch_size,
        )
        low = _LOW.get(self.variant.precision)
        context = torch.autocast("cuda", dtype=low) if low else contextlib.nullcontext()
        with context, around_forward(self.variant):
            loss = self.workload.loss(self.model, self.batch)
        if accumulation > 1:
            loss = loss / accumulation
        self.loss = loss  # alive until the next loss replaces it
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()


def _scaler() -> Any:
    """Return a loss scaler that skips no step: its memory and time are those of any other."""
    return scaler_on_host("cuda", init_scale=1.0)


def _made_once(batch: Any) -> Any:
    """Return a batch function that makes each size once, for steps that are timed.

    A loader has the next batch ready when a step ends. A batch that is made on the GPU is made
    again: it would stay there.
    """
    if not callable(batch):
        return batch
    made: dict[int, Any] = {}

    def again(num_examples: int) -> Any:
        found = made[num_examples] if num_examples in made else batch(num_examples)
        if not any(tensor.is_cuda for tensor in tensors_of(found)):
            made[num_examples] = found
        return found

    return again


# ---- a script ------------------------------------------------------------------------------------

_MOST_ALONE = 12  # judgement, as in a rehearsal: WGAN trains its critic 5 times per generator


def measure_script(script: Script, gpu: OnGpu, answer: Callable[[Measurement], NoReturn]) -> None:
    """Run a script as Python would, and answer from inside it once enough steps are measured.

    `answer` does not return, so no `except` or `finally` of the script can interfere. Raises what
    the script raises, or UserCodeError if it ends before it has made two steps.
    """
    start_as_python_does(script)
    attempt = f"{_SAYS_MORE}; or --unprotected, if CUDA does not start in the sandbox"
    with using(gpu, attempt=attempt):
        follower = Follower(gpu)

        def begin() -> None:
            follower.begin()
            follower.built()  # what the script builds belongs to its first step

        def stepped(is_made: bool) -> None:
            if follower.has_begun:  # else this step was on the host
                follower.stepped(is_made=is_made)
            if follower.is_done:
                answer(follower.answer())

        # Not before the script starts CUDA: it may set variables that CUDA reads only then.
        torch.cuda._lazy_call(begin)
        with _StepsOfScript(stepped).seen():
            try:
                run_as_main(script)
            except Exception as error:
                if which_memory(error) != "gpu" or not follower.has_begun:
                    raise
                answer(follower.answer(ran_out=True))
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
        if follower.num_made < NUM_RECORDED:
            raise UserCodeError(
                f"the script ended after {follower.num_made} optimizer steps on the GPU",
                because=f"{NUM_RECORDED} are compared",
                attempt="an option of the script for more steps or a smaller batch",
            )
        answer(follower.answer())


class _StepsOfScript:
    """Calls back after each whole step of a script: when each of its optimizers has stepped.

    If one of them never steps, the others' steps count after a while.
    """

    def __init__(self, on_step: Callable[[bool], None]) -> None:
        self._on_step = on_step  # called with whether the optimizers made the step
        self._num_steps = 0
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # since the last step

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Follow all optimizers that are made within this context."""
        original, patches = Optimizer.__init__, Patches()

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._counts.setdefault(optimizer, 0)

        scaled = torch.amp.GradScaler.step

        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._num_steps
            returned = scaled(scaler, *args, **kwargs)
            if self._num_steps == before:
                self._on_step(False)
            return returned

        patches.put(Optimizer, __init__=made)
        patches.put(torch.amp.GradScaler, step=step)
        handle = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            handle.remove()
            patches.undo()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._num_steps += 1
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if min(self._counts.values()) or max(self._counts.values()) >= _MOST_ALONE:
            for each in list(self._counts):
                self._counts[each] = 0
            self._on_step(True)
