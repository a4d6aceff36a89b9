"""Workload, Variant -> Trace: two training steps on pretended tensors.

Two, because the optimizer's state exists only from the second on. To be run in a process of its
own: torch is patched for good.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from oomph.records.contradictions import contradiction_in
from oomph.records.sharding import casts_parameters, divides_parameters
from oomph.records.trace import Phase, Trace
from oomph.records.workload import How, Variant, Workload
from oomph.tracing import autocast, compiled, cuda_branches, pretend, ranks, streams
from oomph.tracing.batches import make_batch
from oomph.tracing.buckets import Buckets
from oomph.tracing.building import build, materialise, without_memory
from oomph.tracing.label import labelled
from oomph.tracing.modules import ModuleStack
from oomph.tracing.outputs import tensors_of
from oomph.tracing.recorder import Recorder

_LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NUM_STEPS = 2
TELLS_EVERY_S = 15.0


class Apply(Protocol):
    """How tricks are put on what is trained: the functions of training/apply.py."""

    def put_on_built(self, model: Any, how: How) -> Any: ...
    def put_on_model(self, model: Any, how: How) -> Any: ...
    def put_on_optimizer(self, make: Callable[[Any], Any], parameters: Any, how: How) -> Any: ...
    def around_forward(self, how: How) -> AbstractContextManager[Any]: ...


def prepare(capability: tuple[int, int]) -> None:
    """Patch torch in this process. Once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are overridden, as they are

        autocast.install()
        cuda_branches.install()
        pretend.install(capability)
    compiled.pass_over(lambda _: None)
    gc.collect()
    gc.freeze()  # what was imported stays: collecting before a rehearsal need not look at it


def rehearse(
    workload: Workload,
    variant: Variant,
    capability: tuple[int, int],
    apply: Apply,
    *,
    is_step_alone: bool = False,
) -> Trace:
    """Train two steps, and tell what they took.

    Where only the optimizer's step matters, gradients can be had without forward and backward.
    """
    contradiction = contradiction_in(variant, clips_gradients=workload.clip_grad_norm is not None)
    if contradiction is not None:
        raise contradiction
    gc.collect()
    gc.disable()  # on a GPU, too, frees follow reference counts; cycles would die at random times
    recorder = Recorder(capability)
    compiled.pass_over(recorder.notes.add)
    pretend.Lie.real, pretend.Lie.give = recorder.real, recorder.shadows.give
    streams.Now.begin(partial(ranks.note_wait, recorder))
    divides = divides_parameters(variant)
    world = ranks.one_of(variant.num_gpus, recorder) if divides else contextlib.nullcontext()
    try:
        with recorder, autocast.guard(), world, _telling(recorder):
            return _Rehearsal(workload, variant, recorder, apply, is_step_alone).run()
    finally:
        gc.enable()


@contextlib.contextmanager
def _telling(recorder: Recorder) -> Iterator[None]:
    """Tell on a terminal how far a rehearsal is that takes long, as loops over time do."""
    if not sys.stderr.isatty():
        yield
        return
    is_over, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not is_over.wait(TELLS_EVERY_S):
            passed_s = time.monotonic() - start
            told = f"{len(recorder.sizes):,} allocations so far, in {recorder.phase}"
            print(f"oomph: after {passed_s:.0f} s of rehearsing: {told}", file=sys.stderr)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class _Rehearsal:
    """The training loop: what it holds on to, it holds as a user's loop would."""

    def __init__(
        self,
        workload: Workload,
        variant: Variant,
        recorder: Recorder,
        apply: Apply,
        is_step_alone: bool,
    ) -> None:
        self.workload, self.variant, self.recorder, self.apply = workload, variant, recorder, apply
        self.is_step_alone = is_step_alone
        self.gradients: set[int] = set()
        self.outputs: set[int] = set()  # where nobody says whether the loop keeps them
        self.kept: Any = None
        self.loss: Any = None
        self.batch: Any = None
        self.example_elements: int | None = None
        self.phase_starts: list[tuple[int, Phase]] = []
        self.buckets: Buckets | None = None

    def run(self) -> Trace:
        recorder, variant = self.recorder, self.variant
        pure = torch.bfloat16 if variant.precision == "pure-bf16" else None
        recorder.computes = False
        self.model = build(self.workload.model, recorder.notes.add)
        compiled.note_if_compiled(self.model, recorder.notes.add)
        with without_memory(recorder.notes.add):
            self.model = self.apply.put_on_built(self.model, variant)
        materialise(self.model, recorder.shadows.give, pure)
        self.model.train()
        self._put_on_model()
        num_parameters = len(recorder.sizes)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if variant.sharding == "ddp":
            self.buckets = Buckets(parameters, variant.num_gpus, recorder)
        for parameter in parameters:  # before an optimizer that uses gradients up
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
        self.optimizer = self.apply.put_on_optimizer(self.workload.optimizer, parameters, variant)
        self.scaler = torch.amp.GradScaler("cuda") if variant.precision == "fp16" else None
        self.model.register_forward_hook(self._note_outputs)
        step_starts: list[int] = []
        with ModuleStack(self.model) as stack:
            recorder.current_module = stack.current
            for step in range(_NUM_STEPS):
                step_starts.append(len(recorder.events))
                recorder.computes = step == _NUM_STEPS - 1
                self._step()
        trace = labelled(
            recorder,
            variant.micro_batch,
            parameters=range(num_parameters),
            gradients=self.gradients,
            states=self._states(),
            outputs=self.outputs,
            step_starts=step_starts,
            phase_starts=self.phase_starts,
        )
        return replace(trace, example_elements=self.example_elements)

    def _put_on_model(self) -> None:
        if self.variant.sharding == "ddp":  # its reducer is stood in for by our own
            alone = replace(self.variant, sharding="none", num_gpus=1)
            self.model = self.apply.put_on_model(self.model, alone)
            return
        self.model = self.apply.put_on_model(self.model, self.variant)
        if divides_parameters(self.variant):
            # Whoever divides a large model builds it on the host or on `meta`: no GPU has seen
            # the whole of it.
            self.recorder.begin_with_the_living()

    def _enter(self, phase: Phase) -> None:
        self.recorder.phase = phase
        self.phase_starts.append((len(self.recorder.events), phase))

    def _note_gradient(self, parameter: Any) -> None:
        number = self.recorder.number_of(ranks.local_part(parameter.grad))
        if number is not None:
            self.gradients.add(number)

    def _note_outputs(self, _: Any, __: Any, returned: Any) -> None:
        """What the loop is given: it keeps that until the next, or not, or that is not known."""
        if self.workload.keeps == "outputs":
            self.kept = returned
        if self.workload.keeps is not None:
            return
        tensors = [ranks.local_part(tensor) for tensor in tensors_of(returned)]
        numbers = map(self.recorder.number_of, tensors)
        self.outputs |= {number for number in numbers if number is not None}

    def _states(self) -> set[int]:
        """The allocations of the optimizer's state: in backward they are told by nothing else."""
        values = (v for state in self.optimizer.state.values() for v in state.values())
        tensors = [ranks.local_part(v) for v in values if isinstance(v, torch.Tensor)]
        return {number for number in map(self.recorder.number_of, tensors) if number is not None}

    def _step(self) -> None:
        self._enter("zero_grad")
        self.optimizer.zero_grad(set_to_none=self.workload.zero_grad_to_none)
        if self.is_step_alone:
            self._make_gradients()
        else:
            for left in reversed(range(self.variant.accumulation)):
                self._micro_step(is_last=not left)
        if self.workload.clip_grad_norm is not None:
            self._enter("clip")
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.clip_grad_norm)
        self._enter("step")
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _make_gradients(self) -> None:
        self._enter("backward")
        if self.scaler:
            self.scaler.scale(torch.zeros((), device="cuda"))  # it is made at the first loss
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                self._note_gradient(parameter)

    def _micro_step(self, *, is_last: bool) -> None:
        self._enter("input")
        self.batch = None  # `for batch in loader` drops the old one before the new one is copied
        dtype = torch.bfloat16 if self.variant.precision == "pure-bf16" else None
        self.batch = make_batch(
            self.workload.batch,
            self.variant.micro_batch,
            dtype,
            batch_size=self.workload.batch_size,
        )
        self.example_elements = _elements(self.batch, self.variant.micro_batch)
        self._enter("forward")
        if self.buckets:
            self.buckets.is_in_sync = is_last
            self.buckets.before_forward()
        low = None if casts_parameters(self.variant) else _LOW.get(self.variant.precision)
        context = torch.autocast("cuda", dtype=low) if low else contextlib.nullcontext()
        with context, self.apply.around_forward(self.variant):
            loss = self.workload.loss(self.model, self.batch)
        self._check(loss)
        if self.variant.accumulation > 1:
            loss = loss / self.variant.accumulation
        self.loss = loss  # kept until the next one takes its name
        self._enter("backward")
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.buckets:
            self.buckets.after_backward()

    def _check(self, loss: Any) -> None:
        from oomph.errors import UsageError

        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise UsageError(
                "the workload's loss is not a scalar",
                because=f"loss(model, batch) returned {what:.80}",
                attempt="return the mean over the batch: loss.mean()",
            )
        if not loss.requires_grad:
            raise UsageError(
                "the workload's loss needs no gradient",
                because="no parameter that requires one has a part in it",
                attempt="checking torch.no_grad() and requires_grad in the model",
            )


def _elements(batch: Any, num: int) -> int:
    """Of one example, as whoever trains by the plan counts them: of tensors that have several."""
    each = [tensor.numel() // num for tensor in tensors_of(batch)]
    return sum(size for size in each if size > 1) or sum(each)
