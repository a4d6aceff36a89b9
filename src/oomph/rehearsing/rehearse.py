"""Workload, Variant -> Trace: run two training steps on pretended tensors.

Two, because the optimizer state exists only from the second step on. Run this in its own process:
the patches of torch are permanent.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from oomph import progress
from oomph.errors import UsageError
from oomph.pretending import autocast, branches, cuda, ranks, streams, tensors
from oomph.pretending.ranks import Buckets
from oomph.records.trace import Phase, Trace
from oomph.records.workload import (
    Variant,
    Workload,
    casts_parameters,
    divides_model,
    divides_parameters,
    holds_parameters_on_host,
)
from oomph.rehearsing.building import build, materialise, without_memory
from oomph.rehearsing.local_steps import step_on_local_parts
from oomph.rehearsing.padding import note_of_padding
from oomph.rehearsing.recorder import ModuleStack, Recorder, labelled
from oomph.tricks.apply import around_forward, put_on_built, put_on_model, put_on_optimizer
from oomph.tricks.offload_optimizer import scaler_on_host, to_clip
from oomph.tricks.optimizer_in_backward import wants_closure
from oomph.tricks.trick import contradiction_in

_LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NUM_STEPS = 2
TELLS_EVERY_S = 2.0  # judgement: often enough to show that it is still running


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if wants_closure(optimizer):
        raise UsageError(
            f"a Workload cannot be trained with {type(optimizer).__name__}",
            because="its step runs the batch itself, as often as it likes",
            attempt="your training script in place of the Workload; or another optimizer",
        )


def tensors_of(returned: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor in a model's output once, from containers and from any object.

    Objects count because a key-value cache is one: it lives as long as the rest of the output.
    """
    seen: set[int] = set()
    waiting = [returned]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif hasattr(one, "__dict__") and not isinstance(one, torch.nn.Module | type):
            waiting += vars(one).values()


def prepare(capability: tuple[int, int]) -> None:
    """Patch torch in this process. Call once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about overridden kernels, which is intended

        autocast.install()
        branches.install()
        tensors.install(capability)
    branches.pass_over(lambda _: None)
    gc.collect()
    gc.freeze()  # imports stay alive, so the collection before a rehearsal can skip them


def rehearse(
    workload: Workload,
    variant: Variant,
    capability: tuple[int, int],
    *,
    is_step_alone: bool = False,
) -> Trace:
    """Train two steps and record their memory use.

    With `is_step_alone` only the optimizer step matters: gradients are made without forward and
    backward.
    """
    contradiction = contradiction_in(variant, clips_gradients=workload.clip_grad_norm is not None)
    if contradiction is not None:
        raise contradiction
    gc.collect()
    gc.disable()  # on a GPU, too, frees follow reference counts; cycles would die at random times
    recorder = Recorder(capability)
    padding = note_of_padding(workload.batch)
    if padding is not None:
        recorder.notes.add(padding)
    branches.pass_over(recorder.notes.add)
    cuda.Gpu.on_emptied = staticmethod(recorder.empty_cache)
    tensors.Disguise.real, tensors.Disguise.give = recorder.real, recorder.shadows.give
    streams.Now.begin(partial(ranks.note_wait, recorder))
    is_on_host = holds_parameters_on_host(variant)
    world: AbstractContextManager[None] = contextlib.nullcontext()
    if divides_model(variant):
        world = ranks.one_of(variant.num_gpus, recorder, is_on_host=is_on_host)
    rehearsal = _Rehearsal(workload, variant, recorder, is_step_alone)
    try:
        with recorder, autocast.guard(), world, _progress_shown(recorder):
            return rehearsal.run()
    finally:
        # Hooks on parameters keep the loop, and so the model, alive where Python's collector cannot
        # see it.
        recorder.end()
        rehearsal.end()
        gc.enable()


@contextlib.contextmanager
def _progress_shown(recorder: Recorder) -> Iterator[None]:
    """Tell how far a long rehearsal is; models with loops over time can be slow."""
    if not progress.is_shown():
        yield
        return
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(TELLS_EVERY_S):
            progress.tell_detail(f"{len(recorder.sizes):,} allocations, in {recorder.phase}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class _Rehearsal:
    """The training loop. It holds references exactly as a user's loop would."""

    def __init__(
        self, workload: Workload, variant: Variant, recorder: Recorder, is_step_alone: bool
    ) -> None:
        self.workload, self.variant, self.recorder = workload, variant, recorder
        self.is_step_alone = is_step_alone
        self.gradients: set[int] = set()
        self.states: set[int] = set()  # some optimizers make new ones in every step
        self.outputs: set[int] = set()  # if it is unknown whether the loop keeps them
        self.kept_outputs: Any = None
        self.loss: Any = None
        self.batch: Any = None
        self.example_elements: int | None = None
        self.phase_starts: list[tuple[int, Phase]] = []
        self.buckets: Buckets | None = None
        self.hooks: list[RemovableHandle] = []

    def run(self) -> Trace:
        recorder, variant = self.recorder, self.variant
        pure = torch.bfloat16 if variant.precision == "pure-bf16" else None
        recorder.computes = False
        self.model = build(self.workload.model, recorder.notes.add)
        branches.note_if_compiled(self.model, recorder.notes.add)
        with without_memory(recorder.notes.add):
            self.model = put_on_built(self.model, variant)
        materialise(self.model, recorder.shadows.give, pure)
        self.model.train()
        self._put_on_model()
        num_parameters = len(recorder.sizes)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if variant.sharding == "ddp":
            self.buckets = Buckets(parameters, variant.num_gpus, recorder)
        for parameter in parameters:  # before an optimizer that consumes gradients
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))
        self.optimizer = put_on_optimizer(self.workload.optimizer, parameters, variant)
        _check_optimizer(self.optimizer)
        if divides_parameters(variant) and not holds_parameters_on_host(variant):
            step_on_local_parts(self.optimizer)
        self.scaler = scaler_on_host("cuda") if variant.precision == "fp16" else None
        self.hooks.append(self.model.register_forward_hook(self._note_outputs))
        step_starts: list[int] = []
        with ModuleStack() as stack:
            stack.know(self.model)
            recorder.current_module = stack.current
            for step in range(_NUM_STEPS):
                step_starts.append(len(recorder.events))
                recorder.computes = step == _NUM_STEPS - 1
                self._step()
                self._note_states()
        trace = labelled(
            recorder,
            variant.micro_batch,
            parameters=range(num_parameters),
            gradients=self.gradients,
            states=self.states,
            outputs=self.outputs,
            step_starts=step_starts,
            phase_starts=self.phase_starts,
        )
        return replace(trace, example_elements=self.example_elements)

    def end(self) -> None:
        """Let go of everything that the loop holds. Its model may be rehearsed again."""
        for hook in self.hooks:
            hook.remove()
        if self.buckets:
            vars(self.buckets).clear()
        vars(self).clear()

    def _put_on_model(self) -> None:
        if self.variant.sharding == "ddp":  # our own reducer replaces DDP's
            alone = replace(self.variant, sharding="none", num_gpus=1)
            self.model = put_on_model(self.model, alone)
            return
        self.model = put_on_model(self.model, self.variant)
        if divides_model(self.variant):
            # A large model that is sharded is built on the host or on `meta`: no GPU ever holds all
            # of it.
            self.recorder.begin_with_the_living()

    def _enter(self, phase: Phase) -> None:
        self.recorder.phase = phase
        self.phase_starts.append((len(self.recorder.events), phase))

    def _numbers(self, tensors: Iterable[Any]) -> set[int]:
        """Return the allocations that hold these tensors, or this rank's shard of them."""
        return self.recorder.numbers_of(map(ranks.local_part, tensors))

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self.gradients |= self._numbers([parameter.grad])

    def _note_outputs(self, _: Any, __: Any, returned: Any) -> None:
        """Note the model's outputs, which the loop may or may not keep until the next step."""
        if self.workload.keeps == "outputs":
            self.kept_outputs = returned
        if self.workload.keeps is None:
            self.outputs |= self._numbers(tensors_of(returned))

    def _note_states(self) -> None:
        """Note the optimizer state's allocations. Those made in backward look like gradients."""
        values = (v for state in self.optimizer.state.values() for v in state.values())
        self.states |= self._numbers(v for v in values if isinstance(v, torch.Tensor))

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
            clipped = to_clip(self.model.parameters(), [self.optimizer])
            torch.nn.utils.clip_grad_norm_(clipped, self.workload.clip_grad_norm)
        self._enter("step")
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _make_gradients(self) -> None:
        self._enter("backward")
        if self.scaler:
            self.scaler.scale(torch.zeros((), device="cuda"))  # it allocates its scale here
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                self._note_gradient(parameter)

    def _micro_step(self, *, is_last: bool) -> None:
        self._enter("input")
        self.batch = None  # `for batch in loader` drops the old batch before the new one is copied
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
        with context, around_forward(self.variant):
            loss = self.workload.loss(self.model, self.batch)
        self._check(loss)
        if self.variant.accumulation > 1:
            loss = loss / self.variant.accumulation
        self.loss = loss  # alive until the next loss replaces it
        self._enter("backward")
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.buckets:
            self.buckets.after_backward()

    def _check(self, loss: Any) -> None:
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
    """Return the elements per example. Like the stepper, skip tensors with one element each."""
    each = [tensor.numel() // num for tensor in tensors_of(batch)]
    return sum(size for size in each if size > 1) or sum(each)


# ---- a batch function, or one example batch -> a batch of n examples on the pretended GPU --------
# A batch function is called with n and may return any structure: a graph batch has one row per
# node, an image batch may be a list. For an example batch, the first dimension must be the
# examples.


def make_batch(
    batch: Any, num_examples: int, dtype: torch.dtype | None = None, *, batch_size: int
) -> Any:
    """Return the batch on the pretended GPU; each of its tensors is recorded as an allocation.

    `dtype` replaces the dtype of floating tensors if the whole model uses it. `batch_size` is the
    workload's batch size.
    """
    if callable(batch):
        made = batch(num_examples)
    else:
        num_given = _examples_of(batch, batch_size)
        made = _mapped(batch, lambda tensor: _resized(tensor, num_given, num_examples))
    sizes: list[int] = []

    def moved(tensor: torch.Tensor) -> Any:
        sizes.append(_rows(tensor))
        tensor = tensor.to("cuda")
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    on_gpu = _mapped(made, moved)
    if not sizes:
        raise UsageError(
            "the workload's batch has no tensors",
            because=f"batch({num_examples}) returned {' '.join(repr(made).split()):.80}",
            attempt='batch=lambda n: {"x": torch.zeros(n, 3, 224, 224), "y": ...}',
        )
    if callable(batch) and num_examples not in sizes:
        _check_it_grows(batch, made, num_examples, sizes)
    return on_gpu


def _rows(tensor: torch.Tensor) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 0


def _check_it_grows(batch: Any, made: Any, num_examples: int, sizes: list[int]) -> None:
    """Raise UsageError if a batch of twice as many examples has the same shapes."""
    both = (made, batch(2 * num_examples))
    shapes, larger = ([tensor.shape for _, tensor in _tensors(one, "batch")] for one in both)
    if shapes == larger:
        raise UsageError(
            f"batch({num_examples}) does not have {num_examples} examples",
            because=f"batch({2 * num_examples}) is no larger; the first dimensions of its tensors"
            f" are {sizes[:5]}",
            attempt="making n examples: torch.zeros(n, ...), or a list of n",
        )


def _examples_of(batch: Any, batch_size: int) -> int:
    """Return the first dimension shared by the example batch's tensors. Raises UsageError."""
    sizes = {path: _rows(tensor) for path, tensor in _tensors(batch, "batch") if tensor.dim()}
    counts = Counter(sizes.values())
    if not counts:
        return 0
    num = batch_size if batch_size in counts else counts.most_common(1)[0][0]
    is_list = num != batch_size and _has_list_of(batch, batch_size)
    others = [path for path, size in sizes.items() if size not in (num, 1)]
    if not is_list and not others:
        return num
    because = f"it has a list of {batch_size}, as many as the batch"
    if others:
        because = f"{others[0]} has {sizes[others[0]]} rows, and other tensors have {num}"
    raise UsageError(
        "oomph cannot tell where the examples are in the workload's batch",
        because=because,
        attempt="a function that makes n examples: batch=lambda n: ...",
    )


def _tensors(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every tensor with its path, written as Python would index it."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _tensors(value, f"{path}[{number}]")
    elif not isinstance(tree, type) and not callable(tree):
        for name, value in _attributes(tree).items():
            yield from _tensors(value, f"{path}.{name}")


def _has_list_of(tree: Any, num: int) -> bool:
    """Return whether the tree holds a list of `num` items, one per example."""
    parts: list[Any] = []
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, list | tuple):
        parts = list(tree)
        if num > 1 and len(parts) == num and all(isinstance(p, torch.Tensor) for p in parts):
            return True
    return any(_has_list_of(part, num) for part in parts)


def _resized(tensor: torch.Tensor, num_given: int, num_examples: int) -> Any:
    """Return the tensor cut or repeated to `num_examples` rows; only its shape matters."""
    if not tensor.dim() or tensor.shape[0] != num_given:
        return tensor
    return tensor[:1].expand(num_examples, *tensor.shape[1:]).contiguous()


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with `change` applied to its tensors; everything else is passed through."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return _like(tree, {key: _mapped(value, change) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(value, change) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree if isinstance(tree, type) or callable(tree) else _object_like(tree, change)


def _like(tree: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """Return the same mapping type; batches of transformers are also read by attribute."""
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return content
    made = copy.copy(tree)
    made.update(content)
    return made


def _object_like(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a dataclass or another object with tensor attributes; pass anything else through."""
    attributes = _attributes(tree)
    if not attributes:
        return tree
    made = copy.copy(tree)
    for name, value in attributes.items():
        object.__setattr__(made, name, _mapped(value, change))  # also works on a frozen dataclass
    return made


def _attributes(tree: Any) -> dict[str, Any]:
    is_record = dataclasses.is_dataclass(tree) and not isinstance(tree, type)
    names = [field.name for field in dataclasses.fields(tree)] if is_record else []
    return {name: getattr(tree, name) for name in names} or getattr(tree, "__dict__", {})
