"""A script's training loop, as seen from outside: its phases, its steps, and when to stop.

The script calls its models, backward, its optimizers and its loaders in the order it likes. Each of
these calls is watched, and tells what the loop is doing. A step ends when every optimizer has
stepped; the rehearsal ends with the second.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from oomph.records.trace import Phase
from oomph.tracing.outputs import tensors_of
from oomph.tracing.pretend import is_pretended
from oomph.tracing.script.given import Given
from oomph.tracing.script.modules import ScriptModules
from oomph.tracing.script.places import unwrapped
from oomph.tracing.script.recorder import ScriptRecorder
from oomph.tracing.script.users_line import users_line

NUM_STEPS = 2
# A critic is trained more often than what it judges: so many steps of one optimizer are enough if
# every other has made one, and so many if another never does.
_ENOUGH_STEPS, _MOST_STEPS = 5, 12
# Those that ask for losses themselves may go on until they are content, which they never are here.
MOST_CLOSURES = 64
_MOST_BACKWARDS = 4  # where no optimizer is seen: parameters are updated by hand


class Loop:
    """What is known of the loop so far."""

    def __init__(self, recorder: ScriptRecorder, parameters: dict[int, Any]) -> None:
        self.recorder, self.parameters = recorder, parameters
        self.modules = ScriptModules()
        self.phase_starts: list[tuple[int, Phase]] = []
        self.step_starts: list[int] = []
        self.first_input = 0  # the event at which the first batch that is trained on may begin
        self.gradients: set[int] = set()
        self.optimizers: list[Any] = []  # weak references, in the order of their making
        self.num_steps: Counter[int] = Counter()  # of each optimizer, by its place in the list
        self.has_stepped_since: set[int] = set()
        self.num_backwards = 0
        self.backwards_of_step: list[int] = [0]
        self.added_up: list[int] = [0]  # batches of each step, since its gradients were zeroed
        self.rounds_of_step: list[int] = [0]  # optimizers that step together are one round
        self._num_backwards_before = 0  # the last round
        self.num_closures = 0  # backwards inside of the step that is being made
        self.roots: dict[int, Any] = {}  # modules that were called from outside, in training
        self.given = Given()
        # By each model: after how many backwards, after how many events, and what.
        self._returned: dict[int, tuple[int, int, set[int]]] = {}
        self.kept_bytes = 0  # of it, when the model is called for the next batch
        self.num_forwards = 0
        self.depth = 0  # of calls of modules
        self.in_backward = 0
        self.in_step = 0
        self.is_stepping = False  # the closure of a step runs forward and backward inside of it
        self.is_between_steps = self.is_done = self.clips = False
        self.on_training: list[Callable[[Any], None]] = []  # told before a model is first trained
        self.finish: Callable[[], None] = lambda: None
        self.lines: dict[str, tuple[str, int]] = {}  # where the script does what

    def note_line(self, what: str) -> None:
        """Where the script does this for the first time in training."""
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
        """What kernels compute is wanted of the last step."""
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
        finally:  # some zero between forward and backward
            self.enter("forward" if before == "forward" else "input")

    def clip(self, work: Callable[[], Any]) -> Any:
        if self.in_step:
            return work()
        self.note_line("clip")
        if self.recorder.phase != "clip":
            self.enter("clip")
        return work()

    def forward(self, module: Any, args: Any, kwargs: Any) -> bool:
        """A module is called from outside. Is it one that is trained?"""
        is_trained = torch.is_grad_enabled() and _has_trainable(module)
        if is_trained and id(module) not in self.roots:
            self.roots[id(module)] = module
            self.modules.know(module)
            for tell in self.on_training:
                tell(module)
        if not is_trained:
            if self.recorder.phase in ("build", "input") and any(True for _ in module.parameters()):
                self.enter("forward")
            return False
        leaves, _ = tree_flatten((args, kwargs))
        tensors = (unwrapped(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        given = [tensor for tensor in tensors if tensor.dim()]
        # Images of several sizes, and graphs, come in objects, whose tensors have no row each.
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

    def note_returned(self, module: Any, returned: Any) -> None:
        """What a model that is trained has given to the loop."""
        tensors = map(unwrapped, tensors_of(returned))
        numbers = [self.recorder.number_of(one) for one in tensors if is_pretended(one)]
        found = {number for number in numbers if number is not None}
        self._returned[id(module)] = self.num_backwards, len(self.recorder.events), found

    def _note_kept(self, module: Any) -> None:
        """What is alive of that when the next batch comes: the loop keeps it."""
        when, start, numbers = self._returned.get(id(module), (self.num_backwards, 0, set()))
        if when < self.num_backwards:
            freed = {-event - 1 for event in self.recorder.events[start:] if event < 0}
            kept_bytes = sum(self.recorder.sizes[number] for number in numbers - freed)
            self.kept_bytes = max(self.kept_bytes, kept_bytes)

    def _begin_training(self, given: list[Any]) -> None:
        recorder = self.recorder
        start = self.first_input
        if recorder.phase not in ("input", "zero_grad"):
            numbers = {recorder.number_of(one) for one in given if is_pretended(one)} - {None}
            for number in numbers:
                op, module, _ = recorder.born[number]  # type: ignore[index]
                recorder.born[number] = (op, module, "input")  # type: ignore[index]
            places = [recorder.events.index(number + 1) for number in numbers]  # type: ignore[operator]
            start = min(places, default=len(recorder.events))
            self.phase_starts.append((start, "input"))
            self.phase_starts.sort(key=lambda each: each[0])
        self.step_starts.append(start)

    # ---- backward and steps --------------------------------------------------------------------

    def backward(self, work: Callable[[], Any]) -> Any:
        if self.in_backward:
            return work()
        self.note_line("backward")
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
            is_by_hand = not self.alive() and self.num_backwards >= _MOST_BACKWARDS
            if is_by_hand or self.num_closures >= MOST_CLOSURES:
                self.finish()
            self.enter("step" if self.is_stepping else "input")

    def gradient(self, work: Callable[[], Any]) -> Any:
        """`torch.autograd.grad`: part of a loss, or a way of training without `.grad`."""
        if self.in_backward:
            return work()
        phase = self.recorder.phase
        self.enter("backward")
        try:
            return work()
        finally:
            self.enter(phase)

    def _note_gradients(self) -> None:
        for reference in list(self.parameters.values()):
            parameter = reference()
            gradient = None if parameter is None else parameter.grad
            if gradient is not None and is_pretended(gradient):
                number = self.recorder.number_of(gradient)
                if number is not None:
                    self.gradients.add(number)

    def add_optimizer(self, optimizer: Any) -> None:
        self.note_line("optimizer")
        if all(reference() is not optimizer for reference in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer))

    def forget_optimizer(self, optimizer: Any) -> None:
        """One that the script does not have: before any has stepped."""
        self.optimizers = [one for one in self.optimizers if one() is not optimizer]

    def alive(self) -> list[tuple[int, Any]]:
        """The optimizers that there are, with their places."""
        found = ((place, reference()) for place, reference in enumerate(self.optimizers))
        return [(place, one) for place, one in found if one is not None]

    def stepping(self) -> list[tuple[int, Any]]:
        """Those of them that are to step: not one around another, which lets that one step."""
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
        if not self.step_starts:  # gradients of torch.func, by a model that is no module
            self.step_starts.append(self.first_input)
        if not self.in_step and self.recorder.phase != "step":
            self.enter("step")

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has stepped: is that the end of a step, or of all?"""
        self.is_stepping, self.num_closures = False, 0
        self.add_optimizer(optimizer)
        place = next(place for place, one in self.alive() if one is optimizer)
        self.num_steps[place] += 1
        self.rounds_of_step[-1] += self.num_backwards > self._num_backwards_before
        self._num_backwards_before = self.num_backwards
        is_again = place in self.has_stepped_since
        self.has_stepped_since.add(place)
        if self.is_enough():
            if not self.in_step:
                self.finish()
            self.is_done = True  # a GradScaler has to update itself yet
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

    def is_enough(self) -> bool:
        counts = [self.num_steps[place] for place, _ in self.stepping()]
        least, most = min(counts), max(counts)
        return least >= NUM_STEPS or most >= (_ENOUGH_STEPS if least else _MOST_STEPS)


def _of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_trainable(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def collect_garbage(_: Any) -> None:
    """Once, before training: what building the model has left. From then on frees follow counts."""
    gc.collect()
