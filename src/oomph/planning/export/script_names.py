"""Statements -> the names that they read before they set them, and those that they set."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from oomph.planning.export.script_source import names_in

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def stored_in(node: ast.AST) -> set[str]:
    """The names that it sets, without those that live in a comprehension only."""
    return names_in(node, ast.Store) - _of_comprehensions(node)


def read_before_set(
    statements: Sequence[ast.stmt], known: frozenset[str] = frozenset()
) -> set[str]:
    """What has to be there when the statements begin."""
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
    """What is set when the statement is over, whichever way it went."""
    if isinstance(statement, ast.If):
        ways = [_set_by(statement.body), _set_by(statement.orelse)]
        return ways[0] & ways[1]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        inside = _set_by(statement.body)
        return inside | {name for item in statement.items for name in stored_in(item)}
    return frozenset() if _blocks(statement) else frozenset(stored_in(statement))


def _set_by(block: Sequence[ast.stmt]) -> frozenset[str]:
    return frozenset().union(*(_surely_set(one) for one in block))


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Of a compound statement. A function that is defined counts as one."""
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
