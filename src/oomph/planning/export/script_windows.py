"""A loop over a DataLoader -> the same loop, whose optimizer steps at every Nth batch.

The batches are micro-batches then. What is done once for each step is put behind a condition; what
only tells is left as it is, and tells more often.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from oomph.planning.export.script_accumulation import divided
from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_edits import (
    a_name,
    before,
    replaced,
    unit_of,
    within,
)
from oomph.planning.export.script_lengths import with_lengths
from oomph.planning.export.script_loaders import Batches
from oomph.planning.export.script_loop import (
    CLIPS,
    Loop,
    is_report,
    is_scheduler_step,
    is_zeroing,
)
from oomph.planning.export.script_names import stored_in
from oomph.planning.export.script_source import (
    NotCertain,
    Source,
    calls_in,
    last_name,
    names_in,
    owner_of,
)

# ---- the edits -----------------------------------------------------------------------------------


def with_windows(draft: Draft, loop: Loop, batches: Batches, times: int) -> Draft:
    """Steps at every Nth batch, and at the last of an epoch where the script would step there."""
    if not batches.drops_last and (batches.written is None or not batches.has_length):
        source, call = batches.made
        raise NotCertain(
            f"{source.where(call)} may end with a smaller batch, and its length is not certain"
        )
    counter = batches.counter or a_name(loop.source, "micro_step")
    if batches.counter is None:
        draft = _counted(draft, loop.source, batches.statement, counter)
    _check_counts(loop, batches)
    ends, by = _window(batches, counter, times)
    draft = divided(draft, loop, by)
    draft = _zeroed(draft, loop, batches, counter, times)
    for run in _runs(loop, _of_each_step(loop)):
        header = f"if {ends}:"
        unit = unit_of(loop.source, loop.statement)
        draft = draft.plus(loop.source, *within(loop.source, run, header, unit))
    return with_lengths(draft, batches.made[1], times, drops_last=batches.drops_last)


def _window(batches: Batches, counter: str, times: int) -> tuple[str, str]:
    """When a window of micro-batches ends, and how many it has."""
    number = counter if batches.start == 1 else f"({counter} + {1 - batches.start})"
    place = counter if batches.start == 0 else f"({counter} - {batches.start})"
    full = f"{number} % {times} == 0"
    if batches.drops_last:
        return full, str(times)
    length = f"len({batches.written})"
    last = number.removeprefix("(").removesuffix(")")
    return f"{full} or {last} == {length}", f"min({times}, {length} - {place} // {times} * {times})"


def _counted(draft: Draft, source: Source, statement: ast.For, counter: str) -> Draft:
    """`for x, y in loader` -> `for i, (x, y) in enumerate(loader)`."""
    target, iterated = statement.target, statement.iter
    text = source.code(target)
    is_bare = isinstance(target, ast.Tuple) and not text.startswith(("(", "["))
    text = f"({text})" if is_bare else text
    return draft.plus(
        source,
        replaced(source, target, f"{counter}, {text}"),
        replaced(source, iterated, f"enumerate({source.code(iterated)})"),
    )


def _zeroed(draft: Draft, loop: Loop, batches: Batches, counter: str, times: int) -> Draft:
    """Gradients are zeroed at the beginning of a window; those of an unfinished one are dropped."""
    source = loop.source
    end = loop.place_of(loop.step)
    early = [one for one in loop.body[:end] if is_zeroing(one)]
    place = counter if batches.start == 0 else f"({counter} - {batches.start})"
    unit = unit_of(source, loop.statement)
    for one in early:
        header = f"if {place} % {times} == 0:"
        draft = draft.plus(source, *within(source, [one], header, unit))
    late = [one for one in loop.body[end:] if is_zeroing(one)]
    if not early and not late:
        raise NotCertain(f"{source.where(loop.statement)} zeroes the gradients elsewhere")
    if late and not early and batches.drops_last:
        lines = [
            f"if {counter} == {batches.start}:  # an epoch may end within a step",
            unit + source.code(late[0]),
        ]
        draft = draft.plus(source, before(source, loop.body[0], lines))
    return draft


def _of_each_step(loop: Loop) -> set[int]:
    """Which statements of the body are for each step, not for each micro-batch."""
    backward = loop.place_of(loop.backward)
    if loop.place_of(loop.step) <= backward:
        raise NotCertain(f"{loop.source.where(loop.backward)} and the step are not apart")
    places = {
        place for place, one in enumerate(loop.body) if place > backward and _is_of_each_step(one)
    }
    while True:
        made = {name for place in places for name in stored_in(loop.body[place])}
        more = {
            place
            for place, one in enumerate(loop.body)
            if place > backward and place not in places and made & names_in(one)
        }
        if not more:
            break
        places |= more
    for place in places:
        _check_simple(loop, loop.body[place])
    return places


def _is_of_each_step(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.value, ast.Constant) and statement.value.value == 1
    for call in calls_in(statement):
        name = last_name(call.func)
        owner = last_name(owner_of(call))
        is_average = "ema" in f"{owner} {name}".lower().replace("_", " ").split()
        if name in {"step", "zero_grad", *CLIPS} or is_average or is_scheduler_step(call):
            return True
        if name in ("update", "update_parameters") and _averages_or_scales(owner):
            return True
    return False


def _averages_or_scales(owner: str) -> bool:
    return any(part in owner.lower() for part in ("scaler", "ema", "swa"))


def _check_simple(loop: Loop, statement: ast.stmt) -> None:
    if not isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If)):
        raise NotCertain(f"{loop.source.where(statement)} does more than step")


def _runs(loop: Loop, places: set[int]) -> Iterator[list[ast.stmt]]:
    """Statements that follow each other."""
    run: list[ast.stmt] = []
    for place, statement in enumerate(loop.body):
        if place in places:
            run.append(statement)
        elif run:
            yield run
            run = []
    if run:
        yield run


# ---- what counts batches -------------------------------------------------------------------------


def _check_counts(loop: Loop, batches: Batches) -> None:
    """Raises NotCertain where the number of a batch decides more than what is told."""
    for statement in loop.body[: loop.place_of(loop.step)]:
        if any(isinstance(one, (ast.Break, ast.Continue)) for one in ast.walk(statement)):
            raise NotCertain(f"{loop.source.where(statement)} may skip the step")
    for statement in loop.body[: loop.place_of(loop.backward)]:
        if isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.Constant):
            raise NotCertain(f"{loop.source.where(statement)} counts batches as steps")
    if batches.counter is None:
        return
    for statement in loop.body:
        if batches.counter in stored_in(statement):
            raise NotCertain(f"{loop.source.where(statement)} changes {batches.counter}")
        if batches.counter in names_in(statement) and not is_report(statement):
            raise NotCertain(
                f"{loop.source.where(statement)} goes by {batches.counter}, which would count"
                " micro-batches"
            )
