"""A user's source text -> its syntax tree, and edits that leave all other text unchanged.

The text is read, never executed. Positions count characters, whereas ast counts bytes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TypeGuard

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")  # as Python: a form feed does not end a line
_MARK = "\ufeff"  # byte order mark, which some editors write first


_WIDTH = 99  # a line that would get longer puts the new argument on its own line
_SILENT = {
    tokenize.NL,
    tokenize.COMMENT,
    tokenize.NEWLINE,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.DEDENT,
}


class NotCertain(Exception):
    """No edit is certain to be right. The message says what to do by hand instead."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of a file's text to replace; an insertion if start == end."""

    source: Source
    start: int
    end: int
    text: str


class Source:
    """One of the user's files. Raises SyntaxError or ValueError if it is not Python."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self._skipped = len(_MARK) if text.startswith(_MARK) else 0
        self.tree = ast.parse(text[self._skipped :])
        self.line_starts = [found.start() for found in LINE.finditer(text)]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def stores(self) -> dict[str, list[ast.Name]]:
        """Return where each name is set."""
        found: dict[str, list[ast.Name]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found.setdefault(node.id, []).append(node)
        return found

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        return [node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom))]

    @cached_property
    def newline(self) -> str:
        found = re.search(r"\r\n|\r|\n", self.text)
        return found.group() if found else "\n"

    @cached_property
    def names(self) -> set[str]:
        """Return every name in the file, of any kind."""
        return set(re.findall(r"\w+", self.text))

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a line (from 1) and a column in UTF-8 bytes, as ast gives them."""
        start = self.line_starts[line - 1] + (self._skipped if line == 1 else 0)
        text = self.text[start : self._after(line)]
        return start + len(text.encode()[:column].decode(errors="replace"))

    def _after(self, line: int) -> int:
        return self.line_starts[line] if line < len(self.line_starts) else len(self.text)

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return where a node starts and ends. A decorated function starts with its decorators."""
        line, column = node.lineno, node.col_offset
        for decorator in getattr(node, "decorator_list", []):
            line, column = min((line, column), (decorator.lineno, node.col_offset))
        end = self.offset(node.end_lineno or line, node.end_col_offset or column)
        return self.offset(line, column), end

    def code(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line_of(self, offset: int) -> int:
        return bisect_right(self.line_starts, offset)

    def line_start(self, offset: int) -> int:
        return self.line_starts[self.line_of(offset) - 1]

    def next_line(self, offset: int) -> int:
        """Return where the line after an offset's line starts, or the end of the text."""
        return self._after(self.line_of(offset))

    def indent_of(self, node: ast.stmt) -> str:
        """Return the white space before a statement. Raises NotCertain if it shares its lines."""
        start, end = self.span(node)
        before = self.text[self.line_start(start) : start].removeprefix(_MARK)
        after = self.text[end : self.next_line(end)].strip()
        if before.strip() or (after and not after.startswith("#")):
            raise NotCertain(f"{self.where(node)} shares its line with another statement")
        return before

    def where(self, node: ast.expr | ast.stmt) -> str:
        """Describe a node's location: `train.py:31: loss.backward()`."""
        code = self.code(node)
        if getattr(node, "body", None):
            code = code.splitlines()[0]
        code = " ".join(code.split())
        return f"{self.path}:{node.lineno}: `{code if len(code) <= 72 else code[:69] + '...'}`"

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def expressions_above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node within its statement, innermost first."""
        return takewhile(lambda outer: not isinstance(outer, ast.stmt), self.above(node))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def scope_of(self, node: ast.AST) -> ast.AST:
        """Return the function that contains a node, or the module."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
        return next(outer for outer in self.above(node) if isinstance(outer, kinds))

    def block_of(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains a statement."""
        for _, value in ast.iter_fields(self.parents[node]):
            if isinstance(value, list) and node in value:
                return value
        raise NotCertain(f"{self.where(node)} stands in no block")

    def edited(self, edits: Sequence[Edit]) -> tuple[Source, dict[int, int]]:
        """Return the edited text and where each line went. Edits may touch but not overlap."""
        ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
        text, at = [], 0
        for edit in ordered:
            if edit.start < at:
                raise NotCertain(f"{self.path} would have to be changed twice at one place")
            text += [self.text[at : edit.start], edit.text]
            at = edit.end
        after = Source(self.path, "".join([*text, self.text[at:]]))
        moved = {
            line: after.line_of(start + sum(_growth(e) for e in ordered if e.end <= start))
            for line, start in enumerate(self.line_starts, 1)
        }
        return after, moved

    # ---- new text at a location -> the edits, in the user's layout

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(self, *self.span(node), text)

    def before(self, statement: ast.stmt, lines: Sequence[str]) -> Edit:
        """Insert lines above a statement, with its indentation."""
        indent = self.indent_of(statement)
        at = self.line_start(self.span(statement)[0]) or self._skipped
        return Edit(self, at, at, self._text_of(lines, indent))

    def after(self, statement: ast.stmt, lines: Sequence[str]) -> Edit:
        """Insert lines below a statement, with its indentation."""
        indent = self.indent_of(statement)
        at = self.next_line(self.span(statement)[1])
        is_last = not self.text[:at].endswith(("\n", "\r"))
        return Edit(self, at, at, self.newline * is_last + self._text_of(lines, indent))

    def _text_of(self, lines: Sequence[str], indent: str) -> str:
        return "".join(indent + line + self.newline for line in lines)

    def without(self, statement: ast.stmt) -> Edit:
        """Remove a statement's lines. Its block must contain another statement."""
        self.indent_of(statement)
        start, end = self.span(statement)
        return Edit(self, self.line_start(start), self.next_line(end), "")

    def within(
        self, statements: Sequence[ast.stmt], header: str, *, leave: ast.stmt | None = None
    ) -> Iterator[Edit]:
        """Move consecutive statements into a block under a header; `leave` one where it is."""
        yield self.before(statements[0], [header])
        for statement in statements:
            self.indent_of(statement)
        outer = self.parents[statements[0]]
        unit = self.unit_of(outer) if isinstance(outer, ast.stmt) else "    "
        unmoved = _inside_strings(statements)
        unmoved |= set(self._lines_of(leave, leave)) if leave is not None else set()
        for line in self._lines_of(statements[0], statements[-1]):
            at = self.line_starts[line - 1]
            if line not in unmoved and self.text[at : self.next_line(at)].strip():
                yield Edit(self, at, at, unit)

    def _lines_of(self, first: ast.stmt, last: ast.stmt) -> range:
        return range(self.line_of(self.span(first)[0]), self.line_of(self.span(last)[1]) + 1)

    def unit_of(self, block: ast.stmt) -> str:
        """Return how much further a block's statements are indented than its header."""
        outer, inner = self.indent_of(block), ""
        body = getattr(block, "body", [])
        if body and body[0].lineno > block.lineno:
            inner = self.indent_of(body[0])
        return inner[len(outer) :] if inner.startswith(outer) and inner != outer else "    "

    def unused_name(self, wanted: str) -> str:
        """Return a name that the file does not use yet."""
        number = 1
        while (name := wanted if number == 1 else f"{wanted}_{number}") in self.names:
            number += 1
        return name

    def with_keyword(self, call: ast.Call, name: str, text: str) -> list[Edit]:
        """Replace a call's keyword, or add it last in the layout of the other arguments."""
        own = argument_of(call, name)
        if own is not None:
            return [self.replaced(own, text)]
        if any(keyword.arg is None for keyword in call.keywords):
            raise NotCertain(
                f"{self.where(call)}: set {name}={text}, unless what is unpacked there has it"
            )
        return self._with_argument(call, f"{name}={text}")

    def _with_argument(self, call: ast.Call, text: str) -> list[Edit]:
        start, end = self.span(call)
        (before, at), closing = _last_tokens(self.text[start:end])
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        is_open = "\n" in self.text[start + at : start + closing].replace("\r", "\n")
        at += start
        line = self.text[self.line_start(at) : self.next_line(at)].rstrip()
        has_room = len(line) + len(text) + len(", ") <= _WIDTH
        if not given or not is_open or (before != "," and has_room):
            separator = "" if before == "(" else (" " if before == "," else ", ")
            return [Edit(self, at, at, separator + text)]
        # Indent like an argument that starts its own line, else like the last.
        like = next((one for one in given if one.lineno > call.lineno), given[-1])
        row = self.text[self.line_start(self.span(like)[0]) :]
        indent = row[: len(row) - len(row.lstrip(" \t"))]
        below = self.next_line(at)  # a comment stays with the argument it describes
        new = Edit(self, below, below, f"{indent}{text},{self.newline}")
        return [new] if before == "," else [Edit(self, at, at, ","), new]


def _growth(edit: Edit) -> int:
    return len(edit.text) - (edit.end - edit.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The user's files, the script first, and where the rehearsal saw each event."""

    files: Mapping[str, Source]
    marks: Mapping[str, tuple[str, int]]  # "backward" -> the file and its line

    @property
    def main(self) -> Source:
        return next(iter(self.files.values()))

    def edited(self, edits: Sequence[Edit]) -> Code:
        """Apply the edits. Raises NotCertain if a file would no longer parse."""
        files, marks = dict(self.files), dict(self.marks)
        for source in dict.fromkeys(edit.source for edit in edits):
            try:
                files[source.path], moved = source.edited(
                    [edit for edit in edits if edit.source is source]
                )
            except SyntaxError as error:
                raise NotCertain(f"{source.path} would no longer be Python: {error}") from None
            marks |= {
                what: (path, moved.get(line, line))
                for what, (path, line) in marks.items()
                if path == source.path
            }
        return Code(files=files, marks=marks)

    def at_mark(
        self, what: str, calls: Iterable[tuple[Source, ast.Call]]
    ) -> list[tuple[Source, ast.Call]]:
        """Return the calls on the line where the rehearsal saw something; none if it did not."""
        path, line = self.marks.get(what, ("", 0))
        return [
            (source, call)
            for source, call in calls
            if source.path == path and call.lineno <= line <= (call.end_lineno or line)
        ]

    def nodes(self) -> Iterator[tuple[Source, ast.AST]]:
        for source in self.files.values():
            for node in source.nodes:
                yield source, node

    def calls(self, *names: str) -> Iterator[tuple[Source, ast.Call]]:
        """Yield all calls, or those of functions with these names."""
        for source in self.files.values():
            for call in source.calls:
                if not names or last_name(call.func) in names:
                    yield source, call


def last_name(function: ast.expr | None) -> str:
    """Return `step` for `self.optimizer.step`; empty for what has no name."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def owner_of(call: ast.Call) -> ast.expr | None:
    """Return `loss` for `loss.backward()`; None for a call of a bare name."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def is_call_of(node: ast.AST | None, *names: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and last_name(node.func) in names


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def names_in(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    return {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, context)
    }


def argument_of(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return what a call passes for a parameter, by name or position; None if not visible."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is None or any(isinstance(arg, ast.Starred) for arg in call.args[: position + 1]):
        return None
    return call.args[position] if position < len(call.args) else None


def _last_tokens(text: str) -> tuple[tuple[str, int], int]:
    """Return the last token of a call before its ")", where that token ends, and where ")" is."""
    starts = [row.start() for row in LINE.finditer(text)]
    try:
        found = list(tokenize.generate_tokens(io.StringIO(text, newline="").readline))
    except (tokenize.TokenError, IndentationError):
        raise NotCertain("a call is laid out in a way that cannot be added to") from None
    before, closing = [token for token in found if token.type not in _SILENT][-2:]
    end = starts[before.end[0] - 1] + before.end[1]
    return (before.string, end), starts[closing.start[0] - 1] + closing.start[1]


def _inside_strings(statements: Sequence[ast.stmt]) -> set[int]:
    """Return the lines that start inside a string, whose white space must not change."""
    lines: set[int] = set()
    for statement in statements:
        for node in ast.walk(statement):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
            if is_text or isinstance(node, ast.JoinedStr):
                lines |= set(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return lines
