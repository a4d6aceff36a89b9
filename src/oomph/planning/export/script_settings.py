"""A plan's levers that are one line or one keyword -> that line or keyword in the user's files.

The optimizer's implementation, TF32, the allocator's segments, checkpointing of a transformers
model.
"""

from __future__ import annotations

import ast

from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_edits import after, argument_of, before, replaced, with_keyword
from oomph.planning.export.script_precision import torch_name
from oomph.planning.export.script_source import Code, NotCertain, Source, last_name
from oomph.records.script import Seen
from oomph.records.workload import Variant

# Which classes of torch.optim 2.13 take the keyword.
_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
_FOREACH = _FUSED | {
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Adafactor",
}


def with_optimizer(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """`fused=True`, `foreach=False`: where the optimizer is made."""
    wanted = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
    }.get(variant.optimizer, {})
    has = {"fused": seen.is_fused, "foreach": seen.is_foreach}
    if all(has[name] is value for name, value in wanted.items()):
        return draft
    if seen.num_optimizers > 1:
        raise NotCertain(f"{seen.num_optimizers} optimizers are to be made so, each")
    source, call = _optimizer_made(draft.code, seen, wanted)
    other = "foreach" if "fused" in wanted else "fused"
    if argument_of(call, other) is not None:
        wanted[other] = False  # torch refuses both
    for name, value in wanted.items():
        source, call = _optimizer_made(draft.code, seen, {})
        draft = draft.plus(source, *with_keyword(source, call, name, str(value))).made()
    return draft


def _optimizer_made(code: Code, seen: Seen, wanted: dict[str, bool]) -> tuple[Source, ast.Call]:
    found = [one for one in code.calls() if last_name(one[1].func) == seen.optimizer]
    if "optimizer" in code.marks:
        path, line = code.marks["optimizer"]
        found = [
            (source, call)
            for source, call in found
            if source.path == path and call.lineno <= line <= (call.end_lineno or line)
        ]
    written = " and ".join(f"{name}={value}" for name, value in wanted.items())
    if len(found) != 1:
        raise NotCertain(f"the optimizer {seen.optimizer} is to be made with {written}")
    source, call = found[0]
    takes = _FUSED if "fused" in wanted else _FOREACH
    if wanted and last_name(call.func) not in takes:
        raise NotCertain(f"{source.where(call)} has no {written}")
    return source, call


def with_tf32(draft: Draft, variant: Variant) -> Draft:
    """The switch, below the imports of the script."""
    if variant.precision != "tf32":
        return draft
    for source, node in draft.code.nodes():
        if isinstance(node, ast.Call) and last_name(node.func) == "set_float32_matmul_precision":
            if node.args and isinstance(node.args[0], ast.Constant):
                own = node.args[0]
                is_on = own.value in ("high", "medium")
                return (
                    draft if is_on else draft.plus(source, replaced(source, own, '"high"')).made()
                )
            raise NotCertain(f'{source.where(node)} is to be given "high"')
    source = draft.code.main
    line = f'{torch_name(source)}.set_float32_matmul_precision("high")'
    return draft.plus(source, after(source, _last_import(source), ["", line])).made()


def _last_import(source: Source) -> ast.stmt:
    """The import of torch, or the last of those that follow it."""
    found: ast.stmt | None = None
    for statement in source.tree.body:
        is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
        if found is not None and not is_import:
            break
        names = {alias.name.partition(".")[0] for alias in getattr(statement, "names", [])}
        if found is not None or (isinstance(statement, ast.Import) and "torch" in names):
            found = statement
    if found is None:
        raise NotCertain(f"{source.path} does not import torch by itself")
    return found


_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def with_segments(draft: Draft, variant: Variant) -> Draft:
    """Expandable segments in the environment, before anything is imported that could be torch."""
    if not variant.expandable_segments:
        return draft
    for source in draft.code.files.values():
        if source.names.intersection(_NAMES):
            if "expandable_segments:True" in source.text:
                return draft
            raise NotCertain(f"{source.path} sets {_NAMES[0]}: add expandable_segments:True to it")
    source = draft.code.main
    first = next((one for one in source.tree.body if not _must_be_first(one)), None)
    if first is None:
        raise NotCertain(f"set {_NAMES[0]}=expandable_segments:True before torch is imported")
    lines = [
        "import os",
        "",
        "# Read once, when CUDA starts. The second name is that of torch before 2.9.",
        *(f'os.environ.setdefault("{name}", "expandable_segments:True")' for name in _NAMES),
        "",
    ]
    return draft.plus(source, before(source, first, lines)).made()


def _must_be_first(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def with_checkpointing(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """Of a model of transformers, below the line that makes it; of others by hand."""
    if variant.checkpointing == "none" or seen.checkpointing != "none":
        return draft
    if variant.checkpointing != "blocks":
        raise NotCertain("only some blocks are to be checkpointed")
    if any("gradient_checkpointing_enable" in one.names for one in draft.code.files.values()):
        raise NotCertain("gradient_checkpointing_enable() of the script is to be called")
    source, statement, name = _transformers_model(draft.code)
    line = f'{name}.gradient_checkpointing_enable({{"use_reentrant": False}})'
    return draft.plus(source, after(source, statement, [line])).made()


def _transformers_model(code: Code) -> tuple[Source, ast.stmt, str]:
    """Where a model of transformers is made and named."""
    found = []
    for source, call in code.calls():
        statement = source.parents[call]
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        if isinstance(target, (ast.Name, ast.Attribute)) and _is_model(source, call):
            found.append((source, statement, source.code(target)))
    if len(found) != 1:
        raise NotCertain("the model's blocks are to be checkpointed in its forward")
    return found[0]


def _is_model(source: Source, call: ast.Call) -> bool:
    made = call.func
    if isinstance(made, ast.Attribute) and made.attr in ("from_pretrained", "from_config"):
        made = made.value
    name = last_name(made)
    is_theirs = any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] == "transformers"
        and name in {alias.asname or alias.name for alias in node.names}
        for node in ast.walk(source.tree)
    )
    return is_theirs and ("Model" in name or "For" in name)
