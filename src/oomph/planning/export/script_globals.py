"""A name of a script -> the number that it has, where arguments of its name may set it.

As nanoGPT's do: `--batch_size=8` is `batch_size = 8`. Such a script has no parser; it executes a
text, or assigns to `globals()`, and which words it understands does not stand in its own text. A
word counts for a name only if it has that name, and whoever asks compares its value with what was
seen of the script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from oomph.planning.export.script_numbers import Number, whole_number
from oomph.planning.export.script_source import Code, NotCertain, Source, is_call_of

_WORD = re.compile(r"(?:--)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Global:
    """A name of a module that arguments may set."""

    name: str
    number: Number | None  # what it is without them; None: that is not certain


def global_behind(code: Code, source: Source, node: ast.expr) -> Global | None:
    """What a name, or a number that is given to one, is a global's; None: no argument sets it."""
    if isinstance(node, ast.Name):
        name: str | None = node.id if _is_of_module(source, node) else None
    else:
        name = _target(source, node)
    if name is None or not _takes_arguments(code, source):
        return None
    value = whole_number(node)
    return Global(name, None if value is None else Number(source, node, value))


def value_of(found: Global, arguments: Sequence[str]) -> int | None:
    """In a start of the script with these arguments; None if that cannot be told."""
    place = _place(found.name, arguments)
    if place is not None:
        value = arguments[place].partition("=")[2]
        return int(value) if value.isdecimal() else None
    if any(_WORD.fullmatch(word) is None for word in arguments):
        return None  # a file of settings, say, that sets it
    return None if found.number is None else found.number.value


def with_value(found: Global, value: int, arguments: Sequence[str]) -> tuple[str, ...] | None:
    """The arguments with another value; None if none of them sets it. Raises NotCertain."""
    place = _place(found.name, arguments)
    if place is not None:
        start = arguments[place].partition("=")[0]
        return (*arguments[:place], f"{start}={value}", *arguments[place + 1 :])
    if value_of(found, arguments) is None:
        raise NotCertain(f"make {found.name} be {value}: where it comes from is not certain")
    return None


def _place(name: str, arguments: Sequence[str]) -> int | None:
    """Of the last word that sets a name, which is the one that counts."""
    words = [_WORD.fullmatch(word) for word in arguments]
    places = [place for place, word in enumerate(words) if word and word["name"] == name]
    return places[-1] if places else None


def _takes_arguments(code: Code, source: Source) -> bool:
    """Whether its globals are set by what it executes or by their names, and not by a parser."""
    if any(is_call_of(node, "add_argument") for _, node in code.nodes()):
        return False
    return any(
        is_call_of(call, "exec") or (is_call_of(call, "globals") and _is_set(source, call))
        for call in source.calls
    )


def _is_set(source: Source, call: ast.Call) -> bool:
    """`globals()[name] = value`, `globals().update(...)`."""
    used = source.parents[call]
    if isinstance(used, ast.Subscript):
        return isinstance(used.ctx, ast.Store)
    return isinstance(used, ast.Attribute) and used.attr == "update"


def _is_of_module(source: Source, node: ast.Name) -> bool:
    """Whether a name is set at the top of its file, and nowhere else: also not by a caller."""
    stores = source.stores.get(node.id, [])
    around = [one.args for one in source.above(node) if isinstance(one, _FUNCTIONS)]
    inside = (one.arg for args in around for one in ast.walk(args) if isinstance(one, ast.arg))
    is_top = bool(stores) and all(source.scope_of(one) is source.tree for one in stores)
    return is_top and node.id not in inside


def _target(source: Source, node: ast.expr) -> str | None:
    """`size` of `size = 8` at the top of a file."""
    parent = source.parents.get(node)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        target = parent.targets[0]
    elif isinstance(parent, ast.AnnAssign):
        target = parent.target
    else:
        return None
    is_top = source.scope_of(parent) is source.tree
    return target.id if is_top and isinstance(target, ast.Name) else None
