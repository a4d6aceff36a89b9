"""A script -> a rehearser of it: each rehearsal runs it in a sandbox, or is kept from before."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

    from oomph.errors import OomphError
    from oomph.records.possible import Possible
    from oomph.records.script import Overrides, PretendedGpu, Script, Seen
    from oomph.records.trace import Trace
    from oomph.records.workload import How, Precision, Variant
    from oomph.running.sandbox import Sandbox
    from oomph.tracing.script.answers import Rehearsed
    from oomph.verbs.targets import Target

    Say = Callable[[str], None]
    Ask = Callable[[bytes], bytes]

# Of one rehearsal: an import of a large library on a slow disk, and the data of an epoch.
_LIMIT, _USUAL_LIMIT = "OOMPH_REHEARSAL_LIMIT", "10m"  # how long one rehearsal may take
_GUESSED = (
    "no DataLoader feeds the model, and the first dimension of its input, {}, could not be varied"
)
SMALL = 2  # examples, of the rehearsals with which a plan begins
_MOST_MICRO_STEPS = 2  # more are like the second
_MOST_LINES, _LONGEST_LINE = 8, 300  # of what a script wrote before it failed


class ScriptRehearser:
    """A script that can be rehearsed in any variant. It answers as `tracing.many.Rehearser`."""

    def __init__(self, ask: Ask) -> None:
        from oomph.records.script import Overrides

        self._ask = ask
        self._known: dict[
            Overrides, Trace
        ] = {}  # a plan asks for some twice, and each takes seconds
        self.first = self._rehearse(Overrides())
        if not self.first.trace.events:
            raise _without_gpu()
        self.seen: Seen = self.first.seen
        self.own = own_how(self.seen)
        self.files = self.first.files
        self.refused = refused_by(self.seen)
        self._is_held = False
        self._second_point: Variant | None = None  # what a search for lines asks for next

    def hold_batch(self, why: str) -> None:
        """From now on every rehearsal is at the script's own batch, which cannot be another.

        One that no loader names, and that cannot be varied, was only taken for the batch.
        """
        self._is_held = True
        self.refused |= dict.fromkeys(("accumulation", "batch-size"), why)
        if self.seen.batch_from == "first dimension" and self.seen.batch_doubt is None:
            self.seen = replace(self.seen, batch_doubt=_GUESSED.format(self.seen.micro_batch))

    def as_planned(self, variant: Variant) -> Seen:
        """The script as a plan sees it: a batch that is held is not divided, whatever it is."""
        if not self._is_held:
            return self.seen
        given = {"micro_batch": variant.micro_batch, "accumulation": variant.accumulation}
        return replace(self.seen, **given)  # type: ignore[arg-type] # both are numbers

    @property
    def micro_batch(self) -> int:
        """Raises UsageError where the script's was not seen."""
        from oomph.errors import UsageError

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
        """The script as it is. Its batch counts as 1 where it was not seen."""
        from oomph.records.workload import How, Variant

        own = {field.name: getattr(self.own, field.name) for field in fields(How)}
        return Variant(
            micro_batch=self.seen.micro_batch or 1,
            accumulation=self.seen.accumulation or 1,
            **own,
        )

    @property
    def batch_size(self) -> int:
        """Of one optimizer step, as far as it can be divided."""
        if self._is_held:
            return self.micro_batch
        return self.micro_batch * (self.seen.accumulation or 1)

    @property
    def clips_gradients(self) -> bool:
        return self.seen.clips_gradients

    def look(self, _: Any) -> Possible:
        """What can be put on the model, found when the script was rehearsed as it is."""
        from oomph.errors import UserCodeError

        if self.first.possible is None:
            raise UserCodeError(
                "the script's model was not seen",
                because="it trains no torch.nn.Module",
                attempt="a Workload",
            )
        return self.first.possible

    def trace(self, variant: Variant, *, is_step_alone: bool = False) -> Trace:
        """Two training steps. A script cannot be asked for an optimizer's step alone."""
        if self._is_held:
            return self._held_trace(variant, is_step_alone)
        return self._traced(variant)

    def _held_trace(self, variant: Variant, is_step_alone: bool) -> Trace:
        """Of the script's own batch, which stands for the small one that a plan looks at first.

        A line goes through the small one and the next: the own batch may be that, and is no
        second point of the line even then, because the first was the own batch, too.
        """
        from oomph.predicting.scaling import NotAffine

        own = self.given.micro_batch
        is_second, self._second_point = variant == self._second_point, None
        if is_second or variant.micro_batch not in (own, SMALL):
            raise NotAffine(f"the batch of the script is {own} examples, and no other")
        if variant.micro_batch == SMALL and not is_step_alone:
            self._second_point = replace(variant, micro_batch=SMALL + 1)
        found = self._traced(replace(variant, micro_batch=own, accumulation=1))
        return replace(found, micro_batch=variant.micro_batch)

    def _traced(self, variant: Variant) -> Trace:
        from oomph.errors import OomphError
        from oomph.records.script import Overrides
        from oomph.running.failures import NoSandbox
        from oomph.verbs.rehearsals import CannotBePutOn

        if "accumulation" in self.refused and self.given.accumulation == 1:
            variant = replace(variant, accumulation=1)
        overrides = self._overrides(variant)
        if overrides == Overrides(first=self.seen):
            return self.first.trace
        if overrides not in self._known:
            try:
                self._known[overrides] = self._rehearse(overrides).trace
            except NoSandbox:  # which is no fault of the trick's
                raise
            except OomphError as error:
                raise CannotBePutOn(error) from error
        return self._known[overrides]

    def _overrides(self, variant: Variant) -> Overrides:
        from oomph.records.script import Overrides
        from oomph.records.workload import How

        how = How(**{field.name: getattr(variant, field.name) for field in fields(How)})
        is_own = how == self.own
        if how.precision == "pure-bf16" and self.own.precision == "pure-bf16":
            how = replace(how, precision="fp32")  # the weights are in it already: no autocast
        adds_up = variant.accumulation > 1 and (self.seen.accumulation or 1) == 1
        is_own_batch = variant.micro_batch == self.given.micro_batch
        return Overrides(
            micro_batch=None if is_own_batch else variant.micro_batch,
            how=None if is_own else how,
            accumulation=min(variant.accumulation, _MOST_MICRO_STEPS) if adds_up else None,
            first=self.seen,
        )

    def _rehearse(self, overrides: Overrides) -> Rehearsed:
        from oomph.tracing.script.answers import heard, question

        return heard(self._ask(question(overrides)))


def _without_gpu() -> OomphError:
    from oomph.errors import UserCodeError

    return UserCodeError(
        "the script put nothing on the GPU",
        because="it trained on the CPU, though it was told that there is a GPU",
        attempt="its own option for the device, after --, as in -- --device cuda",
    )


def own_how(seen: Seen) -> How:
    """How the script trains by itself, as far as that has a name."""
    from oomph.records.workload import How

    named: tuple[Precision, ...] = ("bf16", "fp16", "pure-bf16")
    return How(precision=next((name for name in named if name == seen.precision), "fp32"))


_EARLY = "it must be there before the script makes its optimizer: make the change in the script"
_SEVERAL = "a script that starts itself on several GPUs is not rehearsed: a Workload is"


def refused_by(seen: Seen) -> dict[str, str]:
    """The tricks that cannot be put around this script, and why."""
    found = dict.fromkeys(
        ("lora", "qlora", "optimizer-in-backward", "offload-optimizer", "pure-bf16"), _EARLY
    )
    found |= dict.fromkeys(("ddp", "fsdp", "hybrid"), _SEVERAL)
    if seen.precision != "fp32":
        own = f"the script has a precision of its own, {seen.precision}"
        found |= dict.fromkeys(("tf32", "bf16", "fp16"), own)
    if seen.checkpointing != "none":
        found["checkpointing"] = "the script recomputes by itself"
    if seen.is_fused:
        found["fused-optimizer"] = "the script's optimizer is fused already"
    if seen.num_optimizers != 1:
        why = f"the script has {seen.num_optimizers} optimizers"
        found |= dict.fromkeys(
            ("8-bit-optimizer", "fused-optimizer", "for-loop-optimizer", "adafactor", "sgd"), why
        )
    why_whole = _why_not_added_up(seen)
    if why_whole is not None:
        found["accumulation"] = why_whole
    return found


def _why_not_added_up(seen: Seen) -> str | None:
    """Why a step of the script cannot be made of several of its steps; None if it can."""
    if seen.num_optimizers > 1:
        return (
            f"the script has {seen.num_optimizers} optimizers, and oomph cannot tell which"
            " gradients each of them should accumulate"
        )
    if seen.num_backwards > (seen.accumulation or 1):
        return (
            f"the script calls backward {seen.num_backwards} times for one batch, and oomph cannot"
            " tell what to accumulate"
        )
    return None


@contextlib.contextmanager
def rehearser_of(
    script: Script,
    target: Target,
    say: Say,
    *,
    is_unprotected: bool = False,
    is_fresh: bool = False,
) -> Iterator[ScriptRehearser]:
    """A rehearser while the sandbox stands, which is made when something is not known yet.

    Raises what the script or the sandbox raises. Without protection nothing is kept: a script that
    may write changes what its next rehearsal reads.
    """
    from oomph.verbs.kept_scripts import KeptScript

    _check_torch()
    limit_s()  # a wrong one is an error now, and not in the sandbox
    gpu = pretended(target)
    with Asking(script, gpu, say, is_unprotected=is_unprotected) as asking:
        ask = asking.ask
        if not is_unprotected:
            ask = KeptScript(script, gpu, ask, is_fresh=is_fresh).ask
        yield ScriptRehearser(ask)


class Asking:
    """A sandbox with the script in it, from the first question on."""

    def __init__(
        self, script: Script, gpu: PretendedGpu, say: Say, *, is_unprotected: bool
    ) -> None:
        self._serve, self._say, self._is_unprotected = _server(script, gpu), say, is_unprotected
        self._sandbox: Sandbox | None = None

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def ask(self, request: bytes) -> bytes:
        """The answer of a rehearsal. Raises NoSandbox, DiedInside, OutOfTime and SpokeNonsense."""
        from oomph.errors import UserCodeError
        from oomph.tracing.script.answers import with_output

        if self._sandbox is None:
            self._sandbox = self._made()
        sandbox = self._sandbox
        try:
            answer = sandbox.ask(request, within_s=2 * limit_s(), on_output=self._pass_on)
        except UserCodeError as error:
            error.printed = _last_lines(sandbox.output_of_request())
            raise
        return with_output(answer, _last_lines(sandbox.output_of_request()))

    def _pass_on(self, printed: bytes) -> None:
        """Of what is printed inside, what the rehearsal itself says of how far it has come."""
        from oomph.records.script import PROGRESS

        for line in printed.decode(errors="replace").splitlines():
            if line.startswith(PROGRESS):  # a script may print such lines, too: only text passes
                self._say("".join(c for c in line.removeprefix(PROGRESS) if c.isprintable()))

    def _made(self) -> Sandbox:
        from oomph.running.sandbox import Sandbox

        sandbox = Sandbox(self._serve, is_unprotected=self._is_unprotected)
        if sandbox.protection.kind == "none":
            self._say(f"not protected: {sandbox.protection.why}")
        self._say("rehearsing the script as it is")
        return sandbox


def limit_s() -> float:
    """How long one rehearsal of a script may take. Raises UsageError."""
    import os

    from oomph.units import parse_duration

    return parse_duration(os.environ.get(_LIMIT) or _USUAL_LIMIT)


def _last_lines(output: str) -> tuple[str, ...]:
    """Those that say something: no progress bars, and nothing that would move the cursor."""
    from oomph.records.script import PROGRESS
    from oomph.tracing.script.last_words import without_bars

    told = (line for line in without_bars(output) if not line.startswith(PROGRESS))
    lines = list(told)[-_MOST_LINES:]
    printable = ("".join(c for c in line if c.isprintable() or c == "\t") for line in lines)
    return tuple(line[:_LONGEST_LINE] for line in printable)


def _check_torch() -> None:
    """Without importing it, which takes seconds."""
    import importlib.util

    from oomph.errors import UserCodeError

    if importlib.util.find_spec("torch") is None:
        raise UserCodeError(
            "a script cannot be rehearsed without torch",
            because="there is none beside this oomph",
            attempt="pip install torch, in the build for your driver",
        )


def _server(script: Script, gpu: PretendedGpu) -> Callable[[BinaryIO, BinaryIO], None]:
    def serve(requests: BinaryIO, answers: BinaryIO) -> None:
        from oomph.running.frames import read_frame, write_frame

        _import_what_all_need()
        while (request := read_frame(requests)) is not None:
            write_frame(answers, _answered(script, gpu, request))

    return serve


def _import_what_all_need() -> None:
    """Once, and not in each rehearsal: they are forked from this process.

    Libraries of the script's own are not among it: some look for a GPU when they are imported,
    and find one only where it is pretended.
    """
    import gc

    import torch._dynamo
    import torch.utils.cpp_extension  # noqa: F401

    import oomph.tracing.script.rehearsal
    import oomph.training.possible  # noqa: F401

    gc.collect()
    gc.freeze()  # what is here stays: no rehearsal has to look through it again


def _answered(script: Script, gpu: PretendedGpu, request: bytes) -> bytes:
    from oomph.errors import OomphError
    from oomph.tracing.script import answers
    from oomph.tracing.script.run import rehearse_script
    from oomph.training import apply
    from oomph.training.possible import possible

    try:
        overrides = answers.asked(request)
        found = rehearse_script(script, gpu, overrides, apply, inspect=possible, limit_s=limit_s())
        return answers.answer(found)
    except OomphError as error:
        return answers.refusal(error)


def pretended(target: Target) -> PretendedGpu:
    """The GPU that is asked for, as the script will see it."""
    from oomph.predicting.overhead import usable_bytes
    from oomph.records.script import PretendedGpu
    from oomph.sensing.driver_names import driver_name

    model = target.model
    total_bytes = target.memory_bytes or usable_bytes(model).likely_bytes
    return PretendedGpu(
        name=driver_name(model) if model.memory_bytes else target.name,
        total_bytes=total_bytes,
        capability=target.capability,
        multi_processor_count=model.num_sms or 108,
    )
