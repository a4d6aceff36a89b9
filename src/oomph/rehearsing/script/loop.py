"""A script's training loop seen from outside: its phases, its steps, and when to stop.

The script calls its models, backward, optimizers and loaders in any order. oomph watches each of
these calls to know what the loop is doing. A step ends when every optimizer has stepped; the
rehearsal ends with the second step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from oomph.pretending.tensors import is_pretended
from oomph.records.trace import Phase
from oomph.rehearsing.fault import users_line
from oomph.rehearsing.recorder import ModuleStack
from oomph.rehearsing.rehearse import tensors_of
from oomph.rehearsing.script.places import unwrapped
from oomph.rehearsing.script.recorder import ScriptRecorder

# These modules say which dimension is the batch; by default it is the second.
_OF_SEQUENCES = (torch.nn.RNNBase, torch.nn.MultiheadAttention)


@dataclass(slots=True)
class _Call:
    is_training: bool  # from `model.train()` and `model.eval()`
    shape: tuple[int, ...] | None  # of the first tensor; None: no tensor was given
    num_tokens: int
    is_of_features: bool  # a single row of floats, which are features and not examples
    is_sequence_first: bool = False

    @property
    def num_rows(self) -> int | None:
        if self.shape is None or self.is_of_features:
            return None
        return self.shape[1] if self.is_sequence_first else self.shape[0]


class Given:
    """The inputs of models -> how many rows a batch has, and the longest sequence.

    A model may also be called to generate a sample or to choose an action, often without `no_grad`;
    that input is not a batch. The batch is the last input before a backward.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[_Call]] = {}
        self._last: _Call | None = None
        self._rows: Counter[int | None] = Counter()
        self._is_sequence_first = False
        self._most_tokens = 0
        self.num_batches = 0

    def called(self, module: torch.nn.Module, tensors: list[Any]) -> None:
        first = tensors[0] if tensors else None
        shape = None if first is None else tuple(first.shape)
        # a graph's edges are two rows of integers, not sequences
        whole = (one.shape[1] for one in tensors if _is_tokens(one) and one.shape[0] == shape[0])  # type: ignore[index]
        is_row = first is not None and first.dim() == 1 and first.is_floating_point()
        self._last = _Call(module.training, shape, max(whole, default=0), is_row)
        self._waiting.setdefault(id(module), []).append(self._last)
        if tensors:
            self.passed_on(module, tensors[0])

    @property
    def rows_of_call(self) -> int | None:
        return None if self._last is None else self._last.num_rows

    def passed_on(self, module: torch.nn.Module, given: Any) -> None:
        """Note a submodule's input, which may show that time is the first dimension."""
        if not isinstance(module, _OF_SEQUENCES) or module.batch_first or self._last is None:
            return
        shape = self._last.shape
        is_whole = isinstance(given, torch.Tensor) and given.dim() == 3
        if is_whole and shape is not None and shape[:2] == tuple(given.shape[:2]):
            self._last.is_sequence_first = True
            if self._last.num_tokens:
                self._last.num_tokens = shape[0]

    def trained(self) -> bool:
        """Count the inputs before a backward, or before a step without one. Was there a batch?"""
        is_batch = bool(self._waiting)
        for calls in self._waiting.values():
            last = calls[-1]
            alike = [call for call in calls if call.is_training == last.is_training]
            self._rows[last.num_rows] += 1
            self._is_sequence_first = self._is_sequence_first or last.is_sequence_first
            self._most_tokens = max(self._most_tokens, *(call.num_tokens for call in alike))
            self.num_batches += len(alike)
        self._waiting.clear()
        self._last = None
        return is_batch

    @property
    def rows(self) -> int | None:
        """Return the rows of most inputs, or the smallest that divides all. None: unclear.

        A single row is no sure sign of a batch, and neither is one row of floats.
        """
        counts = {rows: n for rows, n in self._rows.items() if rows is not None}
        if not counts or sum(counts.values()) * 2 <= self._rows.total():
            return None
        most = max(counts, key=lambda rows: counts[rows])
        least = min(counts)
        if counts[most] * 2 > sum(counts.values()):
            return most
        return least if least > 1 and all(rows % least == 0 for rows in counts) else None

    @property
    def dimension(self) -> Literal["first dimension", "second dimension"]:
        """Return which dimension of a tensor is the batch."""
        return "second dimension" if self._is_sequence_first else "first dimension"

    @property
    def longest_sequence(self) -> int | None:
        return self._most_tokens if self._most_tokens > 1 else None  # one token is no sequence


def _is_tokens(tensor: torch.Tensor) -> bool:
    return bool(tensor.dim() == 2 and not tensor.is_floating_point())


NUM_STEPS = 2
# A critic is trained more often than its generator. _ENOUGH_STEPS of one optimizer are enough once
# every other has stepped, _MOST_STEPS if another never steps. Judgement: WGAN trains its critic 5
# times for each step of the generator (arXiv 1701.07875).
_ENOUGH_STEPS, _MOST_STEPS = 5, 12
# A script that records its memory often warms up first. Judgement: seen are 3 to 5 steps.
_MOST_STEPS_BEFORE_RECORDING = 12
# Optimizers that compute losses themselves may run until convergence, which never comes here.
# Judgement: more than twice the 25 losses that LBFGS computes at most in one step, by default.
MOST_CLOSURES = 64
_MOST_BACKWARDS = 4  # judgement; if no optimizer is seen: parameters are updated by hand


class Loop:
    """Everything known about the loop so far."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        self.recorder = recorder
        self.parameters: dict[int, weakref.ref[torch.Tensor]] = {}  # live ones, by id
        self.modules = ModuleStack()
        self.phase_starts: list[tuple[int, Phase]] = []
        self.step_starts: list[int] = []
        self.first_input = 0  # the event at which the first training batch may begin
        self.gradients: set[int] = set()
        self.states: set[int] = set()  # of optimizers; some make new ones in every step
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # in the order of creation
        self.num_steps: Counter[int] = Counter()  # per optimizer, by its index in the list
        self.has_stepped_since: set[int] = set()
        self.num_backwards = 0
        self.backwards_of_step: list[int] = [0]
        self.added_up: list[int] = [0]  # per step: batches since the gradients were zeroed
        self.rounds_of_step: list[int] = [0]  # per step; optimizers stepping together are one round
        self._num_backwards_before = 0  # as of the last round
        self.num_closures = 0  # backwards inside the current step
        # Modules called from outside, in training. Held weakly: what a script drops is gone.
        self.roots: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )
        self.of_models: set[int] = set()  # allocations of their parameters and buffers
        self.given = Given()
        # Per model: backwards so far, events so far, and the allocations of its output.
        self._returned: dict[int, tuple[int, int, set[int]]] = {}
        self.kept_bytes = 0  # of outputs still alive at the model's next batch
        self.num_forwards = 0
        self.depth = 0  # of nested module calls
        self.in_backward = 0
        self.in_step = 0
        self.is_stepping = False  # the closure of a step runs forward and backward inside it
        self.is_between_steps = self.is_done = self.clips = False
        self.recording_since: int | None = None  # the event at which the script began to record
        self.recorded: tuple[int, int] | None = None  # the events of its last snapshot
        # Called before a model is first trained, and after enough steps.
        self.on_training: Callable[[torch.nn.Module], None] = lambda _: None
        self.on_trained: Callable[[], None] = lambda: None  # after each backward
        self.finish: Callable[[], None] = lambda: None
        # Whether the script records its own memory; asked once, after enough steps.
        self.will_record: Callable[[], bool] = lambda: False
        self._awaits_recording: bool | None = None
        self.lines: dict[str, tuple[str, int]] = {}  # the script's first line for each action
        self.loss_divisor = 1.0  # of the first backward

    def note_line(self, what: str) -> None:
        """Note the script's line that does this for the first time in training."""
        if what not in self.lines:
            place = users_line()
            if place is not None:
                self.lines[what] = place

    # ---- phases --------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        recorder = self.recorder
        if phase in ("input", "zero_grad") and recorder.phase not in ("input", "zero_grad"):
            self.first_input = len(recorder.events)
        if self.is_done:
            self.finish()
        if self.is_between_steps and phase in ("input", "zero_grad", "forward"):
            self._next_step()
        if phase in ("clip", "step"):
            recorder.computes = self._is_last
        if phase != recorder.phase:
            self.phase_starts.append((len(recorder.events), phase))
        recorder.phase = phase

    @property
    def _is_last(self) -> bool:
        """Return whether this is the last step, the one whose kernel work is recorded."""
        return len(self.step_starts) >= NUM_STEPS

    def next_batch(self) -> None:
        if not self.in_backward and not self.in_step and not self.depth:
            self.enter("input")

    def zero_grad(self, zero: Callable[[], Any]) -> Any:
        if self.in_step or self.in_backward:
            return zero()
        self.note_line("zero_grad")
        before = self.recorder.phase
        self.enter("zero_grad")
        self.added_up[-1] = 0
        try:
            return zero()
        finally:  # some scripts zero between forward and backward
            self.enter("forward" if before == "forward" else "input")

    def clip(self, work: Callable[[], Any]) -> Any:
        if self.in_step:
            return work()
        self.note_line("clip")
        if self.recorder.phase != "clip":
            self.enter("clip")
        return work()

    def forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """Note that a module is called from outside. Return whether it is being trained."""
        is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if is_trained and id(module) not in self.roots:
            self.roots[id(module)] = module
            self.modules.know(module)
            self.on_training(module)
            own = (*module.parameters(), *module.buffers())
            self.of_models |= self.recorder.numbers_of(map(unwrapped, own))
        if not is_trained:
            if self.recorder.phase in ("build", "input") and any(True for _ in module.parameters()):
                self.enter("forward")
            return False
        leaves, _ = tree_flatten((args, kwargs))
        tensors = (unwrapped(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        given = [tensor for tensor in tensors if tensor.dim()]
        # Graphs, and images of several sizes, come in objects whose tensors have no row per
        # example.
        inside = [] if given else [unwrapped(one) for one in tensors_of(leaves)]
        self.note_line("forward")
        if not self.step_starts:
            self._begin_training(given or inside)
        self.enter("forward")
        self.num_forwards += 1
        self._note_kept(module)
        if given or inside:
            self.given.called(module, given)
        return True

    def note_returned(self, module: torch.nn.Module, returned: Any) -> None:
        """Note the output that a trained model returned to the loop."""
        numbers = self.recorder.numbers_of(map(unwrapped, tensors_of(returned)))
        self._returned[id(module)] = self.num_backwards, len(self.recorder.events), numbers

    def _note_kept(self, module: torch.nn.Module) -> None:
        """Measure how much of the last output the loop still keeps at the next batch."""
        when, start, numbers = self._returned.get(id(module), (self.num_backwards, 0, set()))
        if when < self.num_backwards:
            freed = {-event - 1 for event in self.recorder.events[start:] if event < 0}
            kept_bytes = sum(self.recorder.sizes[number] for number in numbers - freed)
            self.kept_bytes = max(self.kept_bytes, kept_bytes)

    def _begin_training(self, given: list[Any]) -> None:
        recorder = self.recorder
        start = self.first_input
        if recorder.phase not in ("input", "zero_grad"):
            numbers = recorder.numbers_of(given)
            for number in numbers:
                op, module, _ = recorder.born[number]
                recorder.born[number] = (op, module, "input")
            places = [recorder.events.index(number + 1) for number in numbers]
            start = min(places, default=len(recorder.events))
            self.phase_starts.append((start, "input"))
            self.phase_starts.sort(key=lambda each: each[0])
        self.step_starts.append(start)

    # ---- backward and steps --------------------------------------------------------------------

    def backward(self, work: Callable[[], Any], losses: Any = None) -> Any:
        if self.in_backward:
            return work()
        self.note_line("backward")
        if not self.num_backwards and isinstance(losses, torch.Tensor):
            self.loss_divisor = divisor_of(losses)
        self.enter("backward")
        self.in_backward += 1
        try:
            return work()
        finally:
            self.in_backward -= 1
            self._note_gradients()
            self.added_up[-1] += self.given.trained()
            self.num_backwards += 1
            self.backwards_of_step[-1] += 1
            self.num_closures += self.is_stepping
            self.on_trained()
            is_by_hand = self._is_by_hand() and not self._is_about_to_record()
            if is_by_hand or self.num_closures >= MOST_CLOSURES:
                self.finish()
            self.enter("step" if self.is_stepping else "input")

    def _is_by_hand(self) -> bool:
        """Return whether the script updates its parameters without an optimizer, and did so."""
        return not self.alive() and self.num_backwards >= _MOST_BACKWARDS

    def gradient(self, work: Callable[[], Any]) -> Any:
        """Run `torch.autograd.grad`: part of a loss, or training without `.grad`."""
        if self.in_backward:
            return work()
        phase = self.recorder.phase
        self.enter("backward")
        try:
            return work()
        finally:
            self.enter(phase)

    def _note_gradients(self) -> None:
        alive = [reference() for reference in list(self.parameters.values())]
        self.gradients |= self.recorder.numbers_of(p.grad for p in alive if p is not None)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.note_line("optimizer")
        if all(reference() is not optimizer for reference in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer))

    def forget_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer that is not the script's, before any has stepped."""
        self.optimizers = [one for one in self.optimizers if one() is not optimizer]

    def alive(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """Return the live optimizers with their indices."""
        found = ((place, reference()) for place, reference in enumerate(self.optimizers))
        return [(place, one) for place, one in found if one is not None]

    def stepping(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """Return the live optimizers that should step, without wrappers around another one."""
        alive = self.alive()
        stepped = {id(p) for place, one in alive if self.num_steps[place] for p in _of(one)}
        return [
            (place, one)
            for place, one in alive
            if self.num_steps[place] or not {id(p) for p in _of(one)} <= stepped
        ]

    def before_step(self) -> None:
        self.is_stepping = True
        self.note_line("step")
        self.given.trained()
        if not self.step_starts:  # gradients from torch.func, with a model that is not a module
            self.step_starts.append(self.first_input)
        if not self.in_step and self.recorder.phase != "step":
            self.enter("step")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer stepped, and whether that ends the step or the rehearsal."""
        self.is_stepping, self.num_closures = False, 0
        self.add_optimizer(optimizer)
        self.states |= self.recorder.numbers_of(states_of(optimizer))
        place = next(place for place, one in self.alive() if one is optimizer)
        self.num_steps[place] += 1
        self.rounds_of_step[-1] += self.num_backwards > self._num_backwards_before
        self._num_backwards_before = self.num_backwards
        is_again = place in self.has_stepped_since
        self.has_stepped_since.add(place)
        if self.is_enough() and not self._is_about_to_record():
            if not self.in_step:
                self.finish()
            self.is_done = True  # a GradScaler still has to update itself
        is_whole = {place for place, _ in self.stepping()} <= self.has_stepped_since
        self.is_between_steps = is_whole or is_again
        if not self.in_step:
            self.enter("input")

    def _next_step(self) -> None:
        self.is_between_steps = False
        self.has_stepped_since = set()
        self.backwards_of_step.append(0)
        self.added_up.append(0)
        self.rounds_of_step.append(0)
        self.step_starts.append(len(self.recorder.events))
        self.recorder.computes = self._is_last
        self.recorder.ops.clear()

    # ---- the script's own recording of its memory ------------------------------------------------

    def record(self, *, is_on: bool) -> None:
        """Note that the script switches its recording on or off."""
        if not is_on:
            self.recording_since = None
        elif self.recording_since is None:
            self.recording_since = len(self.recorder.events)

    def wrote_recording(self) -> None:
        """Note that the script writes its recording. After enough steps, end there."""
        if self.recording_since is None:
            return
        self.recorded = self.recording_since, len(self.recorder.events)
        if self._is_by_hand() or (self.stepping() and self.is_enough()):
            self.finish()

    def _is_about_to_record(self) -> bool:
        """Return whether a script that records a later step has not written it yet."""
        if self._awaits_recording is None:
            self._awaits_recording = self.will_record()
        num_done = max(self.num_steps.values(), default=self.num_backwards)
        is_early = num_done < _MOST_STEPS_BEFORE_RECORDING
        return self._awaits_recording and is_early and self.recorded is None

    def is_enough(self) -> bool:
        counts = [self.num_steps[place] for place, _ in self.stepping()]
        least, most = min(counts), max(counts)
        return least >= NUM_STEPS or most >= (_ENOUGH_STEPS if least else _MOST_STEPS)


def divisor_of(loss: torch.Tensor) -> float:
    """Return the number that a loss was divided by, last of all: N of `loss / N`, also scaled."""
    divisor, node = 1.0, loss.grad_fn
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        other = getattr(node, "_saved_other", None)
        if isinstance(other, torch.Tensor) and not is_pretended(other) and not other.dim():
            with _disable_current_modes():  # a plain number: nothing on the GPU is read
                number = other.item()
            if number:
                divisor = divisor * number if node.name() == "DivBackward0" else divisor / number
        node = node.next_functions[0][0]
    return divisor


def states_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the values of an optimizer's state."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [value for state in states for value in state.values()]


def _of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]
