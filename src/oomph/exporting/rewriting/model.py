"""A trick's lines, a script -> the edits that run them on the script's model, once.

The functions go below the imports of the file that makes the model, the call of them below the
line that makes it, or above the line that makes its optimizer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from oomph.exporting.rewriting.draft import Draft
from oomph.exporting.rewriting.source import (
    Code,
    Edit,
    NotCertain,
    Source,
    last_name,
    owner_of,
)
from oomph.records.script import Seen
from oomph.tricks.definition import Fragment

# Methods of a module that return the module itself.
_OF_THE_SAME = frozenset(
    {"to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "float", "double", "requires_grad_"}
)
_OF_PARAMETERS = frozenset({"parameters", "named_parameters"})
_DEFINED = re.compile(r"^(?:def |class )?(\w+)(?:\(| = )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Model:
    """Where the script has its model: lines go above or below a statement."""

    source: Source
    name: str  # as an expression: `model`, `self.net`
    statement: ast.stmt
    is_above: bool

    def edit(self, lines: Sequence[str]) -> Edit:
        put = self.source.before if self.is_above else self.source.after
        return put(self.statement, lines)


def with_lines_on_model(draft: Draft, seen: Seen, fragment: Fragment) -> Draft:
    """Insert a fragment's imports and functions, and its lines for the model. Raises NotCertain."""
    model = model_of(draft.code, seen)
    source = model.source
    if "DataParallel" in source.names:
        raise NotCertain(
            f"{source.path} copies the model to several GPUs, whose blocks would share"
        )
    if fragment.binds_model and any("deepcopy" in one.names for one in draft.code.files.values()):
        raise NotCertain("the script copies a model, and a copy would compute with these weights")
    lines = [re.sub(r"\bmodel\b", model.name, line) for line in fragment.on_model]
    text = "\n".join(
        [*fragment.constants, *(one.strip("\n") + "\n\n" for one in fragment.functions)]
    )
    for name in dict.fromkeys(_DEFINED.findall(text)):
        other = source.unused_name(name)
        if other != name:
            text = re.sub(rf"\b{name}\b", other, text)
            lines = [re.sub(rf"\b{name}\b", other, line) for line in lines]
    imports = [line for line in fragment.imports if not _has_line(source, line)]
    if text and not _has_line(source, "import torch") and not _is_in(imports, "torch"):
        imports.append("import torch")
    return with_imports(draft, source, imports, text).plus(model.edit(lines)).applied()


def with_imports(draft: Draft, source: Source, imports: Sequence[str], text: str = "") -> Draft:
    """Insert imports, and code that needs them, below the imports of a file."""
    added = list(imports)
    if text:
        added += ["", "", *re.sub(r"\n{3,}", "\n\n\n", text).strip("\n").split("\n")]
    if not added:
        return draft
    last = _last_import(source)
    rest = source.text[source.next_line(source.span(last)[1]) :]
    if text and rest.strip():  # two blank lines below a function
        found = re.match(r"(?:[ \t]*(?:\r\n|\r|\n))*", rest)
        added += [""] * max(0, 2 - len((found.group() if found else "").splitlines()))
    return draft.plus(source.after(last, added))


def _has_line(source: Source, line: str) -> bool:
    own = {source.code(one) for one in source.tree.body if isinstance(one, ast.Import)}
    return line in own


def _is_in(imports: Sequence[str], package: str) -> bool:
    return any(line.split()[1].partition(".")[0] == package for line in imports)


def _last_import(source: Source) -> ast.stmt:
    """Return the last import before the file's first function, class or loop."""
    found: ast.stmt | None = None
    for statement in source.tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            found = statement
        elif not isinstance(statement, (ast.Expr, ast.Assign, ast.Try, ast.If)):
            break
    if found is None:
        raise NotCertain(f"{source.path} has no imports below which the new functions could stand")
    return found


# ---- the model -----------------------------------------------------------------------------------


def model_of(code: Code, seen: Seen) -> Model:
    """Return where the model that the rehearsal saw is made. Raises NotCertain."""
    made = [one for one in _assigned(code) if one[2] == seen.model]
    if len(made) == 1:
        source, statement, _ = made[0]
        return Model(source, source.code(statement.targets[0]), statement, is_above=False)
    return _of_optimizer(code)


def _assigned(code: Code) -> list[tuple[Source, ast.Assign, str]]:
    """Return every `name = Class(...)`, also with `.to(device)` behind it, with the class."""
    found = []
    for source, node in code.nodes():
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        if not isinstance(node.targets[0], (ast.Name, ast.Attribute)):
            continue
        made = node.value
        while isinstance(made, ast.Call) and last_name(made.func) in _OF_THE_SAME:
            made = owner_of(made) or made.func
        if isinstance(made, ast.Call):
            found.append((source, node, last_name(made.func)))
    return found


def _of_optimizer(code: Code) -> Model:
    """Return the model by the parameters that its optimizer is given."""
    path, line = code.marks.get("optimizer", ("", 0))
    source = code.files.get(path)
    statements = [
        node
        for node in (source.nodes if source else ())
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr))
        and node.lineno <= line <= (node.end_lineno or line)
    ]
    if source is None or len(statements) != 1:
        raise NotCertain("the line that makes the model is not certain")
    statement = statements[0]
    owners = _owners_of_parameters(source, statement) or _owners_of_parameters(
        source, source.scope_of(statement)
    )
    if len(owners) != 1:
        raise NotCertain(f"{source.where(statement)}: whose parameters it is given is not certain")
    return Model(source, owners.pop(), statement, is_above=True)


def _owners_of_parameters(source: Source, where: ast.AST) -> set[str]:
    return {
        source.code(owner)
        for call in ast.walk(where)
        if isinstance(call, ast.Call) and last_name(call.func) in _OF_PARAMETERS
        if (owner := owner_of(call)) is not None and isinstance(owner, (ast.Name, ast.Attribute))
    }
