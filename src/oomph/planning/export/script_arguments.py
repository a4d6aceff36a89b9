"""A script's arguments -> what they give to an option, and the arguments with another value.

As argparse reads them: `--size 8`, `--size=8`, `-s 8`, `-s8`, and a beginning that is unique.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oomph.planning.export.script_options import Option
from oomph.planning.export.script_source import NotCertain


def value_of(option: Option, arguments: Sequence[str], known: Sequence[str]) -> object:
    """What the option is in a start with these arguments; None if that cannot be told."""
    value: object = option.default
    for place, given in _uses(option, arguments, known):
        if option.action == "store_true":
            return True
        value = given if given is not None else next(iter(arguments[place + 1 :]), None)
    return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value


def with_value(
    option: Option, value: str | None, arguments: Sequence[str], known: Sequence[str]
) -> tuple[str, ...]:
    """The arguments with another value of the option. None: it is a flag without a value."""
    words = list(arguments)
    uses = list(_uses(option, arguments, known))
    if value is None:
        return tuple(words if uses else _placed(words, [_longest(option)]))
    for place, given in uses:
        if given is None:
            is_bare = words[place + 1 : place + 2] == [] or words[place + 1].startswith("--")
            words[place + 1 : place + 1 + (not is_bare)] = [value]
        else:
            words[place] = words[place][: len(words[place]) - len(given)] + value
    return tuple(words if uses else _placed(words, [_longest(option), value]))


def _longest(option: Option) -> str:
    if not option.flags:
        source, call = option.place
        raise NotCertain(f"{source.where(call)} has no name to be given by")
    return max(option.flags, key=len)


def _placed(words: list[str], added: list[str]) -> list[str]:
    """At the end, but before what belongs to positional arguments."""
    if "--" in words:
        return [*added, *words]
    return [*words, *added]


def _uses(
    option: Option, arguments: Sequence[str], known: Sequence[str]
) -> Iterator[tuple[int, str | None]]:
    """Where the option is given, with its value if that is in the same word."""
    for place, word in enumerate(arguments):
        if word == "--":
            return
        name, is_assigned, value = word.partition("=")
        if word.startswith("--") and _means(name, option, known):
            yield place, value if is_assigned else None
        elif not word.startswith("--"):
            yield from ((place, given) for given in _short(word, option, known))


def _means(name: str, option: Option, known: Sequence[str]) -> bool:
    if name in known:
        return name in option.flags
    meant = {flag for flag in known if flag.startswith(name)}
    return bool(meant) and meant <= set(option.flags)


def _short(word: str, option: Option, known: Sequence[str]) -> Iterator[str | None]:
    for flag in option.flags:
        if flag.startswith("--"):
            continue
        if word == flag:
            yield None
        elif word.startswith(flag) and word not in known and word[len(flag) :].isdecimal():
            yield word[len(flag) :]
