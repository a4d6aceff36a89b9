"""A script with pending edits: the user's files, the edits, and changed arguments."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from oomph.exporting.rewriting.origin import (
    PARSED,
    Number,
    Place,
    followed,
    is_set_elsewhere,
    whole_number,
)
from oomph.exporting.rewriting.source import (
    Code,
    Edit,
    NotCertain,
    Source,
    argument_of,
    is_call_of,
    last_name,
)

# ---- a global variable that an argument of the same name may set ---------------------------------
# In nanoGPT, for example, `--batch_size=8` sets `batch_size = 8`. Such a script has no parser: it
# executes a text or assigns to `globals()`, and its own text does not show which arguments it
# understands. An argument counts for a variable only if it has the same name, and callers compare
# its value with what the rehearsal saw.

_WORD = re.compile(r"(?:--)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Global:
    """A module-level variable that arguments may set."""

    name: str
    # Its value without arguments; None if that is not certain. Two uses of a name are the same.
    number: Number | None = field(compare=False)

    def value(self, arguments: Sequence[str]) -> int | None:
        """Return its value when the script starts with these arguments; None if unknown."""
        place = self._place(arguments)
        if place is not None:
            value = arguments[place].partition("=")[2]
            return int(value) if value.isdecimal() else None
        if any(_WORD.fullmatch(word) is None for word in arguments):
            return None  # for example, a settings file may set it
        return None if self.number is None else self.number.value

    def with_value(self, value: int, arguments: Sequence[str]) -> tuple[str, ...] | None:
        """Return arguments with another value; None if none of them sets it. Raises NotCertain."""
        place = self._place(arguments)
        if place is not None:
            start = arguments[place].partition("=")[0]
            return (*arguments[:place], f"{start}={value}", *arguments[place + 1 :])
        if self.value(arguments) is None:
            raise NotCertain(f"make {self.name} be {value}: where it comes from is not certain")
        return None

    def _place(self, arguments: Sequence[str]) -> int | None:
        """Return the index of the last argument that sets the name; the last one counts."""
        words = [_WORD.fullmatch(word) for word in arguments]
        places = [place for place, word in enumerate(words) if word and word["name"] == self.name]
        return places[-1] if places else None


def _global_behind(code: Code, source: Source, node: ast.expr) -> Global | None:
    """Find the global behind a name, or behind a number assigned to one; None if not settable."""
    if isinstance(node, ast.Name):
        name: str | None = node.id if _is_of_module(source, node) else None
    else:
        name = _target(source, node)
    if name is None or not _takes_arguments(code, source):
        return None
    value = whole_number(node)
    return Global(name, None if value is None else Number(source, node, value))


def settable_globals(code: Code) -> Iterator[Global]:
    """Yield the module-level variables of files whose globals arguments may set."""
    for source in code.files.values():
        if not _takes_arguments(code, source):
            continue
        for name, stores in source.stores.items():
            parent = source.parents[stores[0]]
            if isinstance(parent, ast.Assign) and source.parents[parent] is source.tree:
                value = whole_number(parent.value)
                number = None if value is None else Number(source, parent.value, value)
                yield Global(name, number)


def _takes_arguments(code: Code, source: Source) -> bool:
    """Return whether executed text or `globals()` sets its globals, and not a parser."""
    if any(code.calls("add_argument")):
        return False
    uses = [source.parents[call] for call in source.calls if is_call_of(call, "globals")]
    return any(is_call_of(call, "exec") for call in source.calls) or any(
        isinstance(use.ctx, ast.Store)  # globals()[name] = value
        if isinstance(use, ast.Subscript)
        else isinstance(use, ast.Attribute) and use.attr == "update"
        for use in uses
    )


def _is_of_module(source: Source, node: ast.Name) -> bool:
    """Return whether a name is set only at the top of its file, and is not a parameter here."""
    stores = source.stores.get(node.id, [])
    around = [one.args for one in source.above(node) if isinstance(one, _FUNCTIONS)]
    inside = (one.arg for args in around for one in ast.walk(args) if isinstance(one, ast.arg))
    is_top = bool(stores) and all(source.scope_of(one) is source.tree for one in stores)
    return is_top and node.id not in inside


def _target(source: Source, node: ast.expr) -> str | None:
    """Return `size` for the 8 in `size = 8` at the top of a file."""
    parent = source.parents.get(node)
    if not isinstance(parent, (ast.Assign, ast.AnnAssign)):
        return None
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
    is_top = len(targets) == 1 and source.scope_of(parent) is source.tree
    return targets[0].id if is_top and isinstance(targets[0], ast.Name) else None


# ---- what decides an expression's value: a number in the text, or an argument ------------------


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line option of argparse; `known` are the flags of all its options.

    Arguments are read as argparse does: `--size 8`, `--size=8`, `-s 8`, `-s8`, any unique prefix.
    """

    flags: tuple[str, ...]
    action: str
    default: int | bool | str | None
    place: Place

    def value(self, arguments: Sequence[str], known: Sequence[str]) -> object:
        """Return its value when the script starts with these arguments; None if unknown."""
        value: object = self.default
        for place, given in self._uses(arguments, known):
            if self.action == "store_true":
                return True
            value = given if given is not None else next(iter(arguments[place + 1 :]), None)
        return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value

    def with_value(
        self, value: str | None, arguments: Sequence[str], known: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the arguments with another value for the option. None: a flag without a value."""
        words = list(arguments)
        uses = list(self._uses(arguments, known))
        if not uses:
            added = [self._longest(), *([] if value is None else [value])]
            # Behind "--" everything belongs to positional arguments.
            return (*added, *words) if "--" in words else (*words, *added)
        if value is None:
            return tuple(words)
        for place, given in uses:
            if given is None:
                is_bare = words[place + 1 : place + 2] == [] or words[place + 1].startswith("--")
                words[place + 1 : place + 1 + (not is_bare)] = [value]
            else:
                words[place] = words[place].removesuffix(given) + value
        return tuple(words)

    def _longest(self) -> str:
        if not self.flags:
            source, call = self.place
            raise NotCertain(f"{source.where(call)} has no name to be given by")
        return max(self.flags, key=len)

    def _uses(
        self, arguments: Sequence[str], known: Sequence[str]
    ) -> Iterator[tuple[int, str | None]]:
        """Yield where the option is given, with its value if that is in the same word."""
        for place, word in enumerate(itertools.takewhile(lambda word: word != "--", arguments)):
            name, is_assigned, value = word.partition("=")
            if word.startswith("--"):
                if self._is_meant(name, known):
                    yield place, value if is_assigned else None
                continue
            for flag in (flag for flag in self.flags if not flag.startswith("--")):
                if word == flag:
                    yield place, None
                elif word.startswith(flag) and word not in known and word[len(flag) :].isdecimal():
                    yield place, word[len(flag) :]

    def _is_meant(self, name: str, known: Sequence[str]) -> bool:
        if name in known:
            return name in self.flags
        meant = {flag for flag in known if flag.startswith(name)}
        return bool(meant) and meant <= set(self.flags)


Origin: TypeAlias = "Number | Global | Option"


def origin_of(code: Code, source: Source, node: ast.expr) -> Origin | None:
    """Return what decides an expression's value; None if that is not certain."""
    source, node = followed(code, source, node)
    found = _global_behind(code, source, node)
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
    added = code.calls("add_argument")
    found = [(where, call) for where, call in added if _destination(call) == node.attr]
    return option_made(code, *found[0]) if len(found) == 1 else None


def option_made(code: Code, where: Source, call: ast.Call) -> Option:
    """Return the option that an `add_argument` call makes."""
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
    """Return the attribute that an `add_argument` call fills."""
    named = argument_of(call, "dest")
    if isinstance(named, ast.Constant):
        return str(named.value)
    flags = _flags(call)
    long = [flag for flag in flags if flag.startswith("--")] or list(flags)
    return long[0].lstrip("-").replace("-", "_") if long else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A script and its pending edits, collected first and applied together.

    So all edits refer to positions in the same text.
    """

    code: Code
    arguments: tuple[str, ...]
    edits: tuple[Edit, ...] = ()

    def plus(self, *edits: Edit) -> Draft:
        """Add edits; an identical replacement is added only once."""
        new = [edit for edit in edits if edit.start == edit.end or edit not in self.edits]
        return replace(self, edits=(*self.edits, *new))

    def applied(self) -> Draft:
        return replace(self, code=self.code.edited(self.edits), edits=())

    def value_behind(self, source: Source, node: ast.expr) -> object:
        """Return an expression's value in this start of the script; None if that is not certain."""
        origin = origin_of(self.code, source, node)
        if isinstance(origin, Option):
            return origin.value(self.arguments, self._flags())
        if isinstance(origin, Global):
            return origin.value(self.arguments)
        return origin.value if origin is not None else None

    def with_number(self, source: Source, node: ast.expr, value: int) -> Draft:
        """Change an expression's value where it comes from. Raises NotCertain."""
        origin = origin_of(self.code, source, node)
        if isinstance(origin, Global):
            arguments = origin.with_value(value, self.arguments)
            if arguments is not None:
                return replace(self, arguments=arguments)
            origin = origin.number
        if isinstance(origin, Number):
            return self.plus(origin.source.replaced(origin.node, str(value)))
        if isinstance(origin, Option):
            return self.with_option(origin, str(value))
        raise NotCertain(
            f"make {source.code(node)} at {source.path}:{node.lineno} be {value}: where it comes"
            " from is not certain"
        )

    def with_option(self, option: Option, value: str | None) -> Draft:
        """Set a command-line option; None switches a flag on."""
        is_plain = option.action in ("store", "store_true") and (
            {"REMAINDER", "add_subparsers"}.isdisjoint(option.place[0].names)
        )
        if not is_plain:
            source, call = option.place
            raise NotCertain(f"set the option of {source.where(call)} to {value}")
        arguments = option.with_value(value, self.arguments, self._flags())
        return replace(self, arguments=arguments)

    def _flags(self) -> list[str]:
        """Return every flag that the script's parser knows."""
        return [flag for _, call in self.code.calls("add_argument") for flag in _flags(call)]
