"""A plan's precision, optimizer, allocator and checkpointing -> edits of the user's files.

The edits add autocast around forward and loss, a GradScaler for fp16, TF32, the optimizer's
implementation, expandable segments, and checkpointing of a transformers model.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from oomph.exporting.rewriting.draft import Draft, Option, origin_of
from oomph.exporting.rewriting.loop import (
    CLIPS,
    Loop,
    loops_around,
    loss_of,
    the_backward,
    training_loop,
)
from oomph.exporting.rewriting.model import with_imports
from oomph.exporting.rewriting.source import (
    Code,
    Edit,
    NotCertain,
    Source,
    argument_of,
    calls_in,
    is_call_of,
    last_name,
    owner_of,
)
from oomph.records.script import Seen
from oomph.records.workload import Variant
from oomph.tricks.expandable_segments import ALLOCATOR_VARIABLES, SEGMENTS

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def with_precision(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """Set the precision. Raise NotCertain, changing nothing, if unsure."""
    if variant.precision == seen.precision or variant.precision not in _DTYPES:
        return draft
    if seen.precision != "fp32":
        raise NotCertain(
            f"the script computes in {seen.precision}: autocast is to be in {variant.precision}"
        )
    dtype = _DTYPES[variant.precision]
    own = list(draft.code.calls("autocast"))
    if own:
        return _switched_on(draft, own, dtype)
    draft = _with_autocast(draft, dtype)
    if variant.precision == "fp16" and not seen.uses_grad_scaler:
        draft = _with_scaler(draft)
    return draft


def _switched_on(draft: Draft, own: list[tuple[Source, ast.Call]], dtype: str) -> Draft:
    """Switch on the script's own autocast, if a command-line flag is what keeps it off."""
    source, call = own[0]
    enabled = argument_of(call, "enabled")
    kind = argument_of(call, "dtype")
    origin = origin_of(draft.code, source, enabled) if enabled is not None else None
    is_written = kind is None or last_name(kind) in _DTYPES.values()
    if len(own) > 1 or not is_written or not isinstance(origin, Option):
        raise NotCertain(f"{source.where(call)} is to be on, with dtype=torch.{dtype}")
    if origin.action != "store_true" or (kind is None and dtype != _DTYPES["fp16"]):
        raise NotCertain(f"{source.where(call)} is to be on, with dtype=torch.{dtype}")
    if kind is not None and last_name(kind) != dtype:
        # A loss scaler that is switched on with it does no harm: it scales by powers of two.
        draft = draft.plus(source.replaced(kind, f"{torch_name(source)}.{dtype}"))
    return draft.with_option(origin, None).applied()


def torch_name(source: Source) -> str:
    """Return the name that the file uses for torch. Raises NotCertain if there is none."""
    imports = (node for node in source.tree.body if isinstance(node, ast.Import))
    for alias in (alias for node in imports for alias in node.names):
        if alias.name == "torch":
            return alias.asname or "torch"
        if alias.name.startswith("torch.") and alias.asname is None:
            return "torch"
    raise NotCertain(f"{source.path} does not import torch by itself")


def _with_autocast(draft: Draft, dtype: str) -> Draft:
    source, _ = the_backward(draft.code)
    torch = torch_name(source)
    _check_autocast(draft.code)
    return _around_forward(draft, f'with {torch}.autocast("cuda", dtype={torch}.{dtype}):')


def with_offload(draft: Draft, variant: Variant, *, is_plain: bool) -> Draft:
    """Put offloaded activations around forward and loss of a plain loop."""
    if not variant.offload_activations:
        return draft
    header = "with oomph.offloaded_activations():"
    if not is_plain:
        raise NotCertain(f"`{header}` is to be around each forward")
    draft = _around_forward(draft, header)
    return with_imports(draft, the_backward(draft.code)[0], ["import oomph"]).applied()


def _around_forward(draft: Draft, header: str) -> Draft:
    """Put everything from forward to the loss under a header."""
    source, backward = the_backward(draft.code)
    scope = source.scope_of(backward)
    if sum(is_call_of(one, "backward") for one in ast.walk(scope)) > 1:
        raise NotCertain(
            f"{source.where(backward)} is one of several: `{header}` is for each of them"
        )
    statements = _computing(draft.code, source, backward)
    return draft.plus(*source.within(statements, header)).applied()


def _computing(code: Code, source: Source, call: ast.Call) -> list[ast.stmt]:
    """Return the statements from forward to the loss."""
    backward = source.statement_of(call)
    block = source.block_of(backward)
    end = block.index(backward)
    begin = next((n for n in range(end) if _is_forward(code, source, block[n])), None)
    if begin is None:
        raise NotCertain(f"what comes before {source.where(backward)} is to be within autocast")
    loss = loss_of(call)
    while end > begin + 1 and not _sets_part_of(loss, block[end - 1]):
        end -= 1  # skip what comes after the loss: metrics, zeroing
    return block[begin:end]


def _sets_part_of(loss: ast.expr, statement: ast.stmt) -> bool:
    places = (ast.Name, ast.Attribute)
    read = {ast.unparse(node) for node in ast.walk(loss) if isinstance(node, places)}
    return any(
        isinstance(node, places) and isinstance(node.ctx, ast.Store) and ast.unparse(node) in read
        for node in ast.walk(statement)
    )


def _is_forward(code: Code, source: Source, statement: ast.stmt) -> bool:
    """Return whether a statement calls the model, or a function that calls it."""
    if "forward" in code.marks:
        path, line = code.marks["forward"]
        if path == source.path and statement.lineno <= line <= (statement.end_lineno or line):
            return True
        name = _function_at(code, path, line)
        return name is not None and any(last_name(c.func) == name for c in calls_in(statement))
    models = _models(code)
    return any(last_name(call.func) in models for call in calls_in(statement))


def _function_at(code: Code, path: str, line: int) -> str | None:
    """Return the innermost function around a line."""
    found = None
    source = code.files.get(path)
    for node in ast.walk(source.tree) if source else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = node.name if node.lineno <= line <= (node.end_lineno or line) else found
    return found


def _models(code: Code) -> set[str]:
    """Return the names whose `.parameters()` or `.train()` is called."""
    return {
        last_name(call.func.value)
        for _, call in code.calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("parameters", "train")
    }


def _check_autocast(code: Code) -> None:
    """Raise NotCertain for a loss that autocast refuses (torch.amp: "autocast and BCELoss")."""
    for source, call in code.calls("BCELoss", "binary_cross_entropy"):
        raise NotCertain(f"{source.where(call)} is refused within autocast: use logits")


# ---- the loss scaler -----------------------------------------------------------------------------


def _with_scaler(draft: Draft) -> Draft:
    loop = training_loop(draft.code)
    source = loop.source
    torch = torch_name(source)
    scaler = source.unused_name("scaler")
    optimizer = _optimizer_of(loop)
    made = f'{scaler} = {torch}.amp.GradScaler("cuda")'
    backward = f"{scaler}.scale({source.code(loop.loss)}).backward{loop.arguments_of_backward}"
    clips = [c for c in calls_in(source.scope_of(loop.statement)) if last_name(c.func) in CLIPS]
    unscale = [f"{scaler}.unscale_({optimizer})"]
    draft = draft.plus(
        _made_at(source, loop, made),
        source.replaced(loop.backward, backward),
        source.replaced(loop.step, f"{scaler}.step({optimizer})"),
        source.after(source.statement_of(loop.step), [f"{scaler}.update()"]),
        *(source.before(source.statement_of(call), unscale) for call in clips),
    )
    return draft.applied()


def _optimizer_of(loop: Loop) -> str:
    """Return the optimizer's expression. Raises NotCertain if the step is more than one call."""
    source, step = loop.source, loop.step
    is_plain = isinstance(source.parents[step], ast.Expr) and not step.args and not step.keywords
    optimizer = owner_of(step)
    if loop.scaled or not is_plain or optimizer is None:
        raise NotCertain(f"{source.where(step)} is to go through a GradScaler")
    return source.code(optimizer)


def _made_at(source: Source, loop: Loop, line: str) -> Edit:
    """Insert a line before the outermost loop, or before a function that has no outer loop.

    Such a function is called often.
    """
    loops = list(loops_around(source, loop.backward))
    scope = source.scope_of(loop.statement)
    if len(loops) > 1 or isinstance(scope, ast.Module):
        return source.before(loops[-1], [line])
    place = scope
    while isinstance(source.parents[place], (ast.ClassDef, ast.FunctionDef)):
        place = source.parents[place]
    if not isinstance(place, ast.stmt) or source.parents[place] is not source.tree:
        raise NotCertain(f"a line before {source.where(loop.statement)}: {line}")
    return source.before(place, [line, "", ""])


# ---- edits of one line or one keyword ------------------------------------------------------------

# The classes of torch.optim 2.13 that take the keyword.
_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
_FOREACH = _FUSED.union(
    ["Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"]
)


def with_optimizer(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """Set `fused=True` or `foreach=False` where the optimizer is created."""
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
        wanted[other] = False  # torch refuses both together
    for name, value in wanted.items():
        draft = draft.plus(*source.with_keyword(call, name, str(value)))
    return draft.applied()


def _optimizer_made(code: Code, seen: Seen, wanted: dict[str, bool]) -> tuple[Source, ast.Call]:
    found = list(code.calls(seen.optimizer)) if seen.optimizer else []
    if "optimizer" in code.marks:
        found = code.at_mark("optimizer", found)
    written = " and ".join(f"{name}={value}" for name, value in wanted.items())
    if len(found) != 1:
        raise NotCertain(f"the optimizer {seen.optimizer} is to be made with {written}")
    source, call = found[0]
    takes = _FUSED if "fused" in wanted else _FOREACH
    if last_name(call.func) not in takes:
        raise NotCertain(f"{source.where(call)} has no {written}")
    return source, call


def with_tf32(draft: Draft, variant: Variant) -> Draft:
    """Insert the TF32 switch below the script's imports."""
    if variant.precision != "tf32":
        return draft
    for source, call in draft.code.calls("set_float32_matmul_precision"):
        own = call.args[0] if call.args else None
        if not isinstance(own, ast.Constant):
            raise NotCertain(f'{source.where(call)} is to be given "high"')
        if own.value in ("high", "medium"):
            return draft
        return draft.plus(source.replaced(own, '"high"')).applied()
    source = draft.code.main
    line = f'{torch_name(source)}.set_float32_matmul_precision("high")'
    return draft.plus(source.after(_last_import(source), ["", line])).applied()


def _last_import(source: Source) -> ast.stmt:
    """Return the import of torch, or the last import that follows it."""
    found: ast.stmt | None = None
    for statement in source.tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = [alias.name.partition(".")[0] for alias in statement.names]
            if found or (isinstance(statement, ast.Import) and "torch" in names):
                found = statement
        elif found:
            break
    if found is None:
        raise NotCertain(f"{source.path} does not import torch by itself")
    return found


def with_segments(draft: Draft, variant: Variant) -> Draft:
    """Set expandable segments in the environment, before any import that could load torch."""
    if not variant.expandable_segments:
        return draft
    for source in draft.code.files.values():
        if source.names.intersection(ALLOCATOR_VARIABLES):
            if SEGMENTS in source.text:
                return draft
            raise NotCertain(f"{source.path} sets {ALLOCATOR_VARIABLES[0]}: add {SEGMENTS} to it")
    source = draft.code.main
    first = next((one for one in source.tree.body if not _must_be_first(one)), None)
    if first is None:
        raise NotCertain(f"set {ALLOCATOR_VARIABLES[0]}={SEGMENTS} before torch is imported")
    lines = [
        "import os",
        "",
        "# Read once, when CUDA starts. The second name is that of torch before 2.9.",
        *(f'os.environ.setdefault("{name}", "{SEGMENTS}")' for name in ALLOCATOR_VARIABLES),
        "",
    ]
    return draft.plus(source.before(first, lines)).applied()


def _must_be_first(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def with_checkpointing(
    draft: Draft, seen: Seen, variant: Variant, otherwise: Callable[[Draft], Draft]
) -> Draft:
    """Switch on checkpointing below the line that creates a transformers model, or `otherwise`."""
    if variant.checkpointing == "none" or seen.checkpointing != "none":
        return draft
    made = _transformers_model(draft.code) if variant.checkpointing == "blocks" else None
    if made is None:
        return otherwise(draft)
    if any("gradient_checkpointing_enable" in one.names for one in draft.code.files.values()):
        raise NotCertain("gradient_checkpointing_enable() of the script is to be called")
    source, statement, name = made
    line = f'{name}.gradient_checkpointing_enable({{"use_reentrant": False}})'
    return draft.plus(source.after(statement, [line])).applied()


def _transformers_model(code: Code) -> tuple[Source, ast.stmt, str] | None:
    """Return where a transformers model is created, and its name; None if there is no such line."""
    found = []
    for source, call in code.calls():
        statement = source.parents[call]
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        if isinstance(target, (ast.Name, ast.Attribute)) and _is_model(source, call):
            found.append((source, statement, source.code(target)))
    return found[0] if len(found) == 1 else None


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
