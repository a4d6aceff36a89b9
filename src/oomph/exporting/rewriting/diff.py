"""A script, what its rehearsal saw, and a Plan -> the changes to the script, as a unified diff.

    changes = script_changes({"train.py": text}, ["--epochs", "3"], seen, plan)
    print(changes.diff)  # for `patch -p1` or `git apply`; only the user applies it

Files are read as text, never executed, and text outside the edits does not change. Where no edit
is certain, a sentence says what to do. Batch size per step and learning rate never change.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from oomph.exporting.rewriting.accumulation import loader_made, with_loader, with_split
from oomph.exporting.rewriting.draft import Draft, Option, origin_of
from oomph.exporting.rewriting.loop import drops_last, with_lengths
from oomph.exporting.rewriting.model import with_lines_on_model
from oomph.exporting.rewriting.precision import (
    with_checkpointing,
    with_offload,
    with_optimizer,
    with_precision,
    with_segments,
    with_tf32,
)
from oomph.exporting.rewriting.source import (
    LINE,
    Code,
    NotCertain,
    Source,
    argument_of,
    last_name,
)
from oomph.exporting.settings import accelerate_settings, trainer_arguments, training_arguments
from oomph.records.plan import Plan
from oomph.records.script import Aspect, ScriptChanges, Seen
from oomph.records.workload import Possible, Variant, torchrun_on
from oomph.tricks.definition import Fragment
from oomph.tricks.trick import to_put_on

# ---- keywords of TrainingArguments, Lightning's Trainer and Accelerator --------------------------
# Only values that differ from the tool's own default are added; conflicting values in the script
# are replaced.

_ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments"}
# The tools' defaults for settings that a plan decides.
_DEFAULTS: Mapping[str, object] = {
    "gradient_accumulation_steps": 1,
    "accumulate_grad_batches": 1,
    "auto_find_batch_size": False,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": True,
    "precision": "32-true",
    "mixed_precision": "no",
    "accelerator": "gpu",
    "num_nodes": 1,
    "strategy": "auto",
}


def framework_of(code: Code) -> str | None:
    """Return the tool that trains: "hf", "lightning", "accelerate"; None for a plain loop."""
    called = {last_name(call.func) for _, call in code.calls()}
    names = {name for source in code.files.values() for name in source.names}
    if _ARGUMENTS & called or ("HfArgumentParser" in called and _ARGUMENTS & names):
        return "hf"
    if "Trainer" in called and _imports(code, "lightning", "pytorch_lightning"):
        return "lightning"
    return "accelerate" if "Accelerator" in called else None


def _imports(code: Code, *packages: str) -> bool:
    nodes = [node for source in code.files.values() for node in source.imports]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    plain = (node for node in nodes if isinstance(node, ast.Import))
    modules += [alias.name for node in plain for alias in node.names]
    return any(name.partition(".")[0] in packages for name in modules)


def _the_call(code: Code, *names: str) -> tuple[Source, ast.Call]:
    found = list(code.calls(*names))
    if len(found) != 1:
        raise NotCertain(f"{len(found)} calls of {' or '.join(names)} could be the training's")
    return found[0]


def _the_calls(code: Code, *names: str) -> list[tuple[Source, ast.Call]]:
    """Return the call, or the calls of one conditional that make the same object either way."""
    found = list(code.calls(*names))
    made = {_target(source, call) for source, call in found}
    return found if found and len(made) == 1 and None not in made else [_the_call(code, *names)]


def _target(source: Source, call: ast.Call) -> tuple[str, ast.AST, str] | None:
    """Return what a call, or a conditional with it, is assigned to: file, scope, name."""
    node = source.parents[call]
    while isinstance(node, ast.IfExp):
        node = source.parents[node]
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    return source.path, source.scope_of(node), source.code(node.targets[0])


def _with_keywords(draft: Draft, names: tuple[str, ...], wanted: Mapping[str, object]) -> Draft:
    """Set each keyword of the call, unless it already has that value."""
    for name, value in wanted.items():
        for number in range(len(_the_calls(draft.code, *names))):
            source, call = _the_calls(draft.code, *names)[number]
            own = argument_of(call, name)
            if own is None and _DEFAULTS.get(name, _UNKNOWN) == value:
                _check_unpacked(source, call, name, value)
            elif not (isinstance(own, ast.Constant) and own.value == value):
                draft = _with_keyword(draft, source, call, name, value).applied()
    return draft


_UNKNOWN = object()


def _check_unpacked(source: Source, call: ast.Call, name: str, value: object) -> None:
    if any(keyword.arg is None for keyword in call.keywords):
        raise NotCertain(
            f"{source.where(call)}: {name} is to be {value!r}, also in what is unpacked"
        )


def _with_keyword(draft: Draft, source: Source, call: ast.Call, name: str, value: object) -> Draft:
    """Change the command-line option that sets a keyword, if there is one, else the keyword."""
    own = argument_of(call, name)
    origin = origin_of(draft.code, source, own) if own is not None else None
    if isinstance(origin, Option) and origin.action == "store":
        return draft.with_option(origin, str(value))
    if isinstance(origin, Option) and origin.action == "store_true" and value is True:
        return draft.with_option(origin, None)
    if type(value) is int and origin is not None and own is not None:
        return draft.with_number(source, own, value)
    return draft.plus(*source.with_keyword(call, name, _written(value)))


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


# ---- transformers --------------------------------------------------------------------------------


def _with_training_arguments(draft: Draft, _: Seen, variant: Variant) -> Draft:
    if not any(draft.code.calls(*_ARGUMENTS)):
        return _with_flags(draft, variant)
    call = _the_call(draft.code, *_ARGUMENTS)[1]
    mine = {
        keyword.arg: keyword.value.value
        for keyword in call.keywords
        if keyword.arg and isinstance(keyword.value, ast.Constant)
    }
    wanted = _differing(training_arguments(variant, mine), mine)
    return _with_keywords(draft, tuple(sorted(_ARGUMENTS)), wanted)


def _differing(planned: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in planned.items() if mine.get(name, _UNKNOWN) != value}


def _with_flags(draft: Draft, variant: Variant) -> Draft:
    """Set TrainingArguments that HfArgumentParser fills from the command line."""
    if any(word.endswith((".json", ".yaml", ".yml")) for word in draft.arguments):
        raise NotCertain("TrainingArguments are read from a file: set them there")
    arguments = draft.arguments
    wanted = training_arguments(variant)
    known = [f"--{name}" for name in wanted]
    source = draft.code.main
    place = (source, ast.Constant(value=None, lineno=1, col_offset=0))
    for name, value in wanted.items():
        option = Option((f"--{name}",), "store", None, place)
        is_given = any(word.partition("=")[0] == f"--{name}" for word in arguments)
        if not is_given and _DEFAULTS.get(name, _UNKNOWN) == value:
            continue
        text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
        arguments = option.with_value(text, arguments, known)
    return replace(draft, arguments=arguments)


# ---- Lightning and accelerate --------------------------------------------------------------------


def _with_trainer(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    for source in draft.code.files.values():
        if "automatic_optimization" in source.names:
            raise NotCertain(f"{source.path} optimizes by itself: accumulate in its training_step")
    wanted = trainer_arguments(variant)
    if _computes_alike(seen, variant):
        wanted.pop("precision")  # it has several names
    if variant.num_gpus == 1:
        for name in ("accelerator", "devices", "num_nodes", "strategy"):
            wanted.pop(name)
    draft = _with_keywords(draft, ("Trainer",), wanted)
    return _with_loader_of_tool(draft, seen, variant)


def _with_accelerator(
    draft: Draft, seen: Seen, variant: Variant, *, sets_precision: bool = True
) -> Draft:
    source, call = _the_calls(draft.code, "Accelerator")[0]
    if variant.accumulation > 1 and not any(
        "accumulate" in one.names for one in draft.code.files.values()
    ):
        raise NotCertain(
            f"{source.where(call)}: forward, backward and step are to be within"
            " `with accelerator.accumulate(model):`"
        )
    wanted = dict(accelerate_settings(variant).arguments)
    if _computes_alike(seen, variant) or not sets_precision:
        wanted.pop("mixed_precision")
    draft = _with_keywords(draft, ("Accelerator",), wanted)
    return _with_loader_of_tool(draft, seen, variant)


def _computes_alike(seen: Seen, variant: Variant) -> bool:
    precision = "fp32" if variant.precision == "tf32" else variant.precision
    return precision == seen.precision


def _with_loader_of_tool(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """Set batch size and batch counts of the training loader. There may be a validation loader."""
    if seen.micro_batch == variant.micro_batch:
        return draft
    made = loader_made(draft.code, seen)
    if made is None:
        raise NotCertain(f"the loader's batch_size is to be {variant.micro_batch}")
    draft = with_loader(draft, seen, made, variant.micro_batch)
    before = seen.accumulation or 1
    if variant.accumulation % before:
        return draft.applied()
    times = variant.accumulation // before
    return with_lengths(draft, made[1], times, drops_last=drops_last(made[1])).applied()


# What each tool's settings are given to, and how.
_TOOLS: Mapping[str, tuple[str, Callable[[Draft, Seen, Variant], Draft]]] = {
    "hf": ("TrainingArguments", _with_training_arguments),
    "lightning": ("Trainer", _with_trainer),
    "accelerate": ("Accelerator", _with_accelerator),
}


def script_changes(
    sources: Mapping[str, str],
    arguments: Sequence[str],
    seen: Seen,
    plan: Plan,
    *,
    possible: Possible | None = None,
    autocasts: bool = False,
    directory: str = "/",
) -> ScriptChanges:
    """Return the changes. The first source, by path, is the script, then the user's own imports.

    `possible` has the names of the model's parts. With `autocasts`, a loop of accelerate gets
    torch's autocast around forward and loss: accelerate's own casts what the model returns to
    fp32. The diff names files relative to `directory`, so that git apply works there.
    """
    readable, by_hand = _read(sources)
    start = Draft(code=code_of(readable, seen), arguments=(*arguments,))
    draft, left = start, list[Aspect]()
    changes = _changes(start.code, seen, plan.variant, possible, autocasts) if readable else []
    for change in changes:
        changed = _tried(change, draft)
        if isinstance(changed, Draft):
            draft = changed
        else:  # say why with line numbers of the user's own text, if the change fails there too
            of_start = _tried(change, start)
            why = changed if isinstance(of_start, Draft) else of_start
            by_hand.append(f"{change.words}: {why}")
            left.append(change.aspect)
    by_hand += _beyond(plan.variant)
    return ScriptChanges(
        diff="".join(
            diff_of(name_from(path, directory), source.text, draft.code.files[path].text)
            for path, source in readable.items()
        ),
        arguments=draft.arguments,
        by_hand=tuple(by_hand),
        left=tuple(left),
        edited=tuple(
            (path, draft.code.files[path].text)
            for path, source in readable.items()
            if draft.code.files[path].text != source.text
        ),
    )


def code_of(files: Mapping[str, Source], seen: Seen) -> Code:
    """Return the files with the places where the rehearsal saw each event."""
    return Code(files=files, marks=_marks(files, seen))


def read_sources(sources: Mapping[str, str]) -> dict[str, Source]:
    """Return the files that are Python."""
    return _read(sources)[0]


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
    except (SyntaxError, ValueError) as error:  # a null byte raises ValueError
        return error


# ---- the changes to try --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One change to try, with the words for doing it by hand."""

    aspect: Aspect
    words: str
    make: Callable[[Draft], Draft]  # raises NotCertain


def _changes(
    code: Code, seen: Seen, variant: Variant, possible: Possible | None, autocasts: bool
) -> list[Change]:
    framework = framework_of(code)
    segments = Change("other", "expandable segments", lambda d: with_segments(d, variant))
    offload = Change(
        "other",
        "activations on the host",
        lambda d: with_offload(d, variant, is_plain=framework is None),
    )
    settings = [
        offload,
        segments,
        Change("other", "TF32", lambda d: with_tf32(d, variant)),
        Change(
            "other",
            f"optimizer: {variant.optimizer}",
            lambda d: with_optimizer(d, seen, variant),
        ),
        *_on_model(seen, variant, possible),
    ]
    autocast = Change(
        "precision",
        f"autocast to {variant.precision}",
        lambda d: with_precision(d, seen, variant),
    )
    split = _split(variant)
    if framework is None:
        around = [autocast]
        if variant.num_gpus == 1:
            around.insert(0, Change("split", split, lambda d: with_split(d, seen, variant)))
        return [*around, *settings]
    tool, change = _TOOLS[framework]
    of_tool = Change(
        "split", f"{tool}: {split}, {variant.precision}", lambda d: change(d, seen, variant)
    )
    if framework == "hf":  # it sets the optimizer, TF32 and checkpointing itself
        own = (one for one in _on_model(seen, variant, possible) if one.aspect != "checkpointing")
        return [of_tool, offload, segments, *own]
    if autocasts and framework == "accelerate":
        without = partial(_with_accelerator, seen=seen, variant=variant, sets_precision=False)
        return [Change("split", split, without), autocast, *settings]
    return [of_tool, *settings]


def _on_model(seen: Seen, variant: Variant, possible: Possible | None) -> list[Change]:
    """Return the changes that are lines below the one that makes the model."""
    blocks = variant.checkpointing.replace(":", " ")
    words = {"checkpointing": f"checkpointing of {blocks}", "channels-last": "channels last"}
    found = []
    for trick in to_put_on(variant):
        put = trick.in_script
        if put is None:
            continue
        is_recomputing = trick.name == "checkpointing"
        make = partial(_with_trick, seen=seen, variant=variant, possible=possible, put=put)
        if is_recomputing:
            make = partial(with_checkpointing, seen=seen, variant=variant, otherwise=make)
        aspect: Aspect = "checkpointing" if is_recomputing else "other"
        found.append(Change(aspect, words.get(trick.name, trick.name), make))
    return found


def _with_trick(
    draft: Draft,
    seen: Seen,
    variant: Variant,
    possible: Possible | None,
    put: Callable[[Variant, Possible], Fragment],
) -> Draft:
    if possible is None:
        raise NotCertain("the names of the model's parts are not known")
    return with_lines_on_model(draft, seen, put(variant, possible))


def _split(variant: Variant) -> str:
    gpus = f" on each of {variant.num_gpus} GPUs" if variant.num_gpus > 1 else ""
    return (
        f"{variant.micro_batch} examples at a time{gpus}, {variant.accumulation} times for each"
        f" step (the batch stays {variant.batch_size})"
    )


def _tried(change: Change, draft: Draft) -> Draft | NotCertain:
    try:
        return change.make(draft)
    except NotCertain as error:
        return error


def _beyond(variant: Variant) -> list[str]:
    """Return the tricks that take more than a line or two, each with the code that does it."""
    sentences = [
        line
        for trick in to_put_on(variant)
        if not trick.has_edit and trick.in_script is None and trick.setting != "sharding"
        for line in trick.by_hand(variant, "accelerate")
    ]
    if variant.num_gpus > 1:
        wrapper = "DistributedDataParallel" if variant.sharding == "ddp" else "fully_shard"
        sentences.append(
            f"{_split(variant)}: {torchrun_on(variant)}, {wrapper} around the"
            " model, a DistributedSampler in the loader"
        )
    return sentences


# ---- locations and text --------------------------------------------------------------------------


def _marks(files: Mapping[str, Source], seen: Seen) -> dict[str, tuple[str, int]]:
    """Return where the rehearsal saw each event, by the paths of the sources."""
    marked = [(line.what, line.file, line.line) for line in seen.lines]
    if seen.loader is not None:
        file, _, line = seen.loader.place.rpartition(":")
        marked += [("loader", file, int(line))] if line.isdecimal() else []  # type: ignore[list-item]
    found = ((what, _path_of(files, file), line) for what, file, line in marked)
    return {what: (path, line) for what, path, line in found if path is not None}


def _path_of(files: Mapping[str, Source], file: str) -> str | None:
    """Find the source for a rehearsal's file: the same path, or the only one that ends like it."""
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


def name_from(path: str, directory: str) -> str:
    pure = PurePath(path)
    inside = pure.relative_to(directory) if pure.is_relative_to(directory) else pure
    return inside.as_posix().lstrip("/")


def diff_of(name: str, old: str, new: str) -> str:
    """Return the unified diff. Compare line by line, keeping each line's own ending."""
    if old == new:
        return ""
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def _lines(text: str) -> list[str]:
    return [found.group() for found in LINE.finditer(text) if found.group()]
