"""The user's files -> the loop that trains: where it goes backward, steps and zeroes gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from oomph.planning.export.script_source import (
    Code,
    NotCertain,
    Source,
    calls_in,
    is_call_of,
    last_name,
    owner_of,
)

LoopStatement: TypeAlias = "ast.For | ast.While"
CLIPS = {"clip_grad_norm_", "clip_grad_value_", "unscale_"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One turn of it is one backward. The step may be in a loop around it, or behind an `if`."""

    source: Source
    statement: LoopStatement
    backward: ast.Call
    step: ast.Call

    @property
    def body(self) -> list[ast.stmt]:
        return self.statement.body

    def place_of(self, node: ast.AST) -> int:
        """Which statement of the body a node is in. Raises NotCertain if in none."""
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


def scaled_by(backward: ast.Call) -> ast.Call | None:
    """`scaler.scale(loss)` where that goes backward."""
    behind = owner_of(backward)
    return behind if is_call_of(behind, "scale") and behind.args else None


def loss_of(backward: ast.Call) -> ast.expr:
    scaled = scaled_by(backward)
    return scaled.args[0] if scaled else owner_of(backward) or backward


def training_loop(code: Code) -> Loop:
    """Raises NotCertain where none is found, or more than one could be meant."""
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
    """Raises NotCertain where more than one could be meant."""
    return _marked(code, "backward", _backwards(code))


def loops_around(source: Source, node: ast.AST) -> Iterator[LoopStatement]:
    """Of the same function, from within."""
    for outer in source.above(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        if isinstance(outer, (ast.For, ast.While)):
            yield outer


def _marked(code: Code, what: str, found: list[tuple[Source, ast.Call]]) -> tuple[Source, ast.Call]:
    """The call that a rehearsal saw; without one, the only call."""
    if what in code.marks:
        path, line = code.marks[what]
        seen = [
            (source, call)
            for source, call in found
            if source.path == path and call.lineno <= line <= (call.end_lineno or line)
        ]
        found = seen or found
    if len(found) != 1:
        names = {"backward": "loss.backward()", "step": "optimizer.step()"}
        raise NotCertain(f"{len(found)} calls could be the training's {names[what]}")
    return found[0]


def _backwards(code: Code) -> list[tuple[Source, ast.Call]]:
    return [(source, call) for source, call in code.calls() if _is_backward(source, call)]


def _is_backward(source: Source, call: ast.Call) -> bool:
    is_named = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
    return is_named and isinstance(source.parents[call], ast.Expr)


def is_scheduler_step(call: ast.Call) -> bool:
    """By its name: nothing else tells one from an optimizer."""
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
    """`optimizer.zero_grad()`, and nothing else."""
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


def is_report(statement: ast.stmt) -> bool:
    """Does it only tell somebody something?"""
    ways_out = (ast.Break, ast.Continue, ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)
    for node in ast.walk(statement):
        if isinstance(node, ways_out):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            return False
        if isinstance(node, ast.Call) and last_name(node.func) not in _REPORTS:
            return False
    return True
