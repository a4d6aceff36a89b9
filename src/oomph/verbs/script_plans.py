"""A script -> Plans: each way to train is the script itself, with something put around it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

_MOST_TOLD = 200  # characters of what went wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oomph.records.plan import Plans
    from oomph.records.script import Script, ScriptChanges
    from oomph.verbs.plan_search import Drawn
    from oomph.verbs.rehearsals import Asked
    from oomph.verbs.scripts import ScriptRehearser
    from oomph.verbs.targets import Target


def plan_script(
    script: Script,
    asked: Asked,
    target: Target,
    say: Callable[[str], None],
    *,
    draws: bool,
    is_unprotected: bool,
    is_fresh: bool,
) -> Drawn:
    from oomph.planning.answers import OF_LOADING
    from oomph.verbs.plan_search import Search
    from oomph.verbs.rehearsals import CannotBePutOn
    from oomph.verbs.scripts import rehearser_of

    with rehearser_of(
        script, target, say, is_unprotected=is_unprotected, is_fresh=is_fresh
    ) as rehearser:
        _check_it_steps(rehearser.seen.has_stepped)
        _hold_what_cannot_vary(rehearser, asked)
        search = Search(asked, target, _name(script), say, draws=draws)
        try:
            drawn, _ = search.run(rehearser)
        except CannotBePutOn as error:  # without this one there is nothing to compare
            raise error.error from None
    seen = rehearser.seen
    caveats = drawn.plans.caveats
    if not seen.is_batch_known:  # so many steps a second are not so many samples
        caveats = tuple(one for one in caveats if not one.startswith(OF_LOADING))
    told = tuple(one for one in seen.approximations if one not in caveats)
    plans = replace(drawn.plans, seen=seen, caveats=(*caveats, *told))
    return replace(drawn, plans=plans, changes=_changes(script, rehearser, plans))


def _hold_what_cannot_vary(rehearser: ScriptRehearser, asked: Asked) -> None:
    """Where the batch cannot be another, all else is compared at the one that there is."""
    from oomph.records.workload import Variant
    from oomph.verbs.rehearsals import CannotBePutOn
    from oomph.verbs.scripts import SMALL

    if rehearser.seen.micro_batch is None:
        if asked.batch_size is not None:
            _ = rehearser.micro_batch  # raises
        doubt = rehearser.seen.batch_doubt
        rehearser.hold_batch(
            f"the batch size is unknown ({doubt}), so oomph cannot divide the batch"
        )
        return
    # What a search asks for first: it is rehearsed once.
    small = Variant(micro_batch=SMALL, accumulation=2, precision=rehearser.own.precision)
    try:
        rehearser.trace(small)
    except CannotBePutOn as error:
        if asked.batch_size is not None:
            raise error.error from None
        why = f"{error.error.what}: {error.error.because}"[:_MOST_TOLD]
        num = rehearser.given.micro_batch
        rehearser.hold_batch(f"all is compared at {num} examples, as it is: {why}")


def _changes(script: Script, rehearser: ScriptRehearser, plans: Plans) -> ScriptChanges | None:
    """What to change in the script for the best plan; None where none fits."""
    from pathlib import Path

    from oomph.planning.export.script_diff import script_changes

    if plans.best is None:
        return None
    sources = _sources(script, rehearser.files)
    here = str(Path(script.directory).resolve())
    seen = rehearser.as_planned(plans.best.variant)
    return script_changes(sources, script.arguments, seen, plans.best, directory=here)


def _sources(script: Script, imported: Sequence[str]) -> dict[str, str]:
    """The user's own files, the script first. What is no text is left out."""
    from pathlib import Path

    own = [] if script.path is None else [str(Path(script.directory, script.path).resolve())]
    texts = {path: _text(path) for path in dict.fromkeys((*own, *imported))}
    return {path: text for path, text in texts.items() if text is not None}


def _text(path: str) -> str | None:
    from pathlib import Path

    try:
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _name(script: Script) -> str:
    return script.path or f"-m {script.module}"


def _check_it_steps(has_stepped: bool) -> None:
    from oomph.errors import UserCodeError

    if not has_stepped:
        raise UserCodeError(
            "the script made no optimizer step while it was rehearsed",
            because="what an optimizer keeps and takes is not known then, and plans would not fit",
            attempt="oomph predict, which tells the lower bound; or a Workload",
        )
