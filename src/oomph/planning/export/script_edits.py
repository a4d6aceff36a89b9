"""What is to be said at a place -> the edits that say it there, in the user's layout."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence

from oomph.planning.export.script_source import LINE, Edit, NotCertain, Source

_WIDTH = 99  # of a line that an argument is added to, before it gets one of its own
_SILENT = {
    tokenize.NL,
    tokenize.COMMENT,
    tokenize.NEWLINE,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.DEDENT,
}


def replaced(source: Source, node: ast.expr | ast.stmt, text: str) -> Edit:
    return Edit(*source.span(node), text)


def argument_of(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """What a call gives for a parameter, by name or by place; None if nothing that can be seen."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is None or any(isinstance(arg, ast.Starred) for arg in call.args[: position + 1]):
        return None
    return call.args[position] if position < len(call.args) else None


def with_keyword(source: Source, call: ast.Call, name: str, text: str) -> list[Edit]:
    """A call's keyword, replaced, or added as its last in the layout of the others."""
    own = argument_of(call, name)
    if own is not None:
        return [replaced(source, own, text)]
    if any(keyword.arg is None for keyword in call.keywords):
        raise NotCertain(
            f"{source.where(call)}: set {name}={text}, unless what is unpacked there has it"
        )
    return _added(source, call, f"{name}={text}")


def _added(source: Source, call: ast.Call, text: str) -> list[Edit]:
    start, end = source.span(call)
    (before, at), (_, closing) = _last_tokens(source.text[start:end])
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_open = "\n" in source.text[start + at : start + closing].replace("\r", "\n")
    if not given or not is_open or (before != "," and _is_room(source, start + at, text)):
        separator = "" if before == "(" else (" " if before == "," else ", ")
        return [Edit(start + at, start + at, separator + text)]
    row = source.line_start(source.span(_first_line(given, call))[0])
    line = source.text[row:]
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    below = source.next_line(start + at)  # a comment stays with the argument that it is about
    new = Edit(below, below, f"{indent}{text},{source.newline}")
    return [new] if before == "," else [Edit(start + at, start + at, ","), new]


def _is_room(source: Source, at: int, text: str) -> bool:
    """Is the line at a place short enough for one more argument?"""
    line = source.text[source.line_start(at) : source.next_line(at)].rstrip()
    return len(line) + len(text) + 2 <= _WIDTH


def _first_line(given: Sequence[ast.expr], call: ast.Call) -> ast.expr:
    """An argument that begins a line of its own, else the last."""
    below = [argument for argument in given if argument.lineno > call.lineno]
    return below[0] if below else given[-1]


def _last_tokens(text: str) -> tuple[tuple[str, int], tuple[str, int]]:
    """The last two tokens of a call, each with where the first ends and the second begins."""
    starts = [row.start() for row in LINE.finditer(text)]
    found: list[tokenize.TokenInfo] = []
    try:
        found += tokenize.generate_tokens(io.StringIO(text, newline="").readline)
    except (tokenize.TokenError, IndentationError):
        raise NotCertain("a call is laid out in a way that cannot be added to") from None
    told = [token for token in found if token.type not in _SILENT]
    before, closing = told[-2], told[-1]
    at = starts[before.end[0] - 1] + before.end[1]
    return (before.string, at), (closing.string, starts[closing.start[0] - 1] + closing.start[1])


def before(source: Source, statement: ast.stmt, lines: Sequence[str]) -> Edit:
    """Lines above a statement, indented as it is."""
    indent = source.indent_of(statement)
    at = source.line_start(source.span(statement)[0])
    at += len("\ufeff") if at == 0 and source.text.startswith("\ufeff") else 0
    return Edit(at, at, "".join(indent + line + source.newline for line in lines))


def after(source: Source, statement: ast.stmt, lines: Sequence[str]) -> Edit:
    """Lines below a statement, indented as it is."""
    indent = source.indent_of(statement)
    at = source.next_line(source.span(statement)[1])
    is_last = not source.text[:at].endswith(("\n", "\r"))
    text = "".join(indent + line + source.newline for line in lines)
    return Edit(at, at, source.newline + text if is_last else text)


def without(source: Source, statement: ast.stmt) -> Edit:
    """A statement's lines taken out. Its block must have another."""
    source.indent_of(statement)
    start, end = source.span(statement)
    return Edit(source.line_start(start), source.next_line(end), "")


def within(
    source: Source,
    statements: Sequence[ast.stmt],
    header: str,
    unit: str,
    *,
    leave: ast.stmt | None = None,
) -> Iterator[Edit]:
    """Statements that follow each other, put into a block under a header."""
    yield before(source, statements[0], [header])
    for statement in statements:
        source.indent_of(statement)
    first = source.line_of(source.span(statements[0])[0])
    last = source.line_of(source.span(statements[-1])[1])
    left = set(range(*_lines_of(source, leave))) if leave is not None else set()
    inside_text = _inside_strings(statements) | left
    for line in range(first, last + 1):
        at = source.line_starts[line - 1]
        if line not in inside_text and source.text[at : source.next_line(at)].strip():
            yield Edit(at, at, unit)


def _lines_of(source: Source, statement: ast.stmt) -> tuple[int, int]:
    start, end = source.span(statement)
    return source.line_of(start), source.line_of(end) + 1


def _inside_strings(statements: Sequence[ast.stmt]) -> set[int]:
    """Lines that begin inside of a string, whose white space is its own."""
    lines: set[int] = set()
    for statement in statements:
        for node in ast.walk(statement):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
            if is_text or isinstance(node, ast.JoinedStr):
                lines |= set(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return lines


def unit_of(source: Source, block: ast.stmt) -> str:
    """By how much a block's statements are further in than its header."""
    outer, inner = source.indent_of(block), ""
    body = getattr(block, "body", [])
    if body and body[0].lineno > block.lineno:
        inner = source.indent_of(body[0])
    return inner[len(outer) :] if inner.startswith(outer) and inner != outer else "    "


def a_name(source: Source, wanted: str) -> str:
    """A name that the file does not have yet."""
    number = 1
    while (name := wanted if number == 1 else f"{wanted}_{number}") in source.names:
        number += 1
    return name
