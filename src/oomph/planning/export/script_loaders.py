"""A loop of the user's -> the DataLoader that it takes its batches from, and how it counts them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from oomph.planning.export.script_edits import argument_of
from oomph.planning.export.script_loop import Loop
from oomph.planning.export.script_origin import followed
from oomph.planning.export.script_source import Code, NotCertain, Source, is_call_of, last_name

BARS = {"tqdm", "track"}
_SIZED = {"TensorDataset", "Subset", "ConcatDataset", "ImageFolder", "FakeData", "MNIST", "CIFAR10"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What a loop takes its batches from."""

    statement: ast.For
    made: tuple[Source, ast.Call]  # the call of DataLoader
    written: str | None  # how the loop's place names it; None if it is made there
    counter: str | None  # that `enumerate` counts with
    start: int  # of the counter
    drops_last: bool
    has_length: bool


def batches_of(code: Code, loop: Loop) -> Batches | None:
    """None for a loop that is not over a DataLoader."""
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
            raise NotCertain(f"{source.where(target)} counts in a way of its own")
        counter, start = first.id, begins
    dropped = argument_of(made[1], "drop_last", 8)
    return Batches(
        statement=statement,
        made=made,
        written=written,
        counter=counter,
        start=start,
        drops_last=isinstance(dropped, ast.Constant) and dropped.value is True,
        has_length=_has_length(code, made, written),
    )


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _has_length(code: Code, made: tuple[Source, ast.Call], written: str | None) -> bool:
    """Is it certain that `len` can be asked of the loader?"""
    source, call = made
    shuffled = argument_of(call, "shuffle", 2)
    if isinstance(shuffled, ast.Constant) and shuffled.value is True:
        return True  # what has no length cannot be shuffled
    if any(_asks_length(where, one, written) for where, one in code.calls()):
        return True
    data = argument_of(call, "dataset", 0)
    name = ""
    if data is not None:
        end = followed(code, source, data)[1]
        name = last_name(end.func) if isinstance(end, ast.Call) else ""
        if isinstance(end, (ast.List, ast.ListComp, ast.Tuple)):
            return True
    return name in _SIZED or any(
        isinstance(node, ast.ClassDef) and node.name == name and _defines(node, "__len__")
        for _, node in code.nodes()
    )


def _asks_length(source: Source, call: ast.Call, written: str | None) -> bool:
    is_len = isinstance(call.func, ast.Name) and call.func.id == "len" and len(call.args) == 1
    return is_len and written is not None and source.code(call.args[0]) == written


def _defines(owner: ast.ClassDef, name: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == name for one in owner.body)
