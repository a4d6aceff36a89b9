"""A plan -> the keywords of transformers' TrainingArguments, Lightning's Trainer, Accelerator.

Only what differs from the tool's own default is added; what the script says otherwise is replaced.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oomph.planning.export.accelerate import accelerate_settings
from oomph.planning.export.hugging_face import training_arguments
from oomph.planning.export.lightning import trainer_arguments
from oomph.planning.export.script_arguments import with_value
from oomph.planning.export.script_batch import loader_made, with_loader
from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_edits import argument_of, with_keyword
from oomph.planning.export.script_lengths import with_lengths
from oomph.planning.export.script_options import Option, number_behind
from oomph.planning.export.script_source import Code, NotCertain, Source, last_name
from oomph.records.script import Seen
from oomph.records.workload import Variant

_ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments"}
# What the tools do when nothing is said, as far as a plan decides it.
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
    """Which tool trains: "hf", "lightning", "accelerate"; None for a plain loop."""
    called = {last_name(call.func) for _, call in code.calls()}
    names = {name for source in code.files.values() for name in source.names}
    if _ARGUMENTS & called or ("HfArgumentParser" in called and _ARGUMENTS & names):
        return "hf"
    if "Trainer" in called and _imports(code, "lightning", "pytorch_lightning"):
        return "lightning"
    return "accelerate" if "Accelerator" in called else None


def _imports(code: Code, *packages: str) -> bool:
    modules = {
        name.partition(".")[0]
        for _, node in code.nodes()
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    return bool(modules & set(packages))


def with_framework(draft: Draft, seen: Seen, variant: Variant, framework: str) -> Draft:
    """Raises NotCertain, and then nothing is changed."""
    if framework == "hf":
        return _with_training_arguments(draft, variant)
    if framework == "lightning":
        return _with_trainer(draft, seen, variant)
    return _with_accelerator(draft, seen, variant)


def _the_call(code: Code, *names: str) -> tuple[Source, ast.Call]:
    found = [one for one in code.calls() if last_name(one[1].func) in names]
    if len(found) != 1:
        raise NotCertain(f"{len(found)} calls of {' or '.join(names)} could be the training's")
    return found[0]


def _with_keywords(draft: Draft, names: tuple[str, ...], wanted: Mapping[str, object]) -> Draft:
    """Each keyword of the one call, where it is not so already."""
    for name, value in wanted.items():
        source, call = _the_call(draft.code, *names)
        own = argument_of(call, name)
        if own is None and _DEFAULTS.get(name, _UNKNOWN) == value:
            _check_unpacked(source, call, name, value)
            continue
        if isinstance(own, ast.Constant) and own.value == value:
            continue
        draft = _with_keyword(draft, source, call, name, value).made()
    return draft


_UNKNOWN = object()


def _check_unpacked(source: Source, call: ast.Call, name: str, value: object) -> None:
    if any(keyword.arg is None for keyword in call.keywords):
        raise NotCertain(
            f"{source.where(call)}: {name} is to be {value!r}, also in what is unpacked"
        )


def _with_keyword(draft: Draft, source: Source, call: ast.Call, name: str, value: object) -> Draft:
    """An option's where it is one, else the keyword itself."""
    own = argument_of(call, name)
    origin = number_behind(draft.code, source, own) if own is not None else None
    if isinstance(origin, Option) and origin.action == "store":
        return draft.with_option(origin, str(value))
    if isinstance(origin, Option) and origin.action == "store_true" and value is True:
        return draft.with_option(origin, None)
    if type(value) is int and origin is not None and own is not None:
        return draft.with_number(source, own, value)
    return draft.plus(source, *with_keyword(source, call, name, _written(value)))


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


# ---- transformers --------------------------------------------------------------------------------


def _with_training_arguments(draft: Draft, variant: Variant) -> Draft:
    called = [one for one in draft.code.calls() if last_name(one[1].func) in _ARGUMENTS]
    if not called:
        return _with_flags(draft, variant)
    _, call = _the_call(draft.code, *_ARGUMENTS)
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
    """TrainingArguments that HfArgumentParser fills from the command line."""
    if any(word.endswith((".json", ".yaml", ".yml")) for word in draft.arguments):
        raise NotCertain("TrainingArguments are read from a file: set them there")
    arguments = draft.arguments
    wanted = training_arguments(variant)
    known = [f"--{name}" for name in wanted]
    source = draft.code.main
    place = (source, ast.Constant(value=None, lineno=1, col_offset=0))
    for name, value in wanted.items():
        option = Option((f"--{name}",), "store", None, place)
        is_said = any(word.partition("=")[0] == f"--{name}" for word in arguments)
        if not is_said and _DEFAULTS.get(name, _UNKNOWN) == value:
            continue
        text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
        arguments = with_value(option, text, arguments, known)
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


def _with_accelerator(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    source, call = _the_call(draft.code, "Accelerator")
    if variant.accumulation > 1 and not any(
        "accumulate" in one.names for one in draft.code.files.values()
    ):
        raise NotCertain(
            f"{source.where(call)}: forward, backward and step are to be within"
            " `with accelerator.accumulate(model):`"
        )
    wanted = dict(accelerate_settings(variant).arguments)
    if _computes_alike(seen, variant):
        wanted.pop("mixed_precision")
    draft = _with_keywords(draft, ("Accelerator",), wanted)
    return _with_loader_of_tool(draft, seen, variant)


def _computes_alike(seen: Seen, variant: Variant) -> bool:
    precision = "fp32" if variant.precision == "tf32" else variant.precision
    return precision == seen.precision


def _with_loader_of_tool(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """Its batch size, and what counts its batches. There may be a loader for validation too."""
    if seen.micro_batch == variant.micro_batch:
        return draft
    made = loader_made(draft.code, seen)
    if made is None:
        raise NotCertain(f"the loader's batch_size is to be {variant.micro_batch}")
    draft = with_loader(draft, seen, made, variant.micro_batch)
    before = seen.accumulation or 1
    if variant.accumulation % before:
        return draft.made()
    dropped = argument_of(made[1], "drop_last", 8)
    drops_last = isinstance(dropped, ast.Constant) and dropped.value is True
    times = variant.accumulation // before
    return with_lengths(draft, made[1], times, drops_last=drops_last).made()
