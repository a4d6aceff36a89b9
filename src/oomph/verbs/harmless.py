"""Methods that a training calls, and that never raise into it."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from oomph.verbs.recording import say

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Self = TypeVar("Self", bound="Harmless")


class Harmless:
    """What works in one process, as long as it is on; what is forked off has none of it."""

    is_on = False

    def turn_on(self) -> None:
        self.is_on = True
        _turned_on.add(self)

    def give_up(self, error: Exception) -> None:
        """It was told of: the one warning."""
        self.is_on = False
        say(f"the training is no longer watched ({type(error).__name__}: {error})")


_turned_on: weakref.WeakSet[Harmless] = weakref.WeakSet()


def _turn_off() -> None:
    for one in list(_turned_on):
        one.is_on = False


os.register_at_fork(after_in_child=_turn_off)


def harmless(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result | None]:
    """A method that does nothing where it is off; an exception turns it off."""

    @functools.wraps(method)
    def guarded(
        self: Self, /, *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result | None:
        if not self.is_on:
            return None
        try:
            return method(self, *arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever is wrong here
            self.give_up(error)
            return None

    return guarded
