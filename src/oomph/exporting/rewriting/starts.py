"""A script's own settings -> starts of it that may follow a plan, the likeliest first.

Only names and values are compared here, so nothing is certain: each start is to be rehearsed, and
used only if the rehearsal shows what was planned. Settings are arguments (argparse, click, fields
of a dataclass that a parser fills, `name=value`), lines of a configuration file, and named numbers
in the text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from oomph.exporting.rewriting.draft import Global, Option, option_made, settable_globals
from oomph.exporting.rewriting.origin import whole_number
from oomph.exporting.rewriting.source import Code, NotCertain, Source, argument_of, last_name
from oomph.records.script import Aspect, Seen
from oomph.records.workload import Variant

_MOST_SETTINGS = 4  # of one kind; judgement: each combination of them takes a rehearsal
_MOST_STARTS = 8

_BATCH = re.compile(r"batch|^bs$|^bsz$|^b$")
_NO_BATCH = re.compile(r"eval|val|test|infer|total|global|effective|accum|batches|sampler|norm")
_TIMES = re.compile(r"accum|grad_acc|acc_steps|update_freq")
_MIXED = re.compile(r"^(use_|enable_|with_)?(amp|autocast|mixed_precision|mixed|fp16|bf16|half)$")
_KIND = re.compile(r"(^|_)(precision|dtype|mixed_precision|amp_dtype|amp)$")
_RECOMPUTE = re.compile(
    r"(grad|gradient|activation)s?_?(checkpoint|ckpt)|recompute"
    r"|^(use_|enable_)?checkpointing$|^use_checkpoint$|^checkpoint_activations$"
)
_WORDS = {
    "bf16": ("bf16", "bfloat16", "bf16-mixed"),
    "fp16": ("fp16", "float16", "16-mixed", "half"),
}
_PARSERS_OF_CLASSES = {"HfArgumentParser", "ArgumentParser", "cli", "parse", "CLI"}
_LINE = re.compile(
    r"""^(?P<head>\s*(?:-\s+)?["']?(?P<name>[A-Za-z_][\w-]*)["']?\s*[:=]\s*)"""
    r"""(?P<value>\d+)(?P<tail>\s*,?\s*(?:\#.*)?)$""",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Arguments to start the script with, and files that read otherwise, by absolute path."""

    arguments: tuple[str, ...]
    edited: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Something that a start can set, as far as its name says."""

    name: str  # in lower case, with "_"
    value: object  # now; None: unknown
    put: Callable[[Start, str | None], Start]  # another value; None: a flag that is given
    is_flag: bool = False
    choices: tuple[str, ...] = ()


def starts(
    aspect: Aspect,
    code: Code,
    start: Start,
    configs: Mapping[str, str],
    seen: Seen,
    variant: Variant,
) -> Iterator[Start]:
    """Yield the starts to try for one aspect of a plan."""
    settings = list(_settings(code, start.arguments, configs))
    ways = {"split": _splits, "precision": _precisions, "checkpointing": _checkpointings}
    found = ways[aspect](settings, start, seen, variant) if aspect in ways else iter(())
    yield from islice(dict.fromkeys(found), _MOST_STARTS)


# ---- batch size and accumulation -----------------------------------------------------------------


def _splits(
    settings: Sequence[Setting], start: Start, seen: Seen, variant: Variant
) -> Iterator[Start]:
    sizes = _named(settings, _is_size, seen.micro_batch)
    times = _named(settings, lambda name: _TIMES.search(name), seen.accumulation or 1)
    is_divided_otherwise = variant.accumulation != (seen.accumulation or 1)
    sized = [_put(start, [(one, str(variant.micro_batch))]) for one in sizes]
    both = [
        _put(start, [(one, str(variant.micro_batch)), (other, str(variant.accumulation))])
        for one in sizes
        for other in times
    ]
    alone = [_put(start, [(one, str(variant.accumulation))]) for one in times]
    for one in (*both, *alone, *sized) if is_divided_otherwise else sized:
        if one is not None:
            yield one


def _is_size(name: str) -> bool:
    return bool(_BATCH.search(name)) and not _NO_BATCH.search(name)


def _named(
    settings: Sequence[Setting], fits: Callable[[str], object], value: int | None
) -> list[Setting]:
    """Return the settings with such a name whose value is the one that was seen, or unknown."""
    found = [one for one in settings if fits(one.name) and not one.is_flag]
    known = [one for one in found if one.value == value]
    unknown = [one for one in found if one.value is None]
    return [*known, *unknown][:_MOST_SETTINGS]


# ---- precision and checkpointing -----------------------------------------------------------------


def _precisions(
    settings: Sequence[Setting], start: Start, seen: Seen, variant: Variant
) -> Iterator[Start]:
    words = _WORDS.get(variant.precision)
    if words is None or variant.precision == seen.precision:
        return
    others = [word for name, them in _WORDS.items() if name != variant.precision for word in them]
    flags = [
        one for one in settings if one.is_flag and _MIXED.search(one.name) and one.value is not True
    ]
    flags = [one for one in flags if not any(word in one.name for word in others)]
    flags.sort(key=lambda one: not any(word in one.name for word in words))
    kinds = [
        (one, word)
        for one in settings
        if _KIND.search(one.name) and not one.is_flag
        for word in words
        if word in one.choices or not one.choices
    ]
    for one in flags:
        yield from _certain(_put(start, [(one, None)]))
    for kind in kinds:
        yield from _certain(_put(start, [kind]))
        for one in flags:
            yield from _certain(_put(start, [(one, None), kind]))


def _checkpointings(
    settings: Sequence[Setting], start: Start, seen: Seen, variant: Variant
) -> Iterator[Start]:
    if variant.checkpointing == "none" or seen.checkpointing != "none":
        return
    for one in settings:
        if _RECOMPUTE.search(one.name) and one.value in (None, False, 0):
            yield from _certain(_put(start, [(one, None if one.is_flag else "True")]))


def _certain(start: Start | None) -> Iterator[Start]:
    if start is not None:
        yield start


def _put(start: Start, values: Sequence[tuple[Setting, str | None]]) -> Start | None:
    try:
        for setting, value in values:
            start = setting.put(start, value)
    except NotCertain:
        return None
    return start


# ---- the settings of a script --------------------------------------------------------------------


def _settings(
    code: Code, arguments: Sequence[str], configs: Mapping[str, str]
) -> Iterator[Setting]:
    options = [option_made(code, *place) for place in code.calls("add_argument", "option")]
    options += list(_fields(code))
    known = [flag for option in options for flag in option.flags]
    for option in options:
        if option.flags and option.action in ("store", "store_true"):
            yield _of_option(option, known, arguments)
    for one in settable_globals(code):
        yield _of_global(one, arguments)
    words = (re.fullmatch(r"(?:--)?([A-Za-z_][\w.]*)=(.*)", word) for word in arguments)
    for word in filter(None, words):
        yield _of_word(word[1], arguments)
    for path, text in configs.items():
        for line in _LINE.finditer(text):
            yield _of_line(path, line)
    for source in code.files.values():
        for place, (name, node) in enumerate(_written(source)):
            yield _of_text(source, place, name, node)


def _of_option(option: Option, known: Sequence[str], arguments: Sequence[str]) -> Setting:
    def put(start: Start, value: str | None) -> Start:
        words = option.with_value(value, start.arguments, known)
        return Start(arguments=words, edited=start.edited)

    name = max(option.flags, key=len).lstrip("-")
    made = option.place[1]
    choices = argument_of(made, "choices") if isinstance(made, ast.Call) else None
    listed = choices.elts if isinstance(choices, (ast.List, ast.Tuple)) else []
    return Setting(
        name=name.lower().replace("-", "_"),
        value=option.value(arguments, known),
        put=put,
        is_flag=option.action == "store_true",
        choices=tuple(str(one.value) for one in listed if isinstance(one, ast.Constant)),
    )


def _fields(code: Code) -> Iterator[Option]:
    """Yield the fields of the user's dataclasses, if a parser may fill them."""
    if not any(code.calls(*_PARSERS_OF_CLASSES)):
        return
    for source, node in code.nodes():
        if not isinstance(node, ast.ClassDef) or not _is_dataclass(node):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = _default(field.value)
                is_bool = isinstance(field.annotation, ast.Name) and field.annotation.id == "bool"
                yield Option(
                    (f"--{field.target.id}",),
                    "store_true" if is_bool else "store",
                    value,
                    (source, field.value or field.annotation),
                )


def _is_dataclass(node: ast.ClassDef) -> bool:
    made = (one.func if isinstance(one, ast.Call) else one for one in node.decorator_list)
    return any(last_name(one) == "dataclass" for one in made)


def _default(node: ast.expr | None) -> int | bool | str | None:
    if isinstance(node, ast.Call) and last_name(node.func) == "field":
        node = argument_of(node, "default")
    if node is None:
        return None
    value = node.value if isinstance(node, ast.Constant) else whole_number(node)
    return value if isinstance(value, (int, bool, str)) else None


def _of_global(one: Global, arguments: Sequence[str]) -> Setting:
    def put(start: Start, value: str | None) -> Start:
        word = f"{one.name}={'True' if value is None else value}"
        own = [place for place, each in enumerate(start.arguments) if _sets(each, one.name)]
        words = list(start.arguments)
        if own:
            dashes = "--" if words[own[-1]].startswith("--") else ""
            words[own[-1]] = dashes + word
        else:
            are_bare = bool(words) and not any(each.startswith("-") for each in words)
            words.append(word if are_bare else f"--{word}")
        return Start(arguments=tuple(words), edited=start.edited)

    number = one.number
    value = _value_of(one.name, arguments)
    default = None if number is None else number.value
    return Setting(name=one.name.lower(), value=default if value is None else value, put=put)


def _of_word(name: str, arguments: Sequence[str]) -> Setting:
    """A word like `train.batch_size=32`, which says itself what it sets."""

    def put(start: Start, value: str | None) -> Start:
        words = [
            f"{each.partition('=')[0]}={'True' if value is None else value}"
            if _sets(each, name)
            else each
            for each in start.arguments
        ]
        return Start(arguments=tuple(words), edited=start.edited)

    last = name.rpartition(".")[2].lower()
    return Setting(name=last, value=_value_of(name, arguments), put=put)


def _sets(word: str, name: str) -> bool:
    return word.removeprefix("--").startswith(f"{name}=")


def _value_of(name: str, arguments: Sequence[str]) -> int | None:
    values = [word.partition("=")[2] for word in arguments if _sets(word, name)]
    return int(values[-1]) if values and values[-1].isdecimal() else None


def _of_line(path: str, line: re.Match[str]) -> Setting:
    """A line of a configuration file, such as `batch_size: 32`."""
    begin, end = line.span("value")

    def put(start: Start, value: str | None) -> Start:
        texts = dict(start.edited)
        text = texts.get(path, line.string)
        if text != line.string:
            # Another line of the file was changed before, which may have moved this one.
            head, tail = re.escape(line["head"]), re.escape(line["value"] + line["tail"])
            moved = list(re.finditer(rf"^{head}(?={tail}$)", text, re.MULTILINE))
            if len(moved) != 1:
                raise NotCertain(f"{path} has several such lines")
            at = moved[0].end()
            texts[path] = text[:at] + str(value) + text[at + end - begin :]
        else:
            texts[path] = text[:begin] + str(value) + text[end:]
        return Start(arguments=start.arguments, edited=tuple(texts.items()))

    name = line["name"].lower().replace("-", "_")
    return Setting(name=name, value=int(line["value"]), put=put)


def _written(source: Source) -> Iterator[tuple[str, ast.expr]]:
    """Yield the numbers and switches in a file's text that have a name, in their order."""
    for node in source.nodes:
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(last_name(target), node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            pairs = [(last_name(node.target), node.value)]
        elif isinstance(node, ast.keyword):
            pairs = [(node.arg or "", node.value)]
        elif isinstance(node, ast.Dict):
            names = [one.value if isinstance(one, ast.Constant) else "" for one in node.keys]
            pairs = [(str(name), value) for name, value in zip(names, node.values, strict=True)]
        elif isinstance(node, ast.arguments):
            own = [*node.posonlyargs, *node.args]
            last = own[len(own) - len(node.defaults) :]
            pairs = [(one.arg, value) for one, value in zip(last, node.defaults, strict=True)]
            pairs += [
                (one.arg, value)
                for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)
            ]
        for name, value in pairs:
            if value is not None and name and _plain(value) is not None:
                yield name, value


def _plain(node: ast.expr) -> int | bool | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return node.value
    return whole_number(node)


def _of_text(source: Source, place: int, name: str, node: ast.expr) -> Setting:
    """A number or a switch in the script's own text, such as `batch_size = 32`."""

    def put(start: Start, value: str | None) -> Start:
        texts = dict(start.edited)
        now = Source(source.path, texts.get(source.path, source.text))
        there = list(_written(now))[place][1]  # a number became another number: all are there
        after, _ = now.edited([now.replaced(there, "True" if value is None else value)])
        texts[source.path] = after.text
        return Start(arguments=start.arguments, edited=tuple(texts.items()))

    value = _plain(node)
    return Setting(name=name.lower(), value=value, put=put, is_flag=isinstance(value, bool))


def config_paths(code: Code, arguments: Sequence[str]) -> list[str]:
    """Return the paths in the arguments and the text that look like configuration files."""
    ends = (".yaml", ".yml", ".toml", ".json")
    given = [word.rpartition("=")[2] for word in arguments]
    written = [
        node.value
        for _, node in code.nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return list(dict.fromkeys(one for one in (*given, *written) if one.endswith(ends)))
