"""A plan's precision -> autocast around forward and loss, and a GradScaler for fp16."""

from __future__ import annotations

import ast

from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_edits import (
    a_name,
    after,
    argument_of,
    before,
    replaced,
    unit_of,
    within,
)
from oomph.planning.export.script_loop import (
    CLIPS,
    Loop,
    loops_around,
    loss_of,
    the_backward,
    training_loop,
)
from oomph.planning.export.script_options import Option, number_behind
from oomph.planning.export.script_source import (
    Code,
    Edit,
    NotCertain,
    Source,
    calls_in,
    is_call_of,
    last_name,
    owner_of,
)
from oomph.records.script import Seen
from oomph.records.workload import Variant

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def with_precision(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """Raises NotCertain, and then nothing is changed."""
    if variant.precision == seen.precision or variant.precision not in _DTYPES:
        return draft
    if seen.precision != "fp32":
        raise NotCertain(
            f"the script computes in {seen.precision}: autocast is to be in {variant.precision}"
        )
    dtype = _DTYPES[variant.precision]
    own = [one for one in draft.code.calls() if last_name(one[1].func) == "autocast"]
    if own:
        return _switched_on(draft, own, dtype)
    draft = _with_autocast(draft, dtype)
    if variant.precision == "fp16" and not seen.uses_grad_scaler:
        draft = _with_scaler(draft)
    return draft


def _switched_on(draft: Draft, own: list[tuple[Source, ast.Call]], dtype: str) -> Draft:
    """The script's own autocast, if a flag of its command line is what keeps it off."""
    source, call = own[0]
    enabled = argument_of(call, "enabled")
    kind = argument_of(call, "dtype")
    origin = number_behind(draft.code, source, enabled) if enabled is not None else None
    is_other = len(own) > 1 or (kind is not None and last_name(kind) != dtype)
    if is_other or not isinstance(origin, Option) or origin.action != "store_true":
        raise NotCertain(f"{source.where(call)} is to be on, with dtype=torch.{dtype}")
    return draft.with_option(origin, None)


def torch_name(source: Source) -> str:
    """What the file calls torch. Raises NotCertain if nothing."""
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch":
                    return alias.asname or "torch"
                if alias.name.startswith("torch.") and alias.asname is None:
                    return "torch"
    raise NotCertain(f"{source.path} does not import torch by itself")


def _with_autocast(draft: Draft, dtype: str) -> Draft:
    source, backward = the_backward(draft.code)
    scope = source.scope_of(backward)
    if sum(is_call_of(one, "backward") for one in ast.walk(scope)) > 1:
        raise NotCertain(
            f"{source.where(backward)} is one of several: autocast is for each of them"
        )
    torch = torch_name(source)
    statements = _computing(draft.code, source, backward)
    _check_autocast(draft.code)
    outer = source.parents[statements[0]]
    unit = unit_of(source, outer) if isinstance(outer, ast.stmt) else "    "
    header = f'with {torch}.autocast("cuda", dtype={torch}.{dtype}):'
    return draft.plus(source, *within(source, statements, header, unit)).made()


def _computing(code: Code, source: Source, call: ast.Call) -> list[ast.stmt]:
    """The statements from forward to the loss."""
    backward = source.statement_of(call)
    block = source.block_of(backward)
    end = block.index(backward)
    begin = next((n for n in range(end) if _is_forward(code, source, block[n])), None)
    if begin is None:
        raise NotCertain(f"what comes before {source.where(backward)} is to be within autocast")
    loss = loss_of(call)
    while end > begin + 1 and not _sets_part_of(loss, block[end - 1]):
        end -= 1  # what comes after the loss: metrics, zeroing
    return block[begin:end]


def _sets_part_of(loss: ast.expr, statement: ast.stmt) -> bool:
    places = (ast.Name, ast.Attribute)
    read = {ast.unparse(node) for node in ast.walk(loss) if isinstance(node, places)}
    return any(
        isinstance(node, places) and isinstance(node.ctx, ast.Store) and ast.unparse(node) in read
        for node in ast.walk(statement)
    )


def _is_forward(code: Code, source: Source, statement: ast.stmt) -> bool:
    """Is the model called in it, or a function in which it is called?"""
    if "forward" in code.marks:
        path, line = code.marks["forward"]
        if path == source.path and statement.lineno <= line <= (statement.end_lineno or line):
            return True
        name = _function_at(code, path, line)
        return name is not None and any(last_name(c.func) == name for c in calls_in(statement))
    models = _models(code)
    return any(last_name(call.func) in models for call in calls_in(statement))


def _function_at(code: Code, path: str, line: int) -> str | None:
    """The innermost function around a line."""
    found = None
    source = code.files.get(path)
    for node in ast.walk(source.tree) if source else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = node.name if node.lineno <= line <= (node.end_lineno or line) else found
    return found


def _models(code: Code) -> set[str]:
    """Names whose `.parameters()` or `.train()` is called."""
    return {
        last_name(call.func.value)
        for _, call in code.calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("parameters", "train")
    }


def _check_autocast(code: Code) -> None:
    """Raises NotCertain for a loss that autocast refuses (torch.amp: "autocast and BCELoss")."""
    for source, call in code.calls():
        if last_name(call.func) in ("BCELoss", "binary_cross_entropy"):
            raise NotCertain(f"{source.where(call)} is refused within autocast: use logits")


# ---- the loss scaler -----------------------------------------------------------------------------


def _with_scaler(draft: Draft) -> Draft:
    loop = training_loop(draft.code)
    source = loop.source
    torch = torch_name(source)
    scaler = a_name(source, "scaler")
    optimizer = _optimizer_of(loop)
    made = f'{scaler} = {torch}.amp.GradScaler("cuda")'
    draft = draft.plus(source, _made_at(source, loop, made))
    rest = source.text[source.span(loop.backward.func)[1] : source.span(loop.backward)[1]]
    text = f"{scaler}.scale({source.code(loop.loss)}).backward{rest}"
    draft = draft.plus(source, replaced(source, loop.backward, text))
    draft = draft.plus(source, replaced(source, loop.step, f"{scaler}.step({optimizer})"))
    draft = draft.plus(
        source, after(source, source.statement_of(loop.step), [f"{scaler}.update()"])
    )
    for call in calls_in(source.scope_of(loop.statement)):
        if last_name(call.func) in CLIPS:
            statement = source.statement_of(call)
            unscale = before(source, statement, [f"{scaler}.unscale_({optimizer})"])
            draft = draft.plus(source, unscale)
    return draft.made()


def _optimizer_of(loop: Loop) -> str:
    """The text that names it. Raises NotCertain where the step is more than a call of it."""
    source, step = loop.source, loop.step
    is_plain = isinstance(source.parents[step], ast.Expr) and not step.args and not step.keywords
    optimizer = owner_of(step)
    if loop.scaled or not is_plain or optimizer is None:
        raise NotCertain(f"{source.where(step)} is to go through a GradScaler")
    return source.code(optimizer)


def _made_at(source: Source, loop: Loop, line: str) -> Edit:
    """Before the outermost loop; a function that has none is called often, so before it."""
    loops = list(loops_around(source, loop.backward))
    scope = source.scope_of(loop.statement)
    if len(loops) > 1 or isinstance(scope, ast.Module):
        return before(source, loops[-1], [line])
    place = scope
    while isinstance(source.parents[place], (ast.ClassDef, ast.FunctionDef)):
        place = source.parents[place]
    if not isinstance(place, ast.stmt) or source.parents[place] is not source.tree:
        raise NotCertain(f"a line before {source.where(loop.statement)}: {line}")
    return before(source, place, [line, "", ""])
