"""One rehearsal of a script: its observers, the list of patches, and the answer."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from oomph.errors import OomphError, UserCodeError
from oomph.pretending import autocast, cuda, ranks, streams
from oomph.pretending.memory_stats import Statistics
from oomph.pretending.patches import Patches, patch_threads, put, wrap
from oomph.records.generation import generation_of
from oomph.records.script import Invented, Line, Loader, Overrides, PretendedGpu, Seen, Touched
from oomph.records.trace import Trace
from oomph.records.workload import Possible, Variant
from oomph.rehearsing.child import HandOver, Outcome
from oomph.rehearsing.recorder import labelled
from oomph.rehearsing.script import files, hooks, places, refusals, tensors
from oomph.rehearsing.script.answers import Rehearsed, mark_repeatable
from oomph.rehearsing.script.files import Touching
from oomph.rehearsing.script.hooks import Memo
from oomph.rehearsing.script.loaders import RESIZED, BatchSize, Loaders, with_batch
from oomph.rehearsing.script.loop import MOST_CLOSURES, NUM_STEPS, Loop, states_of
from oomph.rehearsing.script.recorder import ScriptRecorder
from oomph.rehearsing.script.switches import Switched
from oomph.rehearsing.self_test import prepare_and_test
from oomph.rehearsing.traces import users_files
from oomph.tricks.apply import possible
from oomph.tricks.expandable_segments import ALLOCATOR_VARIABLES, SEGMENTS
from oomph.units import MIB

NO_GPU = "the script put nothing on the GPU"
CLOSURES = f"an optimizer that computes losses itself was ended after {MOST_CLOSURES} of one step"
WAITING = "an optimizer of the script made no step: what it keeps is not counted"


# ---- what torch.cuda reports to the script -------------------------------------------------------
# Allocated memory is exact: the live bytes of the recording, each block rounded up as the allocator
# does. Reserved memory is assumed to equal the peak of allocated memory. nvidia-smi and NVML are
# not pretended.

_SEGMENT_BYTES = 2 * MIB  # CUDACachingAllocator.cpp, kSmallBuffer: smallest request to the driver
WHOLE_GPU = "set_per_process_memory_fraction is not applied: the answer is for the whole GPU"
RESERVED = "memory_reserved and mem_get_info were answered from what was allocated"


class ScriptGpu(cuda.Gpu):
    """Answers for a GPU; `fields` names the fields of PretendedGpu that the script has read.

    Whether the GPU is Ampere or later decides how everything runs. It is not noted, because a
    stored rehearsal is reused only for the same kind of GPU.
    """

    instead = "the script without it"

    def __init__(self, gpu: PretendedGpu, loop: Loop, approximate: Callable[[str], None]) -> None:
        self._gpu, self._loop, self._approximate = gpu, loop, approximate
        self._recorder = loop.recorder
        self.fields: set[str] = set()
        self.count = gpu.count
        self.is_ampere = generation_of(gpu.capability).has_bf16

    def __getattr__(self, name: str) -> Any:
        """Return a field of the GPU and note that it was read; none are copied here."""
        value = getattr(self._gpu, name)
        self.fields.add(name)
        return value

    def install(self) -> None:
        """Patch torch to report this GPU, permanently, and what scripts check first."""
        cuda.install(Patches(), self)
        if torch.version.cuda is None:
            put(torch.version, cuda="12.8")
        put(torch.backends.cudnn, is_available=lambda: True, version=lambda: 91002)
        is_flash = self.is_ampere
        put(
            torch.backends.cuda,
            is_built=lambda: True,
            is_flash_attention_available=lambda: is_flash,
        )

    def answers(self) -> dict[str, Any]:
        exact = {"memory_allocated": self._allocated, "max_memory_allocated": self._most_allocated}
        return {**super().answers(), **exact, "_dump_snapshot": self._write_snapshot}

    def history(self) -> dict[str, Any]:
        legacy = "_cuda_record_memory_history_legacy"
        return {
            **super().history(),
            "_cuda_record_memory_history": self._record,
            legacy: self._record,
            "_cuda_isHistoryEnabled": lambda: self._loop.recording_since is not None,
        }

    def _record(self, enabled: Any = None, *_: Any, **__: Any) -> None:
        self._loop.record(is_on=bool(enabled))

    def _write_snapshot(self, *_: Any, **__: Any) -> None:
        """Note that the script writes what it recorded; no file is written."""
        self._loop.wrote_recording()

    def snapshot(self, asked: tuple[int, int, bool] | None = None) -> dict[str, Any]:
        self._loop.wrote_recording()
        return super().snapshot(asked)

    def _allocated(self, *_: Any, **__: Any) -> int:
        self._recorder.count_bytes()
        return self._recorder.live_bytes

    def _most_allocated(self, *_: Any, **__: Any) -> int:
        self._recorder.count_bytes()
        return self._recorder.peak_bytes

    def _reserved(self) -> int:
        self._approximate(RESERVED)
        return -(-self._most_allocated() // _SEGMENT_BYTES) * _SEGMENT_BYTES

    def free_and_total_bytes(self) -> tuple[int, int]:
        return max(self.total_bytes - self._reserved(), 0), self.total_bytes

    def memory_stats(self) -> dict[str, Any]:
        statistics = Statistics()
        allocated, reserved = statistics.all.bytes, statistics.all.reserved
        allocated.current, allocated.peak = self._allocated(), self._most_allocated()
        reserved.current = reserved.peak = self._reserved()
        return statistics.nested()

    def empty_cache(self) -> None:
        self._recorder.empty_cache()

    def reset_peaks(self) -> None:
        self._recorder.peak_bytes = self._allocated()

    def limit(self, fraction_ratio: float) -> None:
        if fraction_ratio < 1:
            self._approximate(WHOLE_GPU)


# ---- what the script does ------------------------------------------------------------------------

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class Observed:
    """Notes taken while the script runs."""

    def __init__(self, how: Variant | None) -> None:
        self._how = how
        self.approximations: set[str] = set()
        self._low: Any = None
        self._scales = self._checkpoints = False
        self._models = _Models()

    def install(self) -> None:
        from torch.utils import checkpoint

        @wrap("__enter__", torch.amp.autocast_mode.autocast)
        def entered(original: Any, context: Any) -> Any:
            if context._enabled and context.device == "cuda":
                self._low = context.fast_dtype
            return original(context)

        @wrap("scale", torch.amp.GradScaler)
        def scaled(original: Any, scaler: Any, outputs: Any) -> Any:
            self._scales = self._scales or scaler.is_enabled()
            return original(scaler, outputs)

        def noted(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._checkpoints = True
            return original(*args, **kwargs)

        # What `checkpoint` calls: a script may have imported that name before.
        wrap("_checkpoint_without_reentrant_generator", checkpoint)(noted)
        wrap("apply", checkpoint.CheckpointFunction)(noted)

    def seen(self, loop: Loop, loader: Loader | None, invented: tuple[Invented, ...]) -> Seen:
        """Return everything except the batch size, which needs more than the loop."""
        from oomph.pretending.branches import COMPILE

        self.note_models(loop)
        optimizer = next((one for _, one in loop.alive()), None)
        group = optimizer.param_groups[0] if optimizer is not None else {}
        learning_rate = group.get("lr")
        num_steps = sum(loop.num_steps.values())
        return Seen(
            model=self._models.name or None,
            num_parameters=self._models.num_parameters,
            num_trainable=self._models.num_trainable,
            parameter_bytes=self._models.parameter_bytes,
            optimizer=None if optimizer is None else type(optimizer).__name__,
            is_fused=group.get("fused"),
            is_foreach=group.get("foreach"),
            learning_rate=None if learning_rate is None else float(learning_rate),
            micro_batch=None,
            num_rows=loop.given.rows,
            accumulation=_accumulation(loop) if num_steps else None,
            num_optimizer_steps=num_steps,
            num_optimizers=len(loop.stepping()),
            num_backwards=max(loop.backwards_of_step[0], 1),
            precision=self._precision(),
            checkpointing=self._checkpointing(),
            uses_compile=COMPILE in self.approximations,
            uses_grad_scaler=self._scales,
            clips_gradients=loop.clips,
            loader=loader,
            longest_sequence=loop.given.longest_sequence,
            num_batches=loop.given.num_batches,
            kept_bytes=loop.kept_bytes,
            invented=invented,
            approximations=tuple(sorted(self.approximations)),
            has_stepped=bool(num_steps) or not loop.alive(),
            lines=tuple(
                Line(what=what, file=file, line=line)  # type: ignore[arg-type] # it is a literal
                for what, (file, line) in loop.lines.items()
            ),
            loss_divisor=loop.loss_divisor,
            expandable_segments=any(
                SEGMENTS in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES
            ),
        )

    def note_models(self, loop: Loop) -> None:
        """Note the models that are trained now: a script may drop them before its end."""
        models = _outermost(list(loop.roots.values()))
        if models:
            self._models = _Models.of(models)

    def _checkpointing(self) -> str:
        if self._how is not None and self._how.checkpointing != "none":
            return "by oomph"
        return "by the script" if self._checkpoints else "none"

    def _precision(self) -> str:
        if self._low is not None:
            return _SHORT.get(self._low, str(self._low))
        dtypes = self._models.dtypes
        if dtypes == {torch.bfloat16}:
            return "pure-bf16"
        if dtypes == {torch.float16}:
            return "pure-fp16"
        if dtypes == {torch.float64}:
            return "fp64"
        return "fp32"


@dataclass(frozen=True, slots=True)
class _Models:
    """What a script trains."""

    name: str = ""
    num_parameters: int = 0
    num_trainable: int = 0
    parameter_bytes: int = 0
    dtypes: frozenset[torch.dtype] = frozenset()

    @classmethod
    def of(cls, models: list[torch.nn.Module]) -> _Models:
        parameters = {
            id(p): p for model in models for p in model.parameters() if not tensors.is_blank(p)
        }.values()
        return cls(
            name=_named(models),
            num_parameters=sum(p.numel() for p in parameters),
            num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            dtypes=frozenset(p.dtype for p in parameters if p.is_floating_point()),
        )


def _named(models: list[torch.nn.Module]) -> str:
    """Return the models' names, as in `Generator + 2 Critic`: each class once, with its count."""
    counts = Counter(type(model).__name__ for model in models)
    return " + ".join(f"{n} {name}" if n > 1 else name for name, n in counts.items())


def _outermost(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the models that are not part of another one."""
    inner = {id(part) for model in models for part in model.modules() if part is not model}
    return [model for model in models if id(model) not in inner]


def _accumulation(loop: Loop) -> int:
    """Return the batches in the first whole step; alternating optimizers do not accumulate."""
    return max(loop.added_up[0] // max(loop.rounds_of_step[0], 1), 1)


def trace_of(loop: Loop, micro_batch: int) -> Trace:
    """Return the labelled recording. If there are more than two steps, it marks the last two."""
    buffers = [buffer for module in loop.roots.values() for buffer in module.buffers()]
    parameters: list[Any] = [reference() for reference in list(loop.parameters.values())]
    of_states = [value for _, optimizer in loop.alive() for value in states_of(optimizer)]
    trace = labelled(
        loop.recorder,
        micro_batch,
        parameters=loop.of_models | loop.recorder.numbers_of(parameters + buffers),
        gradients=loop.gradients,
        states=loop.states | loop.recorder.numbers_of(of_states),
        outputs=set(),  # the loop saw what the script keeps of them
        step_starts=loop.step_starts[-NUM_STEPS:] or [0],
        phase_starts=loop.phase_starts,
    )
    return replace(trace, recorded=loop.recorded)


# ---- the rehearsal -------------------------------------------------------------------------------


class Rehearsal:
    """Observes the script through patches of torch. Entered while the script runs."""

    def __init__(self, gpu: PretendedGpu, overrides: Overrides, hand_over: HandOver) -> None:
        self._hand_over = hand_over
        self._modules_before = set(sys.modules)
        self._possible: Possible | None = None
        self._touching = Touching()
        self._entered = contextlib.ExitStack()
        self._doubt = prepare_and_test(gpu.capability)
        self.recorder = recorder = ScriptRecorder(gpu.capability)
        recorder.computes = False
        self.observed = Observed(overrides.how)
        self.loop = loop = Loop(recorder)
        self.batch_size = BatchSize(overrides.micro_batch, overrides.first, loop)
        self.loaders = Loaders(loop, self.batch_size)
        self._switched = Switched(overrides, loop)
        loop.on_training = self._before_training
        loop.on_trained = lambda: self.observed.note_models(loop)
        loop.finish = self.finish
        if overrides.first is None:  # a plan's rehearsals of two steps are compared part by part
            loop.will_record = self._will_record
        streams.Now.begin(partial(ranks.note_wait, recorder))
        self._asked_gpu = self._patch(gpu)

    def _patch(self, gpu: PretendedGpu) -> ScriptGpu:
        """Apply every patch in this order: a later patch wraps an earlier one.

        None is undone: the process ends with the rehearsal.
        """
        recorder, loop, batch_size = self.recorder, self.loop, self.batch_size
        approximate = self.observed.approximations.add
        # Tensors: where they are, and how they are moved, made and read.
        cuda.install_bare_device_numbers()
        places.install(recorder.host)
        tensors.install(
            recorder, loop.parameters, on_input=batch_size.moved, resize=batch_size.made
        )
        # The GPU, files, and values that the host computes only when they are read.
        asked_gpu = ScriptGpu(gpu, loop, approximate)
        asked_gpu.install()
        files.install(recorder.host, recorder.deferred)
        recorder.deferred.install(lambda it: recorder.host.of(it) == "cpu", approximate)
        # What cannot be rehearsed: skipped or refused.
        refusals.install(approximate, self.fail)
        # The training loop. The hooks do not see calls that accumulation holds back.
        self.loaders.install(approximate)
        self.observed.install()
        self._switched.install()
        hooks.install(loop, Memo(loop, approximate), self.loaders, batch_size, self._switched)
        self._switched.accumulating.install()
        patch_threads(Patches(), self._in_this_thread)
        return asked_gpu

    @contextlib.contextmanager
    def _in_this_thread(self) -> Iterator[None]:
        with self.recorder, autocast.guard():
            yield

    def _before_training(self, model: torch.nn.Module) -> None:
        """Put the tricks on a model. Find out first which ones apply to the first one."""
        gc.collect()  # what building left; from here on, frees follow reference counts
        if self._possible is None:
            optimizer = next((one for _, one in self.loop.alive()), None)
            self._possible = possible(model, optimizer)
        self._switched.put_on_model(model)

    # ---- while the script runs -----------------------------------------------------------------

    def __enter__(self) -> Rehearsal:
        self._touching.listen()
        self._entered.enter_context(self.loop.modules)
        self.recorder.current_module = self.loop.modules.current
        self._entered.enter_context(self._in_this_thread())
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    # ---- the answer ----------------------------------------------------------------------------

    def fail(self, error: OomphError) -> NoReturn:
        self._hand_over((False, mark_repeatable(error, self.touched())))

    def finish(self) -> NoReturn:
        try:
            answer: Outcome = (True, self.answer())
        except OomphError as error:
            answer = (False, mark_repeatable(error, self.touched()))
        self._hand_over(answer)

    def answer(self) -> Rehearsed:
        """Return the result. Raises UserCodeError if nothing was trained."""
        loop = self.loop
        if not self.has_trained():
            raise self._untrained()
        is_waiting = any(not loop.num_steps[place] for place, _ in loop.stepping())
        approximations = {
            RESIZED: self.batch_size.has_resized,
            WAITING: is_waiting,
            CLOSURES: loop.num_closures >= MOST_CLOSURES,
            NO_GPU: not self.recorder.events,
        }
        self.observed.approximations.update(what for what, is_on in approximations.items() if is_on)
        seen = self.observed.seen(loop, self.loaders.feeding, self.recorder.inventions.records())
        seen = with_batch(seen, loop, self.loaders, self.batch_size)
        self.batch_size.check(seen)
        batches = [
            Line(what="batch", file=file, line=line)
            for file, line in self.batch_size.lines(seen.micro_batch)
        ]
        seen = replace(seen, lines=(*seen.lines, *batches), loaders_beside=self.loaders.beside)
        return Rehearsed(
            trace=replace(trace_of(loop, seen.micro_batch or 1), doubt=self._doubt),
            seen=seen,
            possible=self._possible,
            files=users_files(self._modules_before),
            touched=self.touched(),
        )

    def touched(self) -> Touched:
        """Return what must be unchanged for the same result."""
        return self._touching.found(users_files(self._modules_before), self._asked_gpu.fields)

    def has_trained(self) -> bool:
        """Return whether there was a backward or a step, or the script's own recording."""
        return bool(self.loop.num_backwards or self.loop.num_steps or self.loop.recorded)

    def _untrained(self) -> UserCodeError:
        because = f"no backward and no step was seen in {self.recorder.num_ops} ops"
        attempt = "the arguments with which it trains, after --"
        if refusals.Started.num:
            because += f"; it started {refusals.Started.num} processes, whose work is not seen"
            attempt = "the script in one process, or a Workload"
        return UserCodeError(
            "the script ended and trained nothing", because=because, attempt=attempt
        )

    def _will_record(self) -> bool:
        """Return whether a file of the script says that it records its memory and writes that."""
        for file in {*sys.argv[:1], *users_files(self._modules_before)}:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
            if "_record_memory_history" in text and "_dump_snapshot" in text:
                return True
        return False

    def progress(self) -> str:
        """Return in words how far the script is."""
        loop = self.loop
        return (
            f"there were {sum(loop.num_steps.values())} optimizer steps, {loop.num_backwards}"
            f" backwards and {self.recorder.num_ops} ops so far"
        )
