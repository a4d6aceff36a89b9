"""A script -> its rehearser: rehearsals run in a sandbox or come from the store."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import BinaryIO

from oomph.errors import CannotBePutOn, NoSandbox, OomphError, UsageError, UserCodeError
from oomph.predicting.overhead import usable_bytes
from oomph.predicting.scaling import NotAffine
from oomph.records.generation import DEFAULT_NUM_SMS
from oomph.records.script import PROGRESS, Overrides, PretendedGpu, Script, Seen
from oomph.records.trace import Trace
from oomph.records.workload import Possible, Precision, Variant
from oomph.rehearsing.script import answers
from oomph.rehearsing.script.answers import AnswerStore, Rehearsed
from oomph.rehearsing.traces import LINE, MOST_MICRO_STEPS
from oomph.sandbox.conversation import read_frame, write_frame
from oomph.sandbox.sandbox import Sandbox
from oomph.sensing.catalog import driver_name
from oomph.sensing.target import Target
from oomph.tricks.trick import TRICKS
from oomph.units import parse_duration

Say = Callable[[str], None]
Ask = Callable[[bytes], bytes]

# One rehearsal may import a large library from a slow disk and read an epoch of data.
_LIMIT, _USUAL_LIMIT = "OOMPH_REHEARSAL_LIMIT", "10m"  # time limit of one rehearsal
_GUESSED = (
    "no DataLoader feeds the model, and the first dimension of its input, {}, could not be varied"
)
SMALL = LINE[0]  # examples in a plan's first rehearsals
_MOST_LINES, _LONGEST_LINE = 8, 300  # judgement; of a failed script's output


class ScriptRehearser:
    """Rehearses a script in any variant, with the interface of `rehearsing.traces.Rehearser`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        # A plan asks for some variants twice, and each takes seconds.
        self._known: dict[Overrides, Trace] = {}
        self.first = self._rehearse(Overrides())
        if not self.first.trace.events:
            raise UserCodeError(
                "the script put nothing on the GPU",
                because="it trained on the CPU, though it was told that there is a GPU",
                attempt="its own option for the device, after --, as in -- --device cuda",
            )
        self.seen: Seen = self.first.seen
        self.own = own_how(self.seen)
        self.files = self.first.files
        self.refused = refused_by(self.seen)
        self._is_held = False
        self._second_point: Variant | None = None  # a linearity check asks for it next

    def hold_batch(self, why: str) -> None:
        """Keep every further rehearsal at the script's own batch, because no other works.

        If no loader gave that batch size and it cannot be varied, it was only a guess.
        """
        self._is_held = True
        self.refused |= dict.fromkeys(("accumulation", "batch-size"), why)
        if self.seen.batch_from == "first dimension" and self.seen.batch_doubt is None:
            self.seen = replace(self.seen, batch_doubt=_GUESSED.format(self.seen.micro_batch))

    def as_planned(self, variant: Variant) -> Seen:
        """Return the script as a plan sees it: a fixed batch is not divided, whatever its size."""
        if not self._is_held:
            return self.seen
        given = {"micro_batch": variant.micro_batch, "accumulation": variant.accumulation}
        return replace(self.seen, **given)  # type: ignore[arg-type] # both are numbers

    @property
    def micro_batch(self) -> int:
        """Return the script's micro-batch. Raises UsageError if it is unknown."""
        if self._is_held:
            return self.given.micro_batch
        if self.seen.micro_batch is None:
            raise UsageError(
                "the batch size of the script is unknown",
                because=self.seen.batch_doubt,
                attempt="a Workload, which says what a batch is",
            )
        return self.seen.micro_batch

    @property
    def given(self) -> Variant:
        """Return the script's own variant. An unknown batch counts as 1."""
        return replace(
            self.own,
            micro_batch=self.seen.micro_batch or 1,
            accumulation=self.seen.accumulation or 1,
        )

    @property
    def batch_size(self) -> int:
        """Return the batch size of one optimizer step, as far as it can be divided."""
        if self._is_held:
            return self.micro_batch
        return self.micro_batch * (self.seen.accumulation or 1)

    @property
    def clips_gradients(self) -> bool:
        return self.seen.clips_gradients

    def look(self) -> Possible:
        """Return which tricks apply to the model, as found with the unchanged script."""
        if self.first.possible is None:
            raise UserCodeError(
                "the script's model was not seen",
                because="it trains no torch.nn.Module",
                attempt="a Workload",
            )
        return self.first.possible

    def trace(self, variant: Variant, *, is_step_alone: bool = False) -> Trace:
        """Record two training steps. A script cannot run an optimizer step alone."""
        if self._is_held:
            return self._held_trace(variant, is_step_alone)
        return self._traced(variant)

    def _held_trace(self, variant: Variant, is_step_alone: bool) -> Trace:
        """Return the trace of the script's own batch for the small one that a plan asks for.

        A linearity check asks for the small batch and the next size. Even if the next size is the
        script's own batch, it is no second point: the first point was that batch, too.
        """
        own = self.given.micro_batch
        is_second, self._second_point = variant == self._second_point, None
        if is_second or variant.micro_batch not in (own, SMALL):
            raise NotAffine(f"the batch of the script is {own} examples, and no other")
        if variant.micro_batch == SMALL and not is_step_alone:
            self._second_point = replace(variant, micro_batch=SMALL + 1)
        found = self._traced(replace(variant, micro_batch=own, accumulation=1))
        return replace(found, micro_batch=variant.micro_batch)

    def _traced(self, variant: Variant) -> Trace:
        if "accumulation" in self.refused and self.given.accumulation == 1:
            variant = replace(variant, accumulation=1)
        overrides = self._overrides(variant)
        if overrides == Overrides(first=self.seen):
            return self.first.trace
        if overrides not in self._known:
            try:
                self._known[overrides] = self._rehearse(overrides).trace
            except NoSandbox:  # not the trick's fault
                raise
            except OomphError as error:
                raise CannotBePutOn(error) from error
        return self._known[overrides]

    def _overrides(self, variant: Variant) -> Overrides:
        how = variant.tricks_alone()
        is_own = how == self.own
        if how.precision == "pure-bf16" and self.own.precision == "pure-bf16":
            how = replace(how, precision="fp32")  # the weights are bf16 already: no autocast
        adds_up = variant.accumulation > 1 and (self.seen.accumulation or 1) == 1
        is_own_batch = variant.micro_batch == self.given.micro_batch
        return Overrides(
            micro_batch=None if is_own_batch else variant.micro_batch,
            how=None if is_own else how,
            accumulation=min(variant.accumulation, MOST_MICRO_STEPS) if adds_up else None,
            first=self.seen,
        )

    def _rehearse(self, overrides: Overrides) -> Rehearsed:
        return answers.from_answer(self._ask(answers.to_request(overrides)))


def own_how(seen: Seen) -> Variant:
    """Return the variant that the script itself uses, as far as it has a name."""
    named: tuple[Precision, ...] = ("bf16", "fp16", "pure-bf16")
    return Variant(
        micro_batch=1, precision=next((name for name in named if name == seen.precision), "fp32")
    )


def refused_by(seen: Seen) -> dict[str, str]:
    """Return the tricks that cannot be put around this script, and why."""
    found = {trick.name: why for trick in TRICKS if (why := trick.why_not_in_script)}
    if seen.precision != "fp32":
        own = f"the script has a precision of its own, {seen.precision}"
        found |= dict.fromkeys(("tf32", "bf16", "fp16"), own)
    if seen.checkpointing != "none":
        found["checkpointing"] = "the script recomputes by itself"
    if seen.is_fused:
        found["fused-optimizer"] = "the script's optimizer is fused already"
    if seen.num_optimizers != 1:
        why = f"the script has {seen.num_optimizers} optimizers"
        found |= {trick.name: why for trick in TRICKS if trick.setting == "optimizer"}
    if seen.num_optimizers > 1:
        found["accumulation"] = (
            f"the script has {seen.num_optimizers} optimizers, and oomph cannot tell which"
            " gradients each of them should accumulate"
        )
    elif seen.num_backwards > (seen.accumulation or 1):
        found["accumulation"] = (
            f"the script calls backward {seen.num_backwards} times for one batch, and oomph cannot"
            " tell what to accumulate"
        )
    return found


@contextlib.contextmanager
def rehearser_of(
    script: Script,
    target: Target,
    say: Say,
    *,
    is_unprotected: bool = False,
    is_fresh: bool = False,
) -> Iterator[ScriptRehearser]:
    """Yield a rehearser. The sandbox is created at the first question without a stored answer.

    Raises what the script or the sandbox raises. Without protection nothing is stored: a script
    that can write may change what its next rehearsal reads.
    """
    _check_torch()
    limit_s()  # report a wrong limit now, not in the sandbox
    gpu = pretended(target)
    with LazySandbox(script, gpu, say, is_unprotected=is_unprotected) as sandbox:
        ask = sandbox.ask
        if not is_unprotected:
            ask = AnswerStore(script, gpu, ask, is_fresh=is_fresh).ask
        yield ScriptRehearser(ask)


class LazySandbox:
    """A sandbox with the script in it, created at the first question."""

    def __init__(
        self, script: Script, gpu: PretendedGpu, say: Say, *, is_unprotected: bool
    ) -> None:
        self._script, self._gpu, self._say = script, gpu, say
        self._is_unprotected = is_unprotected
        self._sandbox: Sandbox | None = None

    def __enter__(self) -> LazySandbox:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def ask(self, request: bytes) -> bytes:
        """Return the answer. Raises NoSandbox, DiedInside, OutOfTime and SpokeNonsense."""
        sandbox = self._sandbox = self._sandbox or self._made()
        try:
            answer = sandbox.ask(request, within_s=2 * limit_s(), on_output=self._pass_on)
        except UserCodeError as error:
            error.printed = _last_lines(sandbox.output_of_request())
            raise
        return answers.with_output(answer, _last_lines(sandbox.output_of_request()))

    def _pass_on(self, printed: bytes) -> None:
        """Pass on the rehearsal's own progress lines from what is printed inside."""
        for line in printed.decode(errors="replace").splitlines():
            if line.startswith(PROGRESS):  # the script may fake such a line: pass text only
                self._say("".join(c for c in line.removeprefix(PROGRESS) if c.isprintable()))

    def _made(self) -> Sandbox:
        sandbox = Sandbox(self._serve, is_unprotected=self._is_unprotected)
        if sandbox.protection.kind == "none":
            self._say(f"not protected: {sandbox.protection.why}")
        self._say("rehearsing the script as it is")
        return sandbox

    def _serve(self, requests: BinaryIO, replies: BinaryIO) -> None:
        """Answer requests, inside the sandbox."""
        _import_what_all_need()
        while (request := read_frame(requests)) is not None:
            write_frame(replies, _answered(self._script, self._gpu, request))


def limit_s() -> float:
    """Return the time limit of one rehearsal. Raises UsageError."""
    return parse_duration(os.environ.get(_LIMIT) or _USUAL_LIMIT)


def _last_lines(output: str) -> tuple[str, ...]:
    """Return the last lines without progress bars and control characters."""
    from oomph.rehearsing.script.run import without_bars

    lines = [line for line in without_bars(output) if not line.startswith(PROGRESS)]
    last = lines[-_MOST_LINES:]
    printable = ("".join(c for c in line if c.isprintable() or c == "\t") for line in last)
    return tuple(line[:_LONGEST_LINE] for line in printable)


def _check_torch() -> None:
    """Check that torch is installed, without importing it, which takes seconds."""
    if importlib.util.find_spec("torch") is None:
        raise UserCodeError(
            "a script cannot be rehearsed without torch",
            because="there is none beside this oomph",
            attempt="pip install torch, in the build for your driver",
        )


def _import_what_all_need() -> None:
    """Import once what every rehearsal needs: they are forked from this process.

    The script's own libraries are not included. Some look for a GPU when they are imported, and
    would find one only where it is pretended.
    """
    import torch._dynamo
    import torch.utils.cpp_extension  # noqa: F401

    import oomph.rehearsing.script.rehearsal
    import oomph.tricks.apply  # noqa: F401

    gc.collect()
    gc.freeze()  # imports stay alive, so no rehearsal has to scan them again


def _answered(script: Script, gpu: PretendedGpu, request: bytes) -> bytes:
    from oomph.rehearsing.script.run import rehearse_script

    try:
        overrides = answers.from_request(request)
        found = rehearse_script(script, gpu, overrides, limit_s=limit_s())
        return answers.to_answer(found)
    except OomphError as error:
        return answers.error_answer(error)


def pretended(target: Target) -> PretendedGpu:
    """Return the target GPU as the script will see it."""
    model = target.model
    total_bytes = target.memory_bytes or usable_bytes(model).likely_bytes
    return PretendedGpu(
        name=driver_name(model) if model.memory_bytes else target.name,
        total_bytes=total_bytes,
        capability=target.capability,
        multi_processor_count=model.num_sms or DEFAULT_NUM_SMS,
    )
