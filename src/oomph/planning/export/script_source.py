"""A user's source text -> its tree with places, and edits that leave all other text as it was.

The text is read, never executed. Positions are those of characters, since a tree's are of bytes.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")  # as Python counts lines: a form feed ends none
_MARK = "\ufeff"  # of the order of bytes, which some editors put first


class NotCertain(Exception):
    """No edit is certain to be right: what to do by hand instead, as a sentence."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One piece of the text to replace; an insertion where start == end."""

    start: int
    end: int
    text: str


class Source:
    """One file of the user's. Raises SyntaxError or ValueError for what is no Python."""

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
        """Where each name is set."""
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
        """Every name in it, of whatever kind."""
        return set(re.findall(r"\w+", self.text))

    def offset(self, line: int, column: int) -> int:
        """Of a line from 1 and a column in bytes of UTF-8, as trees have them."""
        start = self.line_starts[line - 1] + (self._skipped if line == 1 else 0)
        text = self.text[start : self._after(line)]
        return start + len(text.encode()[:column].decode(errors="replace"))

    def _after(self, line: int) -> int:
        return self.line_starts[line] if line < len(self.line_starts) else len(self.text)

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Where it stands. A decorated function begins with its decorators."""
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
        """Where the line after the one at an offset begins; the end of the text after the last."""
        return self._after(self.line_of(offset))

    def indent_of(self, node: ast.stmt) -> str:
        """The white space before a statement. Raises NotCertain if it shares its lines."""
        start, end = self.span(node)
        before = self.text[self.line_start(start) : start].removeprefix(_MARK)
        after = self.text[end : self.next_line(end)].strip()
        if before.strip() or (after and not after.startswith("#")):
            raise NotCertain(f"{self.where(node)} shares its line with another statement")
        return before

    def where(self, node: ast.expr | ast.stmt) -> str:
        """`train.py:31: loss.backward()`."""
        code = self.code(node)
        if getattr(node, "body", None):
            code = code.splitlines()[0]
        code = " ".join(code.split())
        return f"{self.path}:{node.lineno}: `{code if len(code) <= 72 else code[:69] + '...'}`"

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node is in, from within."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that a node belongs to."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The function that a node is in, or the module."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
        return next(outer for outer in self.above(node) if isinstance(outer, kinds))

    def block_of(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements that a statement stands among."""
        for _, value in ast.iter_fields(self.parents[node]):
            if isinstance(value, list) and node in value:
                return value
        raise NotCertain(f"{self.where(node)} stands in no block")

    def edited(self, edits: Sequence[Edit]) -> tuple[Source, dict[int, int]]:
        """The text with the edits, and where each line went. Edits may touch, not overlap."""
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


def _growth(edit: Edit) -> int:
    return len(edit.text) - (edit.end - edit.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The user's files, the script itself first, and where a rehearsal saw it do what."""

    files: Mapping[str, Source]
    marks: Mapping[str, tuple[str, int]]  # "backward" -> the file and its line

    @property
    def main(self) -> Source:
        return next(iter(self.files.values()))

    def edited(self, edits: Sequence[tuple[Source, Edit]]) -> Code:
        """Every file still parses. Raises NotCertain if it would not."""
        files, marks = dict(self.files), dict(self.marks)
        for source in {id(source): source for source, _ in edits}.values():
            its = [edit for of, edit in edits if of is source]
            try:
                files[source.path], moved = source.edited(its)
            except SyntaxError as error:
                raise NotCertain(f"{source.path} would no longer be Python: {error}") from None
            marks |= {
                what: (path, moved.get(line, line))
                for what, (path, line) in marks.items()
                if path == source.path
            }
        return Code(files=files, marks=marks)

    def nodes(self) -> Iterator[tuple[Source, ast.AST]]:
        for source in self.files.values():
            for node in source.nodes:
                yield source, node

    def calls(self) -> Iterator[tuple[Source, ast.Call]]:
        for source in self.files.values():
            for call in source.calls:
                yield source, call


def last_name(function: ast.expr | None) -> str:
    """`step` of `self.optimizer.step`; nothing of what has no name."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def owner_of(call: ast.Call) -> ast.expr | None:
    """`loss` of `loss.backward()`; None for a call of a bare name."""
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
