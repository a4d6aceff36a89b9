"""What counts a loader's batches -> the same, where there are N times as many of them."""

from __future__ import annotations

import ast

from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_edits import replaced
from oomph.planning.export.script_loaders import BARS
from oomph.planning.export.script_loop import is_report
from oomph.planning.export.script_origin import followed
from oomph.planning.export.script_source import Code, NotCertain, Source, last_name


def with_lengths(draft: Draft, made: ast.Call, times: int, *, drops_last: bool) -> Draft:
    """`len(loader)` in a learning rate's schedule -> the number of steps, as it was."""
    for source, call in draft.code.calls():
        is_len = isinstance(call.func, ast.Name) and call.func.id == "len" and len(call.args) == 1
        if not is_len or not _may_be(draft.code, source, call.args[0], made):
            continue
        if _is_divided(source, call):
            continue
        if _is_of_a_schedule(source, call):
            text = source.code(call)
            steps = f"{text} // {times}" if drops_last else f"-(-{text} // {times})"
            draft = draft.plus(source, replaced(source, call, f"({steps})"))
        elif not _only_tells(source, call):
            raise NotCertain(
                f"{source.where(call)} counts batches, of which there would be {times} times as"
                " many"
            )
    return draft


def _may_be(code: Code, source: Source, node: ast.expr, made: ast.Call) -> bool:
    """Is it the loader, or a name that is the loader for a while?"""
    if followed(code, source, node)[1] is made:
        return True
    statement = source.parents.get(made)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(ast.unparse(target) == ast.unparse(node) for target in targets)


def _is_divided(source: Source, node: ast.AST) -> bool:
    """Does the script count steps there already, `len(loader) // accumulation`?"""
    for outer in source.above(node):
        is_divided = isinstance(outer, ast.BinOp) and isinstance(outer.op, (ast.Div, ast.FloorDiv))
        if is_divided and "accum" in ast.unparse(outer).lower():
            return True
        if isinstance(outer, ast.stmt):
            break
    return False


def _is_of_a_schedule(source: Source, node: ast.AST) -> bool:
    for outer in source.above(node):
        if isinstance(outer, ast.Call):
            name = last_name(outer.func).lower()
            if name.endswith("lr") or "schedul" in name:
                return True
        if isinstance(outer, ast.stmt):
            return False
    return False


def _only_tells(source: Source, call: ast.Call) -> bool:
    """A mean over the batches, a bar's total, or something printed."""
    parent = source.parents[call]
    is_divisor = isinstance(parent, ast.BinOp) and parent.right is call
    is_mean = is_divisor and isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div)
    outer = [last_name(one.func) for one in source.above(call) if isinstance(one, ast.Call)]
    statement = source.statement_of(call)
    is_simple = not isinstance(statement, (ast.For, ast.While, ast.If, ast.FunctionDef))
    if is_mean or BARS.intersection(outer):
        return True
    return is_simple and is_report(statement) and not isinstance(statement, ast.Assign)
