"""A script, what was seen of it, and a Plan -> what to change in the script, as a unified diff.

    changes = script_changes({"train.py": text}, ["--epochs", "3"], seen, plan)
    print(changes.diff)  # for `patch -p1` or `git apply`; nobody applies it but the user

The files are read as text and never executed, and all text but what is changed stays as it was.
What no edit is certain for is said in words instead. The batch of one step and the learning rate
are never changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from oomph.planning.export.beyond import not_expressed
from oomph.planning.export.script_batch import with_split
from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_frameworks import framework_of, with_framework
from oomph.planning.export.script_precision import with_precision
from oomph.planning.export.script_settings import (
    with_checkpointing,
    with_optimizer,
    with_segments,
    with_tf32,
)
from oomph.planning.export.script_source import LINE, Code, NotCertain, Source
from oomph.records.plan import Plan
from oomph.records.script import ScriptChanges, Seen
from oomph.records.workload import Variant


def script_changes(
    sources: Mapping[str, str],
    arguments: Sequence[str],
    seen: Seen,
    plan: Plan,
    *,
    directory: str = "/",
) -> ScriptChanges:
    """The script itself is the first of the sources, by path; then what it imports of its own.

    The diff names what is below `directory` as it is called from there: git apply takes it there.
    """
    readable, by_hand = _read(sources)
    start = Draft(code=Code(files=readable, marks=_marks(readable, seen)), arguments=(*arguments,))
    draft = start
    for attempt in _attempts(start.code, seen, plan.variant) if readable else []:
        draft, sentence = attempt(draft, start)
        by_hand += [sentence] if sentence else []
    by_hand += _beyond(plan.variant)
    return ScriptChanges(
        diff="".join(
            _diff(_name_from(path, directory), source.text, draft.code.files[path].text)
            for path, source in readable.items()
        ),
        arguments=draft.arguments,
        by_hand=tuple(by_hand),
    )


def _read(sources: Mapping[str, str]) -> tuple[dict[str, Source], list[str]]:
    files, by_hand = {}, []
    for path, text in sources.items():
        read = _source(path, text)
        if isinstance(read, Source):
            files[path] = read
        else:
            by_hand.append(f"{path} cannot be read as Python, and is left as it is: {read}")
    return files, by_hand


def _source(path: str, text: str) -> Source | Exception:
    try:
        return Source(path, text)
    except (SyntaxError, ValueError) as error:  # a zero byte is a ValueError
        return error


# ---- what is tried -------------------------------------------------------------------------------

Attempt = Callable[[Draft, Draft], tuple[Draft, str | None]]


def _attempts(code: Code, seen: Seen, variant: Variant) -> list[Attempt]:
    framework = framework_of(code)
    settings: list[Attempt] = [
        _trying(lambda d: with_segments(d, variant), "expandable segments"),
    ]
    if framework != "hf":
        settings += [
            _trying(lambda d: with_tf32(d, variant), "TF32"),
            _trying(lambda d: with_optimizer(d, seen, variant), f"optimizer: {variant.optimizer}"),
            _trying(
                lambda d: with_checkpointing(d, seen, variant),
                f"checkpointing of {variant.checkpointing.replace(':', ' ')}",
            ),
        ]
    if framework is not None:
        name = {"hf": "TrainingArguments", "lightning": "Trainer", "accelerate": "Accelerator"}
        what = f"{name[framework]}: {_split(variant)}, {variant.precision}"
        run = _trying(lambda d: with_framework(d, seen, variant, framework), what)
        return [run, *settings]
    precision = _trying(
        lambda d: with_precision(d, seen, variant), f"autocast to {variant.precision}"
    )
    if variant.num_gpus > 1:
        return [precision, *settings]
    return [_trying(lambda d: with_split(d, seen, variant), _split(variant)), precision, *settings]


def _split(variant: Variant) -> str:
    gpus = f" on each of {variant.num_gpus} GPUs" if variant.num_gpus > 1 else ""
    return (
        f"{variant.micro_batch} examples at a time{gpus}, {variant.accumulation} times for each"
        f" step (the batch stays {variant.batch_size})"
    )


def _trying(change: Callable[[Draft], Draft], what: str) -> Attempt:
    def attempt(draft: Draft, start: Draft) -> tuple[Draft, str | None]:
        try:
            return change(draft), None
        except NotCertain as error:
            return draft, f"{what}: {_in_the_users_lines(change, start) or error}"

    return attempt


def _in_the_users_lines(change: Callable[[Draft], Draft], start: Draft) -> NotCertain | None:
    """Why a change is not certain, told of the text that the user has."""
    try:
        change(start)
    except NotCertain as error:
        return error
    return None


def _beyond(variant: Variant) -> list[str]:
    """The levers that are no edit of a line or two, each with what does it in code."""
    implementations = ("as-is", "fused", "foreach", "for-loop")
    rest = replace(
        variant,
        precision="fp32" if variant.precision == "tf32" else variant.precision,
        checkpointing="none",
        optimizer="as-is" if variant.optimizer in implementations else variant.optimizer,
        expandable_segments=False,
        sharding="none",
        num_gpus=1,
    )
    sentences = [one for one in not_expressed(rest, "accelerate") if "the loader: " not in one]
    if variant.num_gpus > 1:
        how = "DistributedDataParallel" if variant.sharding == "ddp" else "fully_shard"
        sentences.append(
            f"{_split(variant)}: torchrun --nproc-per-node {variant.num_gpus}, {how} around the"
            " model, a DistributedSampler in the loader"
        )
    return sentences


# ---- places and text -----------------------------------------------------------------------------


def _marks(files: Mapping[str, Source], seen: Seen) -> dict[str, tuple[str, int]]:
    """Where the rehearsal saw what, by the paths of the sources."""
    told = [(line.what, line.file, line.line) for line in seen.lines]
    if seen.loader is not None:
        file, _, line = seen.loader.place.rpartition(":")
        told += [("loader", file, int(line))] if line.isdecimal() else []  # type: ignore[list-item]
    found = ((what, _path_of(files, file), line) for what, file, line in told)
    return {what: (path, line) for what, path, line in found if path is not None}


def _path_of(files: Mapping[str, Source], file: str) -> str | None:
    """The source that a rehearsal's file is: the same path, or the only one that ends like it."""
    if file in files:
        return file
    parts = PurePath(file).parts
    ends = [
        path
        for path in files
        if parts[-len(PurePath(path).parts) :] == PurePath(path).parts
        or PurePath(path).parts[-len(parts) :] == parts
    ]
    return ends[0] if len(ends) == 1 else None


def _name_from(path: str, directory: str) -> str:
    pure = PurePath(path)
    inside = pure.relative_to(directory) if pure.is_relative_to(directory) else pure
    return inside.as_posix().lstrip("/")


def _diff(name: str, old: str, new: str) -> str:
    """Line by line, each with the ending that it has."""
    if old == new:
        return ""
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def _lines(text: str) -> list[str]:
    return [found.group() for found in LINE.finditer(text) if found.group()]
