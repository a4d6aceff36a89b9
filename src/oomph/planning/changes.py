"""A script and its plan -> what to change in it, tried and rehearsed.

An edit is made where the text is certain. Where it is not, other starts of the script are tried
(`--batch_size 4`: does the shape follow?), and the script's own switches are used where it has
some. What changed is rehearsed in memory: the user's files are not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oomph.errors import OomphError
from oomph.exporting.rewriting.accumulation import ends_too_soon
from oomph.exporting.rewriting.diff import (
    code_of,
    diff_of,
    framework_of,
    name_from,
    read_sources,
    script_changes,
)
from oomph.exporting.rewriting.starts import Start, config_paths, starts
from oomph.planning.predictions import predict_script
from oomph.records.plan import Plan
from oomph.records.prediction import Prediction
from oomph.records.script import Aspect, Patched, Script, ScriptChanges, Seen
from oomph.records.workload import Possible, Variant
from oomph.sensing.target import Target
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.rehearsing.script.sandboxed import ScriptRehearser

Say = Callable[[str], None]
# How far the answer goes: only the certain edits; or also what has to be tried for the rest, and a
# rehearsal of the result.
Effort = Literal["edits", "rehearsed"]

# Judgement: what a script does itself may order its allocations otherwise than a trick that is put
# around it, and blocks are rounded. More than this is another training, or a trick put elsewhere.
_ALIKE_RATIO, _ALIKE_BYTES = 0.03, 16 << 20
_LARGEST_CONFIG_BYTES = 1 << 20  # judgement


def find_changes(
    script: Script,
    rehearser: ScriptRehearser,
    plan: Plan,
    target: Target,
    say: Say,
    *,
    effort: Effort,
    is_unprotected: bool,
) -> ScriptChanges:
    """Return what to change in the script for a plan."""
    search = _Search(script, rehearser, plan, target, say, is_unprotected=is_unprotected)
    if effort == "edits":
        return search.edits(Start(arguments=script.arguments), search.seen)
    changes = search.with_tries()
    if not changes.changes_anything(script.arguments) and changes.is_whole:
        return changes  # the plan is the script as it is, and was rehearsed
    patched = search.patched(changes)
    if changes.is_whole and patched.differences and (other := search.otherwise(changes)):
        return other
    return replace(changes, patched=patched)


class _Search:
    def __init__(
        self,
        script: Script,
        rehearser: ScriptRehearser,
        plan: Plan,
        target: Target,
        say: Say,
        *,
        is_unprotected: bool,
    ) -> None:
        self._script, self._plan, self._target, self._say = script, plan, target, say
        self._is_unprotected = is_unprotected
        self.seen = rehearser.as_planned(plan.variant)
        self._is_batch_known = rehearser.seen.is_batch_known
        self._possible: Possible = rehearser.look()
        self._sources = _sources(script, rehearser.files)
        code = code_of(read_sources(self._sources), self.seen)
        self._framework = framework_of(code)
        self._configs = _configs(script, config_paths(code, script.arguments))
        self._here = str(Path(script.directory).resolve())

    def edits(self, start: Start, seen: Seen, *, autocasts: bool = False) -> ScriptChanges:
        """Return the certain edits that a start of the script still needs, with the start's own."""
        found = script_changes(
            self._sources_of(start),
            start.arguments,
            seen,
            self._plan,
            possible=self._possible,
            autocasts=autocasts,
            directory=self._here,
        )
        edited = {**dict(start.edited), **dict(found.edited)}
        before = {**self._configs, **self._sources}
        diffs = (
            diff_of(name_from(path, self._here), before[path], text)
            for path, text in edited.items()
        )
        return replace(found, diff="".join(diffs), edited=tuple(edited.items()))

    def _sources_of(self, start: Start) -> dict[str, str]:
        edited = dict(start.edited)
        return {path: edited.get(path, text) for path, text in self._sources.items()}

    # ---- trying other starts ---------------------------------------------------------------------

    def with_tries(self) -> ScriptChanges:
        """Return the changes, with starts that a rehearsal showed to do what was planned."""
        start, seen = Start(arguments=self._script.arguments), self.seen
        changes, tried = self.edits(start, seen), list[str]()
        for aspect in ("checkpointing", "precision", "split"):
            if not self._is_to_try(aspect, changes):
                continue
            found = self._tried(aspect, start, seen)
            if found is not None:
                words = _in_words(start, found[0])
                start, seen = found
                changes = self.edits(start, seen)
                tried.append(
                    f"{words}: found by trying; the rehearsal shows {_shown(aspect, seen)}"
                )
        return replace(changes, tried=tuple(tried))

    def _is_to_try(self, aspect: Aspect, changes: ScriptChanges) -> bool:
        """Return whether to look for a switch: of precision and recomputation also before edits."""
        has_failed = self._framework is not None and "split" in changes.left  # all at once
        if aspect in changes.left or has_failed:
            return True
        variant = self._plan.variant
        if aspect == "checkpointing":
            return variant.checkpointing == "blocks" and self._framework != "hf"
        is_plain = self._framework is None  # a tool has its own setting
        return aspect == "precision" and is_plain and variant.precision != self.seen.precision

    def _tried(self, aspect: Aspect, start: Start, seen: Seen) -> tuple[Start, Seen] | None:
        code = code_of(read_sources(self._sources_of(start)), seen)
        if aspect == "split" and self._framework is None and ends_too_soon(code):
            return None
        follows: tuple[Start, Seen] | None = None
        variant = self._plan.variant
        for one in starts(aspect, code, start, self._configs, seen, variant):
            self._say(f"trying {_in_words(start, one)}")
            prediction = self._predicted(one)
            after = prediction.seen if isinstance(prediction, Prediction) else None
            if after is None:
                continue
            expected = self._expected(aspect, seen)
            if not self._differences(expected, after):
                return one, after
            # The batch size follows the argument, and the loop is still to accumulate.
            if aspect == "split" and follows is None:
                halved = replace(expected, accumulation=seen.accumulation)
                halved = replace(halved, loss_divisor=seen.loss_divisor)
                if not self._differences(halved, after) and self._is_split_by(one, after, expected):
                    follows = one, after
        return follows

    def _is_split_by(self, start: Start, seen: Seen, expected: Seen) -> bool:
        """Return whether the certain edits make a start accumulate: what it changed may do both."""
        changes = self.edits(start, seen)
        if "split" in changes.left:
            return False
        found = self._predicted(Start(arguments=changes.arguments, edited=changes.edited))
        if not isinstance(found, Prediction) or found.seen is None:
            return False
        expected = replace(  # other edits change these
            expected, precision=found.seen.precision, checkpointing=found.seen.checkpointing
        )
        return not self._differences(expected, found.seen)

    def _expected(self, aspect: Aspect, seen: Seen) -> Seen:
        """Return what a rehearsal should see with one aspect of the plan."""
        variant = self._plan.variant
        if aspect == "split":
            divisor = seen.loss_divisor * variant.accumulation / (seen.accumulation or 1)
            return replace(
                seen,
                micro_batch=variant.micro_batch,
                accumulation=variant.accumulation,
                loss_divisor=divisor,
            )
        if aspect == "precision":
            return replace(seen, precision=variant.precision)
        return replace(seen, checkpointing="by the script")

    def otherwise(self, changes: ScriptChanges) -> ScriptChanges | None:
        """Return other changes that do what was planned, where a tool's own setting does not."""
        is_of_tool = self._framework == "accelerate" and not changes.tried
        if not is_of_tool or self._plan.variant.precision != "bf16":
            return None
        start = Start(arguments=self._script.arguments)
        others = self.edits(start, self.seen, autocasts=True)
        patched = self.patched(others)
        is_better = others.is_whole and patched.is_as_planned
        return replace(others, patched=patched) if is_better else None

    # ---- a rehearsal of the result ---------------------------------------------------------------

    def patched(self, changes: ScriptChanges) -> Patched:
        """Rehearse the changed script, and compare it with the plan."""
        self._say("rehearsing the script with the changes")
        planned = self._plan.prediction
        found = self._predicted(Start(arguments=changes.arguments, edited=changes.edited))
        if isinstance(found, OomphError):
            why = found.what + (f" ({found.because})" if found.because else "")
            return Patched(
                fits=None,
                device_bytes=None,
                planned_bytes=planned.device_bytes,
                differences=(),
                error=why,
            )
        assert found.seen is not None  # noqa: S101 - it is a script's
        if changes.is_whole:
            differences = self._differences(self._planned_seen(), found.seen)
            differences += _missing(self._plan.variant, found.seen)
            differences += _more_memory(found, planned)
        else:
            differences = _said(_lasting(self.seen, found.seen))
        return Patched(
            fits=found.fits,
            device_bytes=found.device_bytes,
            planned_bytes=planned.device_bytes,
            differences=tuple(differences),
        )

    def _planned_seen(self) -> Seen:
        variant, seen = self._plan.variant, self.seen
        seen = self._expected("split", seen)
        if variant.precision in ("bf16", "fp16"):
            seen = self._expected("precision", seen)
        if variant.checkpointing != "none":
            seen = self._expected("checkpointing", seen)
        return seen

    def _predicted(self, start: Start) -> Prediction | OomphError:
        from oomph.rehearsing.traces import Request

        script = replace(self._script, arguments=start.arguments, edited=start.edited)
        try:
            return predict_script(
                script,
                self._target,
                Request(tricks=Variant(micro_batch=1)),
                has_own_precision=True,
                expandable_segments=False,
                say=lambda _: None,
                is_unprotected=self._is_unprotected,
                is_fresh=False,
            )
        except OomphError as error:
            return error

    # ---- does it train alike? --------------------------------------------------------------------

    def _differences(self, expected: Seen, found: Seen) -> list[str]:
        """Return what a rehearsal shows that is not expected, a sentence each."""
        facts = [
            *_lasting(expected, found),
            ("it computes in", expected.precision, found.precision),
            ("activations are recomputed:", expected.checkpointing, found.checkpointing),
        ]
        if self._is_batch_known:
            facts += [
                ("the micro-batch is", expected.micro_batch, found.micro_batch),
                ("micro-batches for a step:", expected.accumulation, found.accumulation),
            ]
            if self._framework is None:  # a tool divides the loss in its own way
                divisors = expected.loss_divisor, found.loss_divisor
                facts.append(("the loss is divided by", *divisors))
        return _said(facts)


_Fact = tuple[str, object, object]  # in words, as expected, as found


def _lasting(expected: Seen, found: Seen) -> list[_Fact]:
    """Return what no plan of a script changes."""
    return [
        ("the model is", expected.model, found.model),
        ("parameters:", expected.num_parameters, found.num_parameters),
        ("trained parameters:", expected.num_trainable, found.num_trainable),
        ("the optimizer is", expected.optimizer, found.optimizer),
        ("optimizers:", expected.num_optimizers, found.num_optimizers),
        ("the learning rate is", expected.learning_rate, found.learning_rate),
        ("gradients are clipped:", expected.clips_gradients, found.clips_gradients),
    ]


def _said(facts: Sequence[_Fact]) -> list[str]:
    return [
        f"{what} {_number(now)}, not {_number(wanted)}"
        for what, wanted, now in facts
        if not _is_equal(wanted, now)
    ]


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-9)
    return one == other


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _missing(variant: Variant, found: Seen) -> list[str]:
    """Return which of a plan's tricks a rehearsal did not see, of those that it can see."""
    wanted = {
        "there is no loss scaler": variant.precision == "fp16" and not found.uses_grad_scaler,
        "the optimizer is not fused": variant.optimizer == "fused" and not found.is_fused,
        "expandable segments are off": variant.expandable_segments
        and not found.expandable_segments,
    }
    return [what for what, is_missing in wanted.items() if is_missing]


def _more_memory(found: Prediction, planned: Prediction) -> list[str]:
    """Return how much more memory it needs than planned, if that is more than detail."""
    more_bytes = found.device_bytes - planned.device_bytes
    if more_bytes <= max(_ALIKE_BYTES, int(_ALIKE_RATIO * planned.device_bytes)):
        return []
    return [f"it needs {format_bytes(more_bytes)} more than planned"]


# ---- in words ------------------------------------------------------------------------------------


def _in_words(before: Start, after: Start) -> str:
    """Return what a start has that another had not."""
    words = [word for word in after.arguments if word not in before.arguments]
    changed = dict(before.edited)
    files = [Path(path).name for path, text in after.edited if changed.get(path) != text]
    return " ".join(_with_flags(words, after.arguments) + files) or "the same arguments"


def _with_flags(words: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Put an option's name before a value that changed."""
    found: list[str] = []
    for place, word in enumerate(arguments):
        if word in words:
            flag = arguments[place - 1] if place and arguments[place - 1].startswith("-") else None
            if flag and flag not in words and not word.startswith("-") and "=" not in flag:
                found.append(flag)
            found.append(word)
    return found


def _shown(aspect: Aspect, seen: Seen) -> str:
    if aspect == "split":
        return f"batches of {seen.micro_batch}, {seen.accumulation or 1} for each step"
    return seen.precision if aspect == "precision" else "that activations are recomputed"


# ---- files ---------------------------------------------------------------------------------------


def _sources(script: Script, imported: Sequence[str]) -> dict[str, str]:
    """Read the user's own files, the script first. Skip files that are not text."""
    own = [] if script.path is None else [str(Path(script.directory, script.path).resolve())]
    return _texts([*own, *imported])


def _configs(script: Script, names: Sequence[str]) -> Mapping[str, str]:
    places = (Path(script.directory, name) for name in names)
    small = [
        str(place.resolve())
        for place in places
        if place.is_file() and place.stat().st_size <= _LARGEST_CONFIG_BYTES
    ]
    return _texts(small)


def _texts(paths: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts[path] = Path(path).read_bytes().decode("utf-8")
    return texts
