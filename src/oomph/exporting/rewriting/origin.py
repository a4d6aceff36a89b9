"""An expression in the user's code -> the expression it stands for.

Names are followed through assignments, parameters, attributes, dicts, imports and functions that
always return the same expression. A value that is set in two places, computed, or read from a file
is not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from oomph.exporting.rewriting.source import Code, Source, argument_of, last_name, names_in

Place: TypeAlias = "tuple[Source, ast.expr]"
Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
PARSED = {"parse_args", "parse_known_args", "parse_intermixed_args"}  # argparse's
_FURTHEST = 12  # names in a row; this also ends cycles


def followed(code: Code, source: Source, node: ast.expr, steps: int = _FURTHEST) -> Place:
    """Return the expression that a name stands for, as far as that is certain."""
    while steps > 0:
        found = _one_step(code, source, node, steps)
        if found is None:
            break
        (source, node), steps = found, steps - 1
    return source, node


def _one_step(code: Code, source: Source, node: ast.expr, steps: int) -> Place | None:
    if isinstance(node, ast.Name):
        return _named(code, source, node, steps)
    if isinstance(node, ast.Attribute):
        return _attribute(code, source, node, steps)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _entry(code, source, node, node.slice.value, steps)
    return _returned(code, node) if isinstance(node, ast.Call) else None


def _returned(code: Code, call: ast.Call) -> Place | None:
    """Return what a user's function returns, if it is always the same expression."""
    if not isinstance(call.func, ast.Name):
        return None
    found = [
        (source, node)
        for source, node in code.nodes()
        if isinstance(node, ast.FunctionDef) and node.name == call.func.id
    ]
    if len(found) != 1 or found[0][1].decorator_list:
        return None
    source, function = found[0]
    inside = [node for node in ast.walk(function) if isinstance(node, (ast.Return, ast.Yield))]
    own = [node for node in inside if source.scope_of(node) is function]
    value = own[0].value if len(own) == 1 and isinstance(own[0], ast.Return) else None
    return (source, value) if value is not None else None


# ---- names ---------------------------------------------------------------------------------------


def _named(code: Code, source: Source, node: ast.Name, steps: int) -> Place | None:
    scope: ast.AST = source.scope_of(node)
    while True:
        bindings = list(_bindings(source, scope, node.id))
        if bindings:
            if len(bindings) > 1 or bindings[0] is None:
                return None
            value = bindings[0]
            return (source, value) if isinstance(value, ast.expr) else None
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.id in _parameters(scope):
                return _argument(code, source, scope, node.id, steps)
        elif isinstance(scope, ast.Module):
            return _imported(code, source, node.id)
        scope = source.scope_of(scope)


def _bindings(source: Source, scope: ast.AST, name: str) -> Iterator[ast.expr | None]:
    """Yield what a name is bound to in a scope; None for anything but a plain assignment."""
    for node in source.stores.get(name, []):
        if source.scope_of(node) is scope or (
            scope is source.tree and name in _globals(source, node)
        ):
            yield _value_for(source, node)


def _globals(source: Source, node: ast.AST) -> set[str]:
    inside = ast.walk(source.scope_of(node))
    return {name for one in inside if isinstance(one, ast.Global) for name in one.names}


def _has_star(nodes: list[ast.expr]) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _imported(code: Code, source: Source, name: str) -> Place | None:
    for node in source.imports:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _global_of(code, node.module or "", alias.name)
    return None


def _module_called(source: Source, name: str) -> str | None:
    """Return the module that a file imports under a name."""
    for node in source.imports:
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return alias.name
    return None


def _global_of(code: Code, module: str, name: str) -> Place | None:
    stem = module.rpartition(".")[2]
    for source in code.files.values():
        if PurePath(source.path).stem == stem:
            bindings = list(_bindings(source, source.tree, name))
            if len(bindings) == 1 and bindings[0] is not None:
                return source, bindings[0]
    return None


# ---- parameters ----------------------------------------------------------------------------------


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _argument(
    code: Code, source: Source, function: Function, name: str, steps: int
) -> Place | None:
    """Return what the function's callers pass, or its default if they pass nothing."""
    owner = source.parents[function]
    is_method = isinstance(owner, ast.ClassDef) and "staticmethod" not in {
        last_name(decorator) for decorator in function.decorator_list
    }
    called = owner.name if isinstance(owner, ast.ClassDef) and function.name == "__init__" else None
    place: int | None = _parameters(function).index(name) - is_method
    if name in {one.arg for one in function.args.kwonlyargs}:
        place = None
    given: list[Place] = []
    for where, call in code.calls():
        is_called = last_name(call.func) == (called or function.name)
        if not is_called or (isinstance(call.func, ast.Attribute) != is_method and not called):
            continue
        value = argument_of(call, name, place)
        if value is None and (_has_star(call.args) or any(k.arg is None for k in call.keywords)):
            return None
        given.append((where, value) if value is not None else (source, _default(function, name)))
    if not given and not function.decorator_list:
        default = _default(function, name)
        return None if default is _NOTHING else (source, default)
    if not given:
        return None
    ends = {id(followed(code, *one, steps - 1)[1]): one for one in given}
    only = next(iter(ends.values()))
    return only if len(ends) == 1 and only[1] is not _NOTHING else None


_NOTHING = ast.Constant(value=...)


def _default(function: Function, name: str) -> ast.expr:
    """Return a parameter's default; _NOTHING if it has none."""
    arguments = function.args
    by_place = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    defaults: dict[str, ast.expr | None] = dict(
        zip(by_place[len(by_place) - len(arguments.defaults) :], arguments.defaults, strict=True)
    )
    names = (one.arg for one in arguments.kwonlyargs)
    defaults |= dict(zip(names, arguments.kw_defaults, strict=True))
    return defaults.get(name) or _NOTHING


# ---- attributes and entries ----------------------------------------------------------------------


def _attribute(code: Code, source: Source, node: ast.Attribute, steps: int) -> Place | None:
    if isinstance(node.value, ast.Name) and node.value.id == "self":
        return _own_attribute(source, node)
    if is_set_elsewhere(code, node.attr):
        return None
    where, owner = followed(code, source, node.value, steps - 1)
    if isinstance(owner, ast.Name) and (module := _module_called(where, owner.id)):
        return _global_of(code, module, node.attr)
    if isinstance(owner, ast.Call):
        if last_name(owner.func) in PARSED:
            return None  # it is a command-line option
        given = argument_of(owner, node.attr)
        if given is not None:
            return where, given
        if owner.args or any(keyword.arg is None for keyword in owner.keywords):
            return None
    name = last_name(owner.func) if isinstance(owner, ast.Call) else last_name(owner)
    return _class_attribute(code, name, node.attr)


def _own_attribute(source: Source, node: ast.Attribute) -> Place | None:
    """Return what the class assigns to `self.size`, if it does so in one place."""
    owner = next((one for one in source.above(node) if isinstance(one, ast.ClassDef)), None)
    if owner is None:
        return None
    found = [
        _value_for(source, other)
        for other in ast.walk(owner)
        if isinstance(other, ast.Attribute) and other.attr == node.attr
        if not isinstance(other.ctx, ast.Load)
    ]
    value = found[0] if len(found) == 1 else None
    return (source, value) if value is not None else None


def _value_for(source: Source, target: ast.expr) -> ast.expr | None:
    parent = source.parents[target]
    if isinstance(parent, (ast.Assign, ast.AnnAssign)):
        return parent.value
    outer = source.parents[parent]
    if not isinstance(parent, ast.Tuple) or not isinstance(outer, ast.Assign):
        return None
    place = parent.elts.index(target)
    if _has_star(parent.elts):
        return None
    if isinstance(outer.value, ast.Tuple):
        values = outer.value.elts
        return values[place] if len(values) == len(parent.elts) else None
    return _element(source, outer, place)


def _element(source: Source, assignment: ast.Assign, place: int) -> ast.expr | None:
    """Return `loader` in `loader, size = made()` as `made()[0]`, which is not in the text."""
    if not isinstance(assignment.value, ast.Call):
        return None
    value = ast.Subscript(value=assignment.value, slice=ast.Constant(value=place), ctx=ast.Load())
    ast.copy_location(value, assignment.value)
    source.parents[value] = assignment
    return value


def _class_attribute(code: Code, name: str, attribute: str) -> Place | None:
    """Return the value that a user's class gives to an attribute, as dataclasses do."""
    for source, node in code.nodes():
        if isinstance(node, ast.ClassDef) and node.name == name:
            for statement in node.body:
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                value = getattr(statement, "value", None)
                if [last_name(target) for target in targets if target] == [attribute] and value:
                    return source, _field_default(value)
    return None


def _field_default(value: ast.expr) -> ast.expr:
    """Return 32 for `field(default=32)`."""
    if isinstance(value, ast.Call) and last_name(value.func) == "field":
        return argument_of(value, "default") or value
    return value


def _entry(
    code: Code, source: Source, node: ast.Subscript, key: object, steps: int
) -> Place | None:
    """Return `config["batch_size"]` from a dict that is written in the text."""
    if isinstance(key, str) and is_set_elsewhere(code, key):
        return None
    where, owner = followed(code, source, node.value, steps - 1)
    if isinstance(owner, ast.Call) and last_name(owner.func) == "dict" and not owner.args:
        given = argument_of(owner, str(key))
        return (where, given) if given is not None else None
    if isinstance(owner, ast.Tuple) and isinstance(key, int) and not _has_star(owner.elts):
        return (where, owner.elts[key]) if 0 <= key < len(owner.elts) else None
    if isinstance(owner, ast.Dict):
        values = [v for k, v in zip(owner.keys, owner.values, strict=True) if _is_key(k, key)]
        is_whole = all(k is not None for k in owner.keys)
        return (where, values[0]) if len(values) == 1 and is_whole else None
    return None


def _is_key(node: ast.expr | None, key: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == key


def is_set_elsewhere(code: Code, name: str) -> bool:
    """Return whether `x.name` or `x["name"]` is assigned anywhere except through self."""
    for _, node in code.nodes():
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            if isinstance(node, ast.Attribute) and node.attr == name:
                if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    return True
            elif isinstance(node, ast.Subscript) and _is_key(node.slice, name):
                return True
    return False


# ---- names that statements read before they set them, and names that they set -------------------

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def stored_in(node: ast.AST) -> set[str]:
    """Return the names that a node sets, except those inside comprehensions."""
    return names_in(node, ast.Store) - _of_comprehensions(node)


def read_before_set(
    statements: Sequence[ast.stmt], known: frozenset[str] = frozenset()
) -> set[str]:
    """Return the names that must exist before the statements run."""
    needed: set[str] = set()
    for statement in statements:
        needed |= _needed_by(statement, known)
        known |= _surely_set(statement)
    return needed


def _needed_by(statement: ast.stmt, known: frozenset[str]) -> set[str]:
    blocks = _blocks(statement)
    if not blocks:
        return _loaded(statement) - known
    head = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt)]
    bound = frozenset(name for node in head for name in stored_in(node))
    needed = {name for node in head for name in _loaded(node)} - known
    for block in blocks:
        needed |= read_before_set(block, known | bound)
    return needed


def _surely_set(statement: ast.stmt) -> frozenset[str]:
    """Return the names that are set after the statement, whichever branch it took."""
    if isinstance(statement, ast.If):
        branches = [_set_by(statement.body), _set_by(statement.orelse)]
        return branches[0] & branches[1]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        inside = _set_by(statement.body)
        return inside | {name for item in statement.items for name in stored_in(item)}
    return frozenset() if _blocks(statement) else frozenset(stored_in(statement))


def _set_by(block: Sequence[ast.stmt]) -> frozenset[str]:
    return frozenset().union(*(_surely_set(one) for one in block))


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a compound statement; a function definition counts as one."""
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    return [block for block in blocks if block]


def _loaded(node: ast.AST) -> set[str]:
    changed = names_in(node.target, ast.Store) if isinstance(node, ast.AugAssign) else set()
    return (names_in(node) | changed) - _of_comprehensions(node)


def _of_comprehensions(node: ast.AST) -> set[str]:
    return {
        name
        for inner in ast.walk(node)
        if isinstance(inner, _COMPREHENSIONS)
        for generator in inner.generators
        for name in names_in(generator.target, ast.Store)
    }


# ---- whole numbers in the text -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """A number in the text, also as a product: `5 * 8`."""

    source: Source
    node: ast.expr
    value: int


def whole_number(node: ast.expr) -> int | None:
    """Return its value; None if it is not a number, or is computed from something else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = whole_number(node.left), whole_number(node.right)
        return None if left is None or right is None else left * right
    return None
