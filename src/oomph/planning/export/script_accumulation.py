"""A loop of the user's, and how often to accumulate -> the edits that make it do so.

Three kinds of loops: one that accumulates already, whose number is changed; one over a DataLoader,
which steps at every Nth batch; and one that makes its batches, whose turn gets an inner loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from oomph.planning.export.script_draft import Draft
from oomph.planning.export.script_edits import (
    a_name,
    argument_of,
    before,
    replaced,
    unit_of,
    within,
    without,
)
from oomph.planning.export.script_loop import (
    CLIPS,
    Loop,
    is_zeroing,
)
from oomph.planning.export.script_names import read_before_set, stored_in
from oomph.planning.export.script_origin import followed
from oomph.planning.export.script_source import (
    Code,
    NotCertain,
    Source,
    calls_in,
    is_call_of,
    last_name,
    names_in,
)

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


# ---- a loop that accumulates already ------------------------------------------------------------


def own_numbers(loop: Loop) -> list[ast.expr]:
    """The expressions that say how often the loop accumulates; none if it does not."""
    source = loop.source
    found = [one.right for one in _remainders(loop)]
    is_inner = loop.step not in set(calls_in(loop.statement))
    if is_inner and isinstance(loop.statement, ast.For):
        found += _counted(loop.statement.iter)
    if is_inner and not found:
        raise NotCertain(f"{source.where(loop.statement)} steps outside of its loop")
    if not found:
        return []
    divisors = [one for one in _divisors(_outermost(loop)) if _same(one, found[0])]
    if not divisors:
        raise NotCertain(
            f"{source.where(loop.backward)} does not divide the loss by {source.code(found[0])}"
        )
    return [*found, *divisors]


def _remainders(loop: Loop) -> Iterator[ast.BinOp]:
    """`(i + 1) % N` of the conditions under which the loop steps."""
    for outer in loop.source.above(loop.step):
        if outer is loop.statement:
            return
        for one in ast.walk(outer.test) if isinstance(outer, ast.If) else ():
            if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                _check_remainder(loop.source, one)
                yield one


def _check_remainder(source: Source, remainder: ast.BinOp) -> None:
    """Raises NotCertain for `i % 4 == 3`, in which another 4 would want another 3."""
    test = source.parents[remainder]
    if not isinstance(test, ast.Compare):
        return
    against = test.comparators[0]
    is_zero = isinstance(against, ast.Constant) and against.value == 0
    is_relative = not isinstance(remainder.right, ast.Constant) and any(
        isinstance(one, ast.expr) and _same(one, remainder.right) for one in ast.walk(against)
    )
    if not is_zero and not is_relative:
        raise NotCertain(f"{source.where(test)} goes by more than one number")


def _counted(iterated: ast.expr) -> list[ast.expr]:
    is_range = is_call_of(iterated, "range", "trange") and len(iterated.args) == 1
    return [iterated.args[0]] if is_range else []  # type: ignore[attr-defined] # it is a call


def _outermost(loop: Loop) -> ast.AST:
    return loop.source.scope_of(loop.statement)


def _divisors(where: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(where):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            yield node.value


def _same(one: ast.expr, other: ast.expr) -> bool:
    return ast.dump(one) == ast.dump(other)


# ---- what is true of every loop that is changed -------------------------------------------------


def check_loss(code: Code, loop: Loop) -> None:
    """Raises NotCertain where dividing the loss is not the mean of all: a loss that is a sum."""
    for source, node in _reached(code, loop):
        for call in calls_in(node):
            reduction = argument_of(call, "reduction")
            if isinstance(reduction, ast.Constant) and reduction.value == "sum":
                raise NotCertain(
                    f"{source.where(call)} sums over the batch, so that the loss is not to be"
                    " divided, or is where it is averaged"
                )
    _check_pairs(code, loop)
    source, loss = followed(code, loop.source, loop.loss)
    if is_call_of(loss, "sum") and not loss.args and not loss.keywords:
        raise NotCertain(f"{source.where(loss)} sums over the batch: it is not to be divided")


def _check_pairs(code: Code, loop: Loop) -> None:
    """Raises NotCertain for a loss that compares the examples of a batch with each other."""
    for source, node in _reached(code, loop):
        for one in ast.walk(node) if getattr(node, "name", "") != "forward" else ():
            if not isinstance(one, ast.BinOp) or not isinstance(one.op, ast.MatMult):
                continue
            right = one.right.func if isinstance(one.right, ast.Call) else one.right
            if last_name(right) in ("t", "T", "mT", "transpose"):
                raise NotCertain(
                    f"{source.where(one)} may compare the examples of a batch with each other,"
                    " of which a micro-batch has fewer"
                )


def _reached(code: Code, loop: Loop) -> Iterator[tuple[Source, ast.AST]]:
    """The loop, the functions and modules that it may call, and what its names stand for."""
    yield loop.source, loop.statement
    names = {last_name(call.func) for call in calls_in(loop.statement)}
    for call in calls_in(loop.statement):
        yield followed(code, loop.source, call.func)
    for source, node in code.nodes():
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and getattr(node, "name", "") in {*names, "forward"}:
            yield source, node


def divided(draft: Draft, loop: Loop, by: str) -> Draft:
    """The loss, divided where it goes backward, and nowhere else: reports show it whole."""
    source, loss = loop.source, loop.loss
    text = source.code(loss)
    text = text if isinstance(loss, _ATOMS) else f"({text})"
    if loop.scaled:
        return draft.plus(source, replaced(source, loss, f"{text} / {by}"))
    end_of_name, end = source.span(loop.backward.func)[1], source.span(loop.backward)[1]
    rest = source.text[end_of_name:end]
    return draft.plus(source, replaced(source, loop.backward, f"({text} / {by}).backward{rest}"))


# ---- a loop that makes its batches --------------------------------------------------------------


def with_inner_loop(draft: Draft, loop: Loop, times: int) -> Draft:
    """Everything up to backward, N times; steps and what counts them stay as they are."""
    source, body = loop.source, loop.body
    end = loop.place_of(loop.backward) + 1
    begin = next((n for n, one in enumerate(body) if not _is_of_the_step(one)), end)
    if begin >= end or loop.place_of(loop.step) < end:
        raise NotCertain(f"{source.where(loop.backward)} and the step are not apart")
    inner = body[begin:end]
    _check_repeatable(loop, inner)
    zeroing = [one for one in inner if is_zeroing(one)]
    if len(zeroing) > 1:
        raise NotCertain(f"{source.where(zeroing[1])} is the second of its kind")
    name = "_" if "_" not in names_in(loop.statement) else a_name(source, "micro_step")
    header = f"for {name} in range({times}):"
    unit = unit_of(source, loop.statement)
    if zeroing and zeroing[0] is inner[0]:
        inner = inner[1:]
    elif zeroing:
        draft = draft.plus(source, without(source, zeroing[0]))
        draft = draft.plus(source, before(source, inner[0], [source.code(zeroing[0])]))
    leave = zeroing[0] if zeroing and zeroing[0] in inner else None
    draft = draft.plus(source, *within(source, inner, header, unit, leave=leave))
    return divided(draft, loop, str(times))


def _is_of_the_step(statement: ast.stmt) -> bool:
    """Does it prepare a step, whatever its batch: zeroing, the learning rate, a clock?"""
    if is_zeroing(statement):
        return True
    code = ast.dump(statement)
    calls = {last_name(call.func) for call in calls_in(statement)}
    is_clock = bool(calls) and calls <= {"time", "perf_counter", "train"}
    return "param_groups" in code or is_clock or (bool(calls) and all("lr" in c for c in calls))


def _check_repeatable(loop: Loop, inner: Sequence[ast.stmt]) -> None:
    """Raises NotCertain where a second time would not be another micro-batch of the same step."""
    source = loop.source
    stored = {name for one in inner for name in stored_in(one)}
    carried = read_before_set(inner) & stored - _iterators(inner)
    if carried:
        raise NotCertain(
            f"{source.where(loop.statement)} hands {', '.join(sorted(carried))} from one turn"
            " to the next"
        )
    if isinstance(loop.statement, ast.For):
        counted = names_in(loop.statement.target, ast.Store)
        used = sorted(counted & {name for one in inner for name in names_in(one)})
        if used:
            raise NotCertain(f"{source.where(loop.statement)}: the batch depends on {used[0]}")
    for statement in inner:
        _check_stays(source, statement)


def _iterators(inner: Sequence[ast.stmt]) -> set[str]:
    """What `next` is asked of: it is one and the same from turn to turn."""
    calls = (call for one in inner for call in calls_in(one))
    return {
        name
        for call in calls
        if last_name(call.func) in ("next", "iter")
        for argument in call.args
        for name in names_in(argument)
    } | {
        name
        for one in inner
        for node in ast.walk(one)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if last_name(node.value.func) == "iter"
        for target in node.targets
        for name in names_in(target, ast.Store)
    }


def _check_stays(source: Source, statement: ast.stmt) -> None:
    ways_out = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom)
    for node in ast.walk(statement):
        if isinstance(node, ways_out):
            raise NotCertain(f"{source.where(statement)} may leave the loop before the step")
        calls = [last_name(node.func)] if isinstance(node, ast.Call) else []
        if CLIPS.intersection(calls):
            raise NotCertain(f"{source.where(statement)} stands before backward")
