"""A script as it would be: the user's files with edits, and other arguments."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from oomph.planning.export import script_globals
from oomph.planning.export.script_arguments import value_of, with_value
from oomph.planning.export.script_edits import replaced
from oomph.planning.export.script_globals import Global
from oomph.planning.export.script_numbers import Number
from oomph.planning.export.script_options import Option, number_behind, options_of
from oomph.planning.export.script_source import Code, Edit, NotCertain, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Edits are gathered first, so that all places are those of one text, then made at once."""

    code: Code
    arguments: tuple[str, ...]
    edits: tuple[tuple[Source, Edit], ...] = ()

    def plus(self, source: Source, *edits: Edit) -> Draft:
        """One more edit each; what is replaced twice by the same is replaced once."""
        new = [(source, edit) for edit in edits]
        kept = [one for one in new if one[1].start == one[1].end or one not in self.edits]
        return replace(self, edits=(*self.edits, *kept))

    def made(self) -> Draft:
        return replace(self, code=self.code.edited(self.edits), edits=())

    def value_behind(self, source: Source, node: ast.expr) -> object:
        """What an expression is in this start of the script; None if that is not certain."""
        origin = number_behind(self.code, source, node)
        if isinstance(origin, Option):
            return value_of(origin, self.arguments, options_of(self.code))
        if isinstance(origin, Global):
            return script_globals.value_of(origin, self.arguments)
        return origin.value if origin is not None else None

    def with_number(self, source: Source, node: ast.expr, value: int) -> Draft:
        """Where the expression's value comes from, another one. Raises NotCertain."""
        origin = number_behind(self.code, source, node)
        if isinstance(origin, Global):
            arguments = script_globals.with_value(origin, value, self.arguments)
            if arguments is not None:
                return replace(self, arguments=arguments)
            origin = origin.number
        if isinstance(origin, Number):
            return self.plus(origin.source, replaced(origin.source, origin.node, str(value)))
        if isinstance(origin, Option):
            return self.with_option(origin, str(value))
        raise NotCertain(
            f"make {source.code(node)} at {source.path}:{node.lineno} be {value}: where it comes"
            " from is not certain"
        )

    def with_option(self, option: Option, value: str | None) -> Draft:
        """Another value of an option of the command line; None switches a flag on."""
        known = options_of(self.code)
        is_plain = option.action in ("store", "store_true") and (
            {"REMAINDER", "add_subparsers"}.isdisjoint(option.place[0].names)
        )
        if not is_plain:
            source, call = option.place
            raise NotCertain(f"set the option of {source.where(call)} to {value}")
        return replace(self, arguments=with_value(option, value, self.arguments, known))
