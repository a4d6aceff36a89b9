"""The user's training loop, accumulation steps -> the edits that make the loop accumulate.

There are three kinds of loops: one that already accumulates, whose number is changed; one over a
DataLoader, which then steps at every Nth batch; and one that creates its own batches, which gets an
inner loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from oomph.exporting.rewriting.draft import Draft, Origin, origin_of
from oomph.exporting.rewriting.loop import (
    CLIPS,
    Batches,
    Loop,
    batches_of,
    is_report,
    is_scheduler_step,
    is_zeroing,
    may_leave,
    training_loop,
    with_lengths,
)
from oomph.exporting.rewriting.origin import followed, read_before_set, stored_in
from oomph.exporting.rewriting.source import (
    Code,
    NotCertain,
    Source,
    argument_of,
    calls_in,
    is_call_of,
    last_name,
    names_in,
    owner_of,
)
from oomph.records.script import Seen
from oomph.records.workload import Variant

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


# ---- a loop that already accumulates ------------------------------------------------------------


def own_numbers(loop: Loop) -> list[ast.expr]:
    """Return the expressions that set how often the loop accumulates; empty if it does not."""
    source = loop.source
    found = [one.right for one in _remainders(loop)]
    is_inner = loop.step not in set(calls_in(loop.statement))
    if is_inner and isinstance(loop.statement, ast.For):
        counted = loop.statement.iter
        if is_call_of(counted, "range", "trange") and len(counted.args) == 1:
            found += counted.args
    if is_inner and not found:
        raise NotCertain(f"{source.where(loop.statement)} steps outside of its loop")
    if not found:
        return []
    divisors = [one for one in _divisors(source.scope_of(loop.statement)) if _same(one, found[0])]
    if not divisors:
        raise NotCertain(
            f"{source.where(loop.backward)} does not divide the loss by {source.code(found[0])}"
        )
    return [*found, *divisors]


def _remainders(loop: Loop) -> Iterator[ast.BinOp]:
    """Yield `(i + 1) % N` from the conditions under which the loop steps."""
    for outer in loop.source.above(loop.step):
        if outer is loop.statement:
            return
        for one in ast.walk(outer.test) if isinstance(outer, ast.If) else ():
            if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                _check_remainder(loop.source, one)
                yield one


def _check_remainder(source: Source, remainder: ast.BinOp) -> None:
    """Raise NotCertain for `i % 4 == 3`, where changing the 4 would require changing the 3."""
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


def _divisors(where: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(where):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            yield node.value


def _same(one: ast.expr, other: ast.expr) -> bool:
    return ast.dump(one) == ast.dump(other)


# ---- checks and edits for every loop ------------------------------------------------------------


def check_loss(code: Code, loop: Loop) -> None:
    """Raise NotCertain if the loss is a sum: dividing it would not give the mean over the batch."""
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
    """Raise NotCertain for a loss that compares the examples of a batch with each other."""
    for source, node in _reached(code, loop):
        for one in ast.walk(node) if getattr(node, "name", "") != "forward" else ():
            if not isinstance(one, ast.BinOp) or not isinstance(one.op, ast.MatMult):
                continue
            right = one.right.func if isinstance(one.right, ast.Call) else one.right
            if last_name(right) in ("t", "T", "mT", "transpose"):
                raise NotCertain(
                    f"{source.where(one)} may compare the examples of a batch with each other,"
                    " and a micro-batch has fewer of them"
                )


def _reached(code: Code, loop: Loop) -> Iterator[tuple[Source, ast.AST]]:
    """Yield the loop, the functions and modules that it may call, and what its names stand for."""
    yield loop.source, loop.statement
    called = {"forward", *(last_name(call.func) for call in calls_in(loop.statement))}
    for call in calls_in(loop.statement):
        yield followed(code, loop.source, call.func)
    for source, node in code.nodes():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in called:
            yield source, node


def divided(draft: Draft, loop: Loop, by: str) -> Draft:
    """Divide the loss in the backward call and nowhere else, so that reports show it undivided."""
    source, loss = loop.source, loop.loss
    text = source.code(loss)
    text = text if isinstance(loss, _ATOMS) else f"({text})"
    if loop.scaled:
        return draft.plus(source.replaced(loss, f"{text} / {by}"))
    whole = f"({text} / {by}).backward{loop.arguments_of_backward}"
    return draft.plus(source.replaced(loop.backward, whole))


# ---- a loop that creates its own batches --------------------------------------------------------


def with_inner_loop(draft: Draft, loop: Loop, times: int) -> Draft:
    """Repeat everything up to backward N times; the step and its counters do not change."""
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
    name = "_" if "_" not in names_in(loop.statement) else source.unused_name("micro_step")
    header = f"for {name} in range({times}):"
    if zeroing and zeroing[0] is inner[0]:
        inner = inner[1:]
    elif zeroing:
        draft = draft.plus(source.without(zeroing[0]))
        draft = draft.plus(source.before(inner[0], [source.code(zeroing[0])]))
    leave = zeroing[0] if zeroing and zeroing[0] in inner else None
    draft = draft.plus(*source.within(inner, header, leave=leave))
    return divided(draft, loop, str(times))


def _is_of_the_step(statement: ast.stmt) -> bool:
    """Return whether a statement prepares a step, not a batch: zeroing, learning rate, a clock."""
    if is_zeroing(statement):
        return True
    code = ast.dump(statement)
    calls = {last_name(call.func) for call in calls_in(statement)}
    is_clock = bool(calls) and calls <= {"time", "perf_counter", "train"}
    return "param_groups" in code or is_clock or (bool(calls) and all("lr" in c for c in calls))


def _check_repeatable(loop: Loop, inner: Sequence[ast.stmt]) -> None:
    """Raise NotCertain if a repetition would not be another micro-batch of the same step."""
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
        if may_leave(statement):
            raise NotCertain(f"{source.where(statement)} may leave the loop before the step")
        if any(last_name(call.func) in CLIPS for call in calls_in(statement)):
            raise NotCertain(f"{source.where(statement)} stands before backward")


def _iterators(inner: Sequence[ast.stmt]) -> set[str]:
    """Return the names passed to `next`: the iterator stays the same between iterations."""
    found: set[str] = set()
    for node in (node for statement in inner for node in ast.walk(statement)):
        if is_call_of(node, "next", "iter"):
            found |= {name for argument in node.args for name in names_in(argument)}
        elif isinstance(node, ast.Assign) and is_call_of(node.value, "iter"):
            found |= {name for target in node.targets for name in names_in(target, ast.Store)}
    return found


# ---- a loop over a DataLoader: its optimizer steps at every Nth batch ----------------------------
# The batches become micro-batches. What happens once per step goes behind a condition. What only
# reports stays unchanged, and reports more often.


def with_windows(draft: Draft, loop: Loop, batches: Batches, times: int) -> Draft:
    """Step at every Nth batch, and at the last of an epoch if the script would step there."""
    if not batches.drops_last and (batches.written is None or not batches.has_length):
        source, call = batches.made
        raise NotCertain(
            f"{source.where(call)} may end with a smaller batch, and its length is not certain"
        )
    counter = batches.counter or loop.source.unused_name("micro_step")
    if batches.counter is None:
        draft = _with_counter(draft, loop.source, batches.statement, counter)
    _check_counts(loop, batches)
    ends, by = _window(batches, counter, times)
    draft = divided(draft, loop, by)
    draft = _zeroed(draft, loop, batches, counter, times)
    places = _of_each_step(loop)
    for is_of_step, run in groupby(enumerate(loop.body), key=lambda one: one[0] in places):
        if is_of_step:
            statements = [statement for _, statement in run]
            draft = draft.plus(*loop.source.within(statements, f"if {ends}:"))
    return with_lengths(draft, batches.made[1], times, drops_last=batches.drops_last)


def _window(batches: Batches, counter: str, times: int) -> tuple[str, str]:
    """Return when a window of micro-batches ends, and how many micro-batches it has."""
    number = counter if batches.start == 1 else f"({counter} + {1 - batches.start})"
    place = counter if batches.start == 0 else f"({counter} - {batches.start})"
    full = f"{number} % {times} == 0"
    if batches.drops_last:
        return full, str(times)
    length = f"len({batches.written})"
    last = number.removeprefix("(").removesuffix(")")
    return f"{full} or {last} == {length}", f"min({times}, {length} - {place} // {times} * {times})"


def _with_counter(draft: Draft, source: Source, statement: ast.For, counter: str) -> Draft:
    """Rewrite `for x, y in loader` -> `for i, (x, y) in enumerate(loader)`."""
    target, iterated = statement.target, statement.iter
    text = source.code(target)
    is_bare = isinstance(target, ast.Tuple) and not text.startswith(("(", "["))
    text = f"({text})" if is_bare else text
    return draft.plus(
        source.replaced(target, f"{counter}, {text}"),
        source.replaced(iterated, f"enumerate({source.code(iterated)})"),
    )


def _zeroed(draft: Draft, loop: Loop, batches: Batches, counter: str, times: int) -> Draft:
    """Zero gradients at the start of a window, which drops those of an unfinished one."""
    source = loop.source
    end = loop.place_of(loop.step)
    early = [one for one in loop.body[:end] if is_zeroing(one)]
    place = counter if batches.start == 0 else f"({counter} - {batches.start})"
    for one in early:
        draft = draft.plus(*source.within([one], f"if {place} % {times} == 0:"))
    late = [one for one in loop.body[end:] if is_zeroing(one)]
    if not early and not late:
        raise NotCertain(f"{source.where(loop.statement)} zeroes the gradients elsewhere")
    if late and not early and batches.drops_last:
        lines = [
            f"if {counter} == {batches.start}:  # an epoch may end within a step",
            source.unit_of(loop.statement) + source.code(late[0]),
        ]
        draft = draft.plus(source.before(loop.body[0], lines))
    return draft


def _of_each_step(loop: Loop) -> set[int]:
    """Return which statements of the body run once per step, not once per micro-batch."""
    backward = loop.place_of(loop.backward)
    if loop.place_of(loop.step) <= backward:
        raise NotCertain(f"{loop.source.where(loop.backward)} and the step are not apart")
    places = {
        place for place, one in enumerate(loop.body) if place > backward and _is_of_each_step(one)
    }
    is_growing = True
    while is_growing:
        made = {name for place in places for name in stored_in(loop.body[place])}
        more = {
            place
            for place, one in enumerate(loop.body)
            if place > backward and made & names_in(one)
        }
        is_growing = not more <= places
        places |= more
    simple = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If)
    for statement in (loop.body[place] for place in places):
        if not isinstance(statement, simple):
            raise NotCertain(f"{loop.source.where(statement)} does more than step")
    return places


def _is_of_each_step(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.value, ast.Constant) and statement.value.value == 1
    for call in calls_in(statement):
        name = last_name(call.func)
        owner = last_name(owner_of(call))
        is_average = "ema" in f"{owner} {name}".lower().replace("_", " ").split()
        if name in {"step", "zero_grad", *CLIPS} or is_average or is_scheduler_step(call):
            return True
        averages_or_scales = any(part in owner.lower() for part in ("scaler", "ema", "swa"))
        if name in ("update", "update_parameters") and averages_or_scales:
            return True
    return False


# ---- code that counts batches --------------------------------------------------------------------


def _check_counts(loop: Loop, batches: Batches) -> None:
    """Raise NotCertain if a batch's number is used for anything but reports."""
    for statement in loop.body[: loop.place_of(loop.step)]:
        if any(isinstance(one, (ast.Break, ast.Continue)) for one in ast.walk(statement)):
            raise NotCertain(f"{loop.source.where(statement)} may skip the step")
    for statement in loop.body[: loop.place_of(loop.backward)]:
        if isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.Constant):
            raise NotCertain(f"{loop.source.where(statement)} counts batches as steps")
    if batches.counter is None:
        return
    for statement in loop.body:
        if batches.counter in stored_in(statement):
            raise NotCertain(f"{loop.source.where(statement)} changes {batches.counter}")
        if batches.counter in names_in(statement) and not is_report(statement):
            raise NotCertain(
                f"{loop.source.where(statement)} goes by {batches.counter}, which would count"
                " micro-batches"
            )


# ---- batch size and accumulation of a plain loop: both change, or neither ------------------------

_BATCH = re.compile(r"(^|_)(batch|batch_?size|bs|bsz)$", re.IGNORECASE)


def with_split(draft: Draft, seen: Seen, variant: Variant) -> Draft:
    """Split the same batch differently. Raise NotCertain, changing nothing, if unsure."""
    times = variant.accumulation
    if (seen.micro_batch, seen.accumulation or 1) == (variant.micro_batch, times):
        return draft
    if seen.num_optimizers > 1:
        raise NotCertain(f"{seen.num_optimizers} optimizers step in turns")
    loop = training_loop(draft.code)
    own = own_numbers(loop)
    batches = batches_of(draft.code, loop)
    made = batches.made if batches else loader_made(draft.code, seen)
    if own:
        _check_ends(loop, batches, list(_remainders(loop)))
    if seen.micro_batch == variant.micro_batch:
        pass  # an argument has already set it
    elif made is not None:
        draft = with_loader(draft, seen, made, variant.micro_batch)
    else:
        draft = _with_made_batch(draft, seen, loop, variant.micro_batch)
    if own:
        return _with_own_numbers(draft, seen, loop, own, times).applied()
    if (seen.accumulation or 1) > 1:
        raise NotCertain(f"the script accumulates {seen.accumulation} times in its own way")
    if times > 1:
        check_loss(draft.code, loop)
        if batches is not None:
            draft = with_windows(draft, loop, batches, times)
        else:
            draft = with_inner_loop(draft, loop, times)
    return draft.applied()


def ends_too_soon(code: Code) -> bool:
    """Return whether the loop certainly ends by a count of micro-batches; False if not found."""
    try:
        loop = training_loop(code)
        batches = batches_of(code, loop)
        remainders = list(_remainders(loop))
    except NotCertain:
        return False
    try:
        _check_ends(loop, batches, remainders)
    except NotCertain:
        return True
    return False


def _check_ends(loop: Loop, batches: Batches | None, remainders: Sequence[ast.BinOp]) -> None:
    """Raise NotCertain if the loop ends by a count of micro-batches, which would come sooner."""
    source, statement = loop.source, loop.statement
    if not remainders:
        return  # the micro-batches are an inner loop
    counted = statement.iter if batches is None and isinstance(statement, ast.For) else None
    if is_call_of(counted, "range", "trange"):
        raise NotCertain(f"{source.where(statement)} counts micro-batches, and would end too soon")
    counts = names_in(statement.target, ast.Store) if isinstance(statement, ast.For) else set()
    for one in ast.walk(statement):
        if isinstance(one, ast.AugAssign) and not _is_under(source, one, remainders):
            counts |= names_in(one.target, ast.Store)
    for one in ast.walk(statement):
        ends = isinstance(one, ast.If) and any(isinstance(each, ast.Break) for each in one.body)
        if not ends or _is_under(source, one, remainders):
            continue
        if isinstance(one, ast.If) and names_in(one.test) & counts:
            raise NotCertain(f"{source.where(one)} ends the loop by a count of micro-batches")
    if isinstance(statement, ast.While) and names_in(statement.test) & counts:
        raise NotCertain(f"{source.where(statement)} counts micro-batches, and would end too soon")


def _is_under(source: Source, node: ast.AST, remainders: Sequence[ast.BinOp]) -> bool:
    """Return whether a statement runs only when a step is due."""
    return any(
        isinstance(outer, ast.If) and any(one in remainders for one in ast.walk(outer.test))
        for outer in source.above(node)
    )


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
    """Return the call that creates the DataLoader which the rehearsal saw."""
    loaders = [one for one in code.calls() if last_name(one[1].func).endswith("DataLoader")]
    if marked := code.at_mark("loader", loaders):
        return marked[0]
    if seen.loader is None:
        return None
    for source, call in loaders:  # Lightning's name for the loader
        if getattr(source.scope_of(call), "name", "") == "train_dataloader":
            return source, call
    if len(loaders) != 1:
        raise NotCertain(f"{len(loaders)} DataLoaders could be the training's")
    return loaders[0]


def with_loader(draft: Draft, seen: Seen, made: tuple[Source, ast.Call], size: int) -> Draft:
    """Set the loader's batch size where its value comes from."""
    source, call = made
    if any(argument_of(call, name) is not None for name in ("batch_sampler", "sampler_fn")):
        raise NotCertain(f"{source.where(call)}: its batch sampler is to give {size} examples")
    given = argument_of(call, "batch_size", 1)
    if given is None:
        return draft.plus(*source.with_keyword(call, "batch_size", str(size)))
    now = draft.value_behind(source, given)
    expected = seen.loader.batch_size if seen.loader else seen.micro_batch
    if now is None or (expected is not None and now != expected):
        raise NotCertain(
            f"{source.where(call)}: its batch_size, {source.code(given)}, is to be {size}, and"
            " where it comes from is not certain"
        )
    check_counts(draft.code, source, given)
    return draft.with_number(source, given, size)


# ---- batches that the loop creates ---------------------------------------------------------------


def _with_made_batch(draft: Draft, seen: Seen, loop: Loop, size: int) -> Draft:
    """Change the number that is named a batch size, has its value and is read to create batches."""
    found: dict[Origin, tuple[Source, ast.expr]] = {}
    sizes = list(_sizes(draft.code, loop))
    for source, node in sizes:
        origin = origin_of(draft.code, source, node)
        if origin is not None and draft.value_behind(source, node) == seen.micro_batch:
            found[origin] = (source, node)
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
    """Raise NotCertain if a number of steps is computed from the batch size."""
    origin = origin_of(code, source, size)
    if origin is None:
        return
    for where, node in code.nodes():
        for part in _steps_of_a_size(node):
            if "accum" in ast.unparse(part).lower():
                continue
            statement = where.statement_of(part)
            # Only names that suggest a batch size: following every name would take minutes.
            names = [one for one in ast.walk(part) if isinstance(one, ast.expr) and _is_size(one)]
            is_same = any(origin_of(code, where, one) == origin for one in names)
            if is_same and not (isinstance(statement, ast.Expr) and is_report(statement)):
                raise NotCertain(f"{where.where(statement)} counts batches by their size")


def _steps_of_a_size(node: ast.AST) -> list[ast.expr]:
    """Return what a node divides by, if it looks like counting batches."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        return [node.right]
    if is_call_of(node, "range") and len(node.args) == 3:
        return [node.args[2]]
    if is_call_of(node, "ceil", "floor", "int", "round"):
        parts = [one for one in ast.walk(node) if isinstance(one, ast.BinOp)]
        return [one.right for one in parts if isinstance(one.op, ast.Div)]
    return []


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
            if isinstance(node, ast.expr) and _is_size(node):
                parent = source.parents[node]
                if not isinstance(parent, ast.Call) or parent.func is not node:
                    yield source, node


def _is_size(node: ast.expr) -> bool:
    """Return whether a name, an attribute or a key is called like a batch size."""
    name = last_name(node)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = str(node.slice.value)
    return _BATCH.search(name) is not None
