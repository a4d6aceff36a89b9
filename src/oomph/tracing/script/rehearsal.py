"""One rehearsal of a script: every patch of it, and the answer when it has seen enough."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from oomph.errors import OomphError, UserCodeError
from oomph.records.possible import Possible
from oomph.records.script import Line, Overrides, PretendedGpu, Touched
from oomph.tracing import autocast, ranks, streams
from oomph.tracing.script import (
    cuda,
    devices,
    drawings,
    draws,
    factories,
    files,
    fused_attention,
    lazy,
    legacy,
    moves,
    places,
    reading,
    refusals,
    threads,
    watching,
)
from oomph.tracing.script.accumulating import Accumulating
from oomph.tracing.script.answers import Rehearsed, lasting
from oomph.tracing.script.batch_size import RESIZED, BatchSize, with_batch
from oomph.tracing.script.finding import Observed
from oomph.tracing.script.loaders import Loaders
from oomph.tracing.script.loop import MOST_CLOSURES, Loop, collect_garbage
from oomph.tracing.script.memo import Memo
from oomph.tracing.script.process import HandOver
from oomph.tracing.script.recorder import ScriptRecorder
from oomph.tracing.script.switches import Switched
from oomph.tracing.script.touching import Touching
from oomph.tracing.script.traced import trace_of
from oomph.tracing.self_test import prepare_and_test
from oomph.tracing.traces import users_files

Inspect = Callable[[Any, Any], Possible]  # a model, its optimizer
NO_GPU = "the script put nothing on the GPU"
CLOSURES = f"an optimizer that computes losses itself was ended after {MOST_CLOSURES} of one step"
WAITING = "an optimizer of the script made no step: what it keeps is not counted"


class Rehearsal:
    """Entered while the script runs."""

    def __init__(
        self,
        gpu: PretendedGpu,
        overrides: Overrides,
        apply: Any,
        hand_over: HandOver,
        inspect: Inspect | None = None,
    ) -> None:
        self._hand_over, self._inspect = hand_over, inspect
        self._modules_before = set(sys.modules)
        self._possible: Possible | None = None
        self._touching = Touching()
        self._doubt = prepare_and_test(gpu.capability, apply)
        self.recorder = recorder = ScriptRecorder(gpu.capability)
        recorder.computes = False
        streams.Now.begin(partial(ranks.note_wait, recorder))
        self._install(gpu, overrides, apply)

    def _install(self, gpu: PretendedGpu, overrides: Overrides, apply: Any) -> None:
        recorder, approximate = self.recorder, self.approximate
        self.observed = Observed(overrides.how)
        first = overrides.first
        self.batch_size = BatchSize(overrides.micro_batch, first)
        parameters: dict[int, Any] = {}
        self.loop = loop = Loop(recorder, parameters)
        devices.install()
        places.install(recorder.host)
        moves.install(recorder, parameters, lambda tensor: self.batch_size.moved(tensor, loop))
        lazy.install(recorder)
        legacy.install()
        reading.install(recorder)
        factories.install(recorder, partial(self.batch_size.made, loop=loop))
        self._asked_gpu = cuda.install(recorder, gpu, approximate)
        files.install(recorder.host, recorder.deferred.flush, recorder.deferred.write)
        draws.install(recorder.draws)
        recorder.deferred.approximate = approximate
        recorder.deferred.install(lambda tensor: recorder.host.of(tensor) == "cpu")
        refusals.install(approximate, self.fail)
        fused_attention.install(approximate)
        drawings.install()
        self.loaders = self._loaders(overrides)
        self.loaders.install(approximate)
        self.observed.install()
        loop.on_training.append(collect_garbage)
        loop.on_training.append(self._look)
        loop.finish = self.finish
        accumulating = Accumulating(overrides.accumulation, loop)
        own_precision = first.precision if first else None
        self._switched = Switched(overrides.how, own_precision, apply, loop, accumulating)
        watching.install(
            loop, Memo(loop, approximate), self.loaders, self.batch_size, self._switched
        )
        accumulating.install()
        threads.install(recorder)

    def _loaders(self, overrides: Overrides) -> Loaders:
        first, wanted = overrides.first, self.batch_size.wanted
        loader = None if first is None else first.loader
        self.batch_size.is_by_loader = (
            wanted is not None and loader is not None and loader.batch_size is not None
        )
        if first is None or loader is None or not self.batch_size.is_by_loader:
            return Loaders(self.loop, (), wanted)
        self.batch_size.check_together(loader, first.loaders_beside)
        numbers = {loader.number, *(one.number for one in first.loaders_beside)}
        return Loaders(self.loop, numbers, wanted)

    def _look(self, model: Any) -> None:
        """What can be put on the model that is trained first."""
        if self._inspect is not None and self._possible is None:
            optimizer = next((one for _, one in self.loop.alive()), None)
            self._possible = self._inspect(model, optimizer)

    def approximate(self, what: str) -> None:
        self.observed.approximations.add(what)

    # ---- while the script runs -----------------------------------------------------------------

    def __enter__(self) -> Rehearsal:
        self._touching.listen()
        self.loop.modules.__enter__()
        self.recorder.current_module = self.loop.modules.current
        self.recorder.__enter__()
        self._guard = autocast.guard()
        self._guard.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        self.recorder.__exit__(*error)
        self.loop.modules.__exit__(*error)

    # ---- the answer ----------------------------------------------------------------------------

    def fail(self, error: OomphError) -> NoReturn:
        self._hand_over((False, lasting(error, self.touched())))

    def finish(self) -> NoReturn:
        try:
            answer: tuple[bool, Any] = (True, self.answer())
        except OomphError as error:
            answer = (False, lasting(error, self.touched()))
        self._hand_over(answer)

    def answer(self) -> Rehearsed:
        """What was seen. Raises UserCodeError if nothing was trained."""
        loop = self.loop
        if not self.has_trained():
            raise self._untrained()
        if self.batch_size.has_resized:
            self.approximate(RESIZED)
        if any(not loop.num_steps[place] for place, _ in loop.stepping()):
            self.approximate(WAITING)
        if loop.num_closures >= MOST_CLOSURES:
            self.approximate(CLOSURES)
        if not self.recorder.events:
            self.approximate(NO_GPU)
        loader, invented = self.loaders.feeding, self.recorder.inventions.records()
        seen = self.observed.seen(loop, loader, invented)
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
        """What must be unchanged for the same to happen again."""
        return self._touching.found(users_files(self._modules_before), self._asked_gpu.fields)

    def has_trained(self) -> bool:
        """Was there a backward, or a step?"""
        return bool(self.loop.num_backwards or self.loop.num_steps)

    def _untrained(self) -> UserCodeError:
        because = f"no backward and no step was seen in {self.recorder.num_ops} ops"
        attempt = "the arguments with which it trains, after --"
        if refusals.Started.num:
            because += f"; it started {refusals.Started.num} processes, whose work is not seen"
            attempt = "the script in one process, or a Workload"
        return UserCodeError(
            "the script ended and trained nothing", because=because, attempt=attempt
        )

    def told(self) -> str:
        """How far it has come."""
        loop = self.loop
        return (
            f"there were {sum(loop.num_steps.values())} optimizer steps, {loop.num_backwards}"
            f" backwards and {self.recorder.num_ops} ops so far"
        )
