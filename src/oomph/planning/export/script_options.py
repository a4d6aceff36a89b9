"""An expression of the user's -> what decides its value: a number in the text, or an argument."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TypeAlias

from oomph.planning.export.script_edits import argument_of
from oomph.planning.export.script_globals import Global, global_behind
from oomph.planning.export.script_numbers import Number, whole_number
from oomph.planning.export.script_origin import PARSED, Place, followed, is_set_elsewhere
from oomph.planning.export.script_source import Code, Source, is_call_of, last_name


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line."""

    flags: tuple[str, ...]
    action: str
    default: int | bool | str | None
    place: Place


Origin: TypeAlias = "Number | Global | Option"


def number_behind(code: Code, source: Source, node: ast.expr) -> Origin | None:
    """What decides an expression's value; None if that is not certain."""
    source, node = followed(code, source, node)
    found = global_behind(code, source, node)
    if found is not None:
        return found
    value = whole_number(node)
    if value is not None:
        return Number(source, node, value)
    if isinstance(node, ast.Attribute) and not is_set_elsewhere(code, node.attr):
        return _option(code, source, node)
    return None


def _option(code: Code, source: Source, node: ast.Attribute) -> Option | None:
    _, owner = followed(code, source, node.value)
    if not isinstance(owner, ast.Call) or last_name(owner.func) not in PARSED:
        return None
    found = [(where, call) for where, call in code.calls() if _destination(call) == node.attr]
    if len(found) != 1:
        return None
    where, call = found[0]
    action = argument_of(call, "action")
    return Option(
        flags=_flags(call),
        action=str(action.value) if isinstance(action, ast.Constant) else "store",
        default=_plain(code, where, argument_of(call, "default")),
        place=(where, call),
    )


def _plain(code: Code, source: Source, node: ast.expr | None) -> int | bool | str | None:
    if node is None:
        return None
    end = followed(code, source, node)[1]
    value = end.value if isinstance(end, ast.Constant) else whole_number(end)
    return value if isinstance(value, (int, bool, str)) else None


def _flags(call: ast.Call) -> tuple[str, ...]:
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    return tuple(word for word in words if isinstance(word, str) and word.startswith("-"))


def _destination(call: ast.Call) -> str | None:
    """The attribute that an `add_argument` fills."""
    if last_name(call.func) != "add_argument":
        return None
    named = argument_of(call, "dest")
    if isinstance(named, ast.Constant):
        return str(named.value)
    flags = _flags(call)
    long = [flag for flag in flags if flag.startswith("--")] or list(flags)
    return long[0].lstrip("-").replace("-", "_") if long else None


def options_of(code: Code) -> list[str]:
    """Every flag that the script's parser knows."""
    return [
        flag
        for _, node in code.nodes()
        if is_call_of(node, "add_argument")
        for flag in _flags(node)
    ]
