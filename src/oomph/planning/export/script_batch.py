"""A plan's split of the batch -> a plain loop's batch size and accumulation, both or neither."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from oomph.planning.export.script_accumulation import check_loss, own_numbers, with_inner_loop
from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_edits import argument_of, with_keyword
from oomph.planning.export.script_globals import Global
from oomph.planning.export.script_loaders import batches_of
from oomph.planning.export.script_loop import Loop, is_report, training_loop
from oomph.planning.export.script_numbers import Number
from oomph.planning.export.script_options import Origin, number_behind
from oomph.planning.export.script_source import (
    Code,
    NotCertain,
    Source,
    calls_in,
    is_call_of,
    last_name,
)
from oomph.planning.export.script_windows import with_windows
from oomph.records.script import Seen
from oomph.records.workload import Variant

_BATCH = re.compile(r"(^|_)(batch|batch_?size|bs|bsz)$", re.IGNORECASE)


def with_split(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """The same batch in other pieces. Raises NotCertain, and then nothing is changed."""
    times = variant.accumulation
    if (seen.micro_batch, seen.accumulation or 1) == (variant.micro_batch, times):
        return draft
    if seen.num_optimizers > 1:
        raise NotCertain(f"{seen.num_optimizers} optimizers step in turns")
    loop = training_loop(draft.code)
    own = own_numbers(loop)
    batches = batches_of(draft.code, loop)
    made = batches.made if batches else loader_made(draft.code, seen)
    if made is not None:
        draft = with_loader(draft, seen, made, variant.micro_batch)
    else:
        draft = _with_made_batch(draft, seen, loop, variant.micro_batch)
    if own:
        return _with_own_numbers(draft, seen, loop, own, times).made()
    if (seen.accumulation or 1) > 1:
        raise NotCertain(f"the script accumulates {seen.accumulation} times in a way of its own")
    if times > 1:
        check_loss(draft.code, loop)
        if batches is not None:
            draft = with_windows(draft, loop, batches, times)
        else:
            draft = with_inner_loop(draft, loop, times)
    return draft.made()


def _with_own_numbers(
    draft: Draft, seen: Seen, loop: Loop, own: list[ast.expr], times: int
) -> Draft:
    for node in own:
        now = draft.value_behind(loop.source, node)
        if now != (seen.accumulation or 1):
            raise NotCertain(
                f"make {loop.source.code(node)} at {loop.source.path}:{node.lineno} be {times}:"
                " where it comes from is not certain"
            )
    for node in own:
        draft = draft.with_number(loop.source, node, times)
    return draft


# ---- the loader ----------------------------------------------------------------------------------


def loader_made(code: Code, seen: Seen) -> tuple[Source, ast.Call] | None:
    """The call that makes the DataLoader which the rehearsal saw."""
    if "loader" in code.marks:
        path, line = code.marks["loader"]
        for source, call in _loaders(code):
            if source.path == path and call.lineno <= line <= (call.end_lineno or line):
                return source, call
    loaders = list(_loaders(code))
    if seen.loader is None:
        return None
    for source, call in loaders:  # Lightning's name for it
        if getattr(source.scope_of(call), "name", "") == "train_dataloader":
            return source, call
    if len(loaders) != 1:
        raise NotCertain(f"{len(loaders)} DataLoaders could be the training's")
    return loaders[0]


def _loaders(code: Code) -> Iterator[tuple[Source, ast.Call]]:
    return (one for one in code.calls() if last_name(one[1].func).endswith("DataLoader"))


def with_loader(draft: Draft, seen: Seen, made: tuple[Source, ast.Call], size: int) -> Draft:
    """The loader's batch size, set where its value comes from."""
    source, call = made
    if any(argument_of(call, name) is not None for name in ("batch_sampler", "sampler_fn")):
        raise NotCertain(f"{source.where(call)}: its batch sampler is to give {size} examples")
    given = argument_of(call, "batch_size", 1)
    if given is None:
        return draft.plus(source, *with_keyword(source, call, "batch_size", str(size)))
    now = draft.value_behind(source, given)
    expected = seen.loader.batch_size if seen.loader else seen.micro_batch
    if now is None or (expected is not None and now != expected):
        raise NotCertain(
            f"{source.where(call)}: its batch_size, {source.code(given)}, is to be {size}, and"
            " where it comes from is not certain"
        )
    check_counts(draft.code, source, given)
    return draft.with_number(source, given, size)


# ---- batches that the loop makes -----------------------------------------------------------------


def _with_made_batch(draft: Draft, seen: Seen, loop: Loop, size: int) -> Draft:
    """What is named a batch size, has its value, and is read where the batches are made."""
    found: dict[object, tuple[Source, ast.expr]] = {}
    sizes = list(_sizes(draft.code, loop))
    for source, node in sizes:
        origin = number_behind(draft.code, source, node)
        if origin is None or draft.value_behind(source, node) != seen.micro_batch:
            continue
        found[_identity(origin)] = (source, node)
    if len(found) != 1 and sizes:
        source, node = sizes[0]
        raise NotCertain(
            f"make {source.code(node)} at {source.path}:{node.lineno} be {size}, and accumulate:"
            " where it comes from is not certain"
        )
    if len(found) != 1:
        raise NotCertain(
            f"{loop.source.where(loop.statement)} makes its batches of {seen.micro_batch}, and"
            f" {len(found) or 'no'} number{'s' * (len(found) > 1)} could be their size"
        )
    (source, node) = next(iter(found.values()))
    check_counts(draft.code, source, node)
    return draft.with_number(source, node, size)


def check_counts(code: Code, source: Source, size: ast.expr) -> None:
    """Raises NotCertain where a number of steps is computed from the size of a batch."""
    origin = number_behind(code, source, size)
    for where, node in code.nodes():
        for part in _steps_of_a_size(node):
            if "accum" in ast.unparse(part).lower():
                continue
            statement = where.statement_of(part)
            names = [one for one in ast.walk(part) if isinstance(one, ast.expr) and _is_size(one)]
            is_same = any(_is_same(number_behind(code, where, one), origin) for one in names)
            if is_same and not (isinstance(statement, ast.Expr) and is_report(statement)):
                raise NotCertain(f"{where.where(statement)} counts batches by their size")


def _is_size(node: ast.expr) -> bool:
    """By its name: to follow every name of a long script would take minutes."""
    return _BATCH.search(_key(node)) is not None


def _is_same(one: Origin | None, other: Origin | None) -> bool:
    return one is not None and other is not None and _identity(one) == _identity(other)


def _steps_of_a_size(node: ast.AST) -> list[ast.expr]:
    """What a node divides by, as one does to count batches."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        return [node.right]
    if is_call_of(node, "range") and len(node.args) == 3:
        return [node.args[2]]
    if is_call_of(node, "ceil", "floor", "int", "round"):
        parts = [one for one in ast.walk(node) if isinstance(one, ast.BinOp)]
        return [one.right for one in parts if isinstance(one.op, ast.Div)]
    return []


def _identity(origin: Origin) -> object:
    if isinstance(origin, Number):
        return id(origin.node)
    return origin.name if isinstance(origin, Global) else origin.flags


def _sizes(code: Code, loop: Loop) -> Iterator[tuple[Source, ast.expr]]:
    made = loop.body[: loop.place_of(loop.backward) + 1]
    called = {last_name(call.func) for one in made for call in calls_in(one)}
    places: list[tuple[Source, ast.AST]] = [(loop.source, one) for one in made]
    places += [
        (source, node)
        for source, node in code.nodes()
        if isinstance(node, ast.FunctionDef) and node.name in called
    ]
    for source, place in places:
        for node in ast.walk(place):
            if isinstance(node, ast.expr) and _BATCH.search(_key(node)):
                parent = source.parents[node]
                if not isinstance(parent, ast.Call) or parent.func is not node:
                    yield source, node


def _key(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return last_name(node)
