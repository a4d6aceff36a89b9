"""An expression -> the whole number that it is, if it stands in the text."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from oomph.planning.export.script_source import Source


@dataclass(frozen=True, slots=True)
class Number:
    """A number that stands in the text, also as a product: `5 * 8`."""

    source: Source
    node: ast.expr
    value: int


def whole_number(node: ast.expr) -> int | None:
    """Its value; None if it is no number, or is computed from something else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = whole_number(node.left), whole_number(node.right)
        return None if left is None or right is None else left * right
    return None
