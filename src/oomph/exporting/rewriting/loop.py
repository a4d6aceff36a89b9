"""The user's files -> the training loop: where it runs backward, steps and zeroes gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from oomph.exporting.rewriting.draft import Draft
from oomph.exporting.rewriting.origin import followed
from oomph.exporting.rewriting.source import (
    Code,
    NotCertain,
    Source,
    argument_of,
    calls_in,
    is_call_of,
    last_name,
    owner_of,
)

LoopStatement: TypeAlias = "ast.For | ast.While"
CLIPS = {"clip_grad_norm_", "clip_grad_value_", "unscale_"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop with one backward per iteration. Its step may be in an outer loop or in an `if`."""

    source: Source
    statement: LoopStatement
    backward: ast.Call
    step: ast.Call

    @property
    def body(self) -> list[ast.stmt]:
        return self.statement.body

    def place_of(self, node: ast.AST) -> int:
        """Return which statement of the body contains a node. Raises NotCertain if none does."""
        while self.source.parents.get(node) not in (None, self.statement):
            node = self.source.parents[node]
        if not isinstance(node, ast.stmt) or node not in self.body:
            raise NotCertain(f"{self.source.where(self.statement)} does not hold the whole step")
        return self.body.index(node)

    @property
    def scaled(self) -> ast.Call | None:
        return scaled_by(self.backward)

    @property
    def loss(self) -> ast.expr:
        return loss_of(self.backward)

    @property
    def arguments_of_backward(self) -> str:
        """Return the text between `backward` and the end of its call: `()`."""
        source = self.source
        return source.text[source.span(self.backward.func)[1] : source.span(self.backward)[1]]


def scaled_by(backward: ast.Call) -> ast.Call | None:
    """Return the `scaler.scale(loss)` call that backward is called on."""
    behind = owner_of(backward)
    return behind if is_call_of(behind, "scale") and behind.args else None


def loss_of(backward: ast.Call) -> ast.expr:
    scaled = scaled_by(backward)
    if scaled:
        return scaled.args[0]
    owner = owner_of(backward)
    is_of_tool = "accelerator" in last_name(owner).lower()  # accelerator.backward(loss)
    return backward.args[0] if is_of_tool and backward.args else owner or backward


def training_loop(code: Code) -> Loop:
    """Find the training loop. Raises NotCertain if there is none, or more than one candidate."""
    source, backward = the_backward(code)
    loops = list(loops_around(source, backward))
    if not loops:
        raise NotCertain(f"{source.where(backward)} is called for each batch by a loop elsewhere")
    of_loop = [call for call in calls_in(loops[0]) if _is_backward(source, call)]
    if len(of_loop) != 1:
        raise NotCertain(f"{source.where(backward)} is one of {len(of_loop)} backwards of its loop")
    outer = loops[-1]
    steps = [(source, call) for call in calls_in(outer) if _is_optimizer_step(code, call)]
    _, step = _marked(code, "step", steps)
    return Loop(source=source, statement=loops[0], backward=backward, step=step)


def the_backward(code: Code) -> tuple[Source, ast.Call]:
    """Find the backward call. Raises NotCertain if there is more than one candidate."""
    found = [(source, call) for source, call in code.calls() if _is_backward(source, call)]
    return _marked(code, "backward", found)


def loops_around(source: Source, node: ast.AST) -> Iterator[LoopStatement]:
    """Yield the loops around a node in the same function, innermost first."""
    for outer in source.above(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        if isinstance(outer, (ast.For, ast.While)):
            yield outer


def _marked(code: Code, what: str, found: list[tuple[Source, ast.Call]]) -> tuple[Source, ast.Call]:
    """Return the call that the rehearsal saw; without a rehearsal, the only call."""
    found = code.at_mark(what, found) or found
    if len(found) != 1:
        names = {"backward": "loss.backward()", "step": "optimizer.step()"}
        raise NotCertain(f"{len(found)} calls could be the training's {names[what]}")
    return found[0]


def _is_backward(source: Source, call: ast.Call) -> bool:
    is_named = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
    return is_named and isinstance(source.parents[call], ast.Expr)


def is_scheduler_step(call: ast.Call) -> bool:
    """Return whether a call steps a scheduler. Only its name distinguishes it from an optimizer."""
    owner = last_name(owner_of(call)).lower()
    if last_name(call.func) != "step":
        return False
    return "sched" in owner or owner.startswith("lr") or owner.endswith("_lr")


def _is_optimizer_step(code: Code, call: ast.Call) -> bool:
    if last_name(call.func) != "step" or is_scheduler_step(call):
        return False
    owner = last_name(owner_of(call)).lower()
    is_marked = any(
        path in code.files and call.lineno <= line <= (call.end_lineno or line)
        for what, (path, line) in code.marks.items()
        if what == "step"
    )
    return is_marked or "opt" in owner or "scaler" in owner


def is_zeroing(statement: ast.stmt) -> bool:
    """Return whether a statement is `optimizer.zero_grad()` and nothing else."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) == "zero_grad"


_REPORTS = frozenset(
    [
        *("print", "info", "debug", "warning", "log", "write", "flush", "add_scalar", "append"),
        *("set_postfix", "set_postfix_str", "set_description"),
        *("item", "format", "len", "float", "int", "str", "round", "detach", "cpu"),
        *("sum", "mean", "max", "min", "time", "perf_counter"),
        *("get_last_lr", "memory_allocated", "max_memory_allocated"),
    ]
)


def may_leave(statement: ast.stmt) -> bool:
    """Return whether a statement may end the iteration, or hand over in its middle."""
    exits = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom)
    return any(isinstance(node, exits) for node in ast.walk(statement))


def is_report(statement: ast.stmt) -> bool:
    """Return whether a statement only reports something."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Raise):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            return False
        if isinstance(node, ast.Call) and last_name(node.func) not in _REPORTS:
            return False
    return not may_leave(statement)


# ---- the DataLoader that a loop takes its batches from, and how it counts them ------------------

BARS = {"tqdm", "track"}
_SIZED = {"TensorDataset", "Subset", "ConcatDataset", "ImageFolder", "FakeData", "MNIST", "CIFAR10"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The DataLoader that a loop takes its batches from."""

    statement: ast.For
    made: tuple[Source, ast.Call]  # the call of DataLoader
    written: str | None  # how the loop refers to it; None if it is created in the loop header
    counter: str | None  # the variable that `enumerate` counts with
    start: int  # the first value of the counter
    drops_last: bool
    has_length: bool


def batches_of(code: Code, loop: Loop) -> Batches | None:
    """Return the loop's batches, or None if the loop is not over a DataLoader."""
    if not isinstance(loop.statement, ast.For):
        return None
    source: Source = loop.source
    node: ast.expr = loop.statement.iter
    counting: ast.Call | None = None
    written = None
    while True:
        if source is loop.source and isinstance(node, (ast.Name, ast.Attribute)):
            written = source.code(node)
        source, node = followed(code, source, node)
        if not isinstance(node, ast.Call):
            return None
        if last_name(node.func).endswith("DataLoader"):
            return _batches(code, loop.source, loop.statement, (source, node), written, counting)
        if not is_call_of(node, "enumerate", *BARS) or not node.args:
            return None
        counting = node if is_call_of(node, "enumerate") else counting
        written, node = None, node.args[0]


def _batches(
    code: Code,
    source: Source,
    statement: ast.For,
    made: tuple[Source, ast.Call],
    written: str | None,
    counting: ast.Call | None,
) -> Batches:
    target = statement.target
    counter, start = None, 0
    if counting is not None:
        first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
        began = argument_of(counting, "start", 1)
        begins = 0 if began is None else began.value if isinstance(began, ast.Constant) else None
        if not isinstance(first, ast.Name) or not isinstance(begins, int):
            raise NotCertain(f"{source.where(target)} counts in its own way")
        counter, start = first.id, begins
    return Batches(
        statement=statement,
        made=made,
        written=written,
        counter=counter,
        start=start,
        drops_last=drops_last(made[1]),
        has_length=_has_length(code, made, written),
    )


def drops_last(loader: ast.Call) -> bool:
    """Return whether a DataLoader certainly leaves out a smaller last batch."""
    return _is_true(argument_of(loader, "drop_last", 8))


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _has_length(code: Code, made: tuple[Source, ast.Call], written: str | None) -> bool:
    """Return whether `len` certainly works on the loader."""
    source, call = made
    if _is_true(argument_of(call, "shuffle", 2)):
        return True  # a loader without a length cannot be shuffled
    if any(where.code(one.args[0]) == written for where, one in _len_calls(code)):
        return True
    data = argument_of(call, "dataset", 0)
    if data is None:
        return False
    end = followed(code, source, data)[1]
    if not isinstance(end, ast.Call):
        return isinstance(end, (ast.List, ast.ListComp, ast.Tuple))
    name = last_name(end.func)
    return name in _SIZED or any(
        isinstance(node, ast.ClassDef)
        and node.name == name
        and any(isinstance(one, ast.FunctionDef) and one.name == "__len__" for one in node.body)
        for _, node in code.nodes()
    )


def _len_calls(code: Code) -> Iterator[tuple[Source, ast.Call]]:
    for source, call in code.calls():
        if isinstance(call.func, ast.Name) and call.func.id == "len" and len(call.args) == 1:
            yield source, call


# ---- code that counts a loader's batches, when there are N times as many ------------------------


def with_lengths(draft: Draft, made: ast.Call, times: int, *, drops_last: bool) -> Draft:
    """Rewrite `len(loader)` in a learning rate schedule, so that it stays the number of steps."""
    for source, call in _len_calls(draft.code):
        is_its = _may_be(draft.code, source, call.args[0], made)
        if not is_its or _is_divided(source, call):
            continue
        if _is_of_a_schedule(source, call):
            text = source.code(call)
            steps = f"{text} // {times}" if drops_last else f"-(-{text} // {times})"
            draft = draft.plus(source.replaced(call, f"({steps})"))
        elif not _only_reports(source, call):
            raise NotCertain(
                f"{source.where(call)} counts batches, and there would be {times} times as many"
            )
    return draft


def _may_be(code: Code, source: Source, node: ast.expr, made: ast.Call) -> bool:
    """Return whether an expression is the loader, or a name that sometimes is."""
    if followed(code, source, node)[1] is made:
        return True
    statement = source.parents.get(made)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(ast.unparse(target) == ast.unparse(node) for target in targets)


def _is_divided(source: Source, node: ast.AST) -> bool:
    """Return whether the script already counts steps, as in `len(loader) // accumulation`."""
    return any(
        isinstance(outer, ast.BinOp)
        and isinstance(outer.op, (ast.Div, ast.FloorDiv))
        and "accum" in ast.unparse(outer).lower()
        for outer in source.expressions_above(node)
    )


def _is_of_a_schedule(source: Source, node: ast.AST) -> bool:
    calls = (outer for outer in source.expressions_above(node) if isinstance(outer, ast.Call))
    names = [last_name(call.func).lower() for call in calls]
    return any(name.endswith("lr") or "schedul" in name for name in names)


def _only_reports(source: Source, call: ast.Call) -> bool:
    """Return whether a call is used for a mean over batches, a progress bar or a print."""
    parent = source.parents[call]
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div) and parent.right is call:
        return True
    outer = [last_name(one.func) for one in source.above(call) if isinstance(one, ast.Call)]
    statement = source.statement_of(call)
    is_simple = not isinstance(statement, (ast.For, ast.While, ast.If, ast.FunctionDef))
    if BARS.intersection(outer):
        return True
    return is_simple and is_report(statement) and not isinstance(statement, ast.Assign)
