"""The live view: looks at the machine, drawn again and again until a key or a signal ends it."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.records.live import Look
    from oomph.records.machine import Machine
    from oomph.sensing.background import Background
    from oomph.showing.cells import Glyphs, Line
    from oomph.showing.live_view import Filter, View
    from oomph.showing.screen import Screen

# An answer that takes longer than this is told. Reading a busy machine takes milliseconds.
_SILENCE_S = 2.0
_FIRST_ANSWER_S = 1.0  # how long the screen waits for something to show


def looking(*, emulate: str | None = None) -> Callable[[], Look]:
    """A function that looks at everything; it remembers what does not change between looks."""
    from oomph.records.live import Look
    from oomph.sensing import nvml
    from oomph.sensing.jobs import Jobs
    from oomph.verbs.readings import gpus

    jobs, visible = Jobs(), _Visible()

    def look() -> Look:
        machine = gpus(emulate=emulate)
        if not machine.is_readable:
            nvml.forget()  # a driver that is loaded again is a new one
        processes = [p for gpu in machine.gpus for p in gpu.processes or ()]
        return Look(
            at=time.time(),
            machine=machine,
            jobs=() if machine.emulated else jobs.of(processes),
            visible=visible.of(machine),
        )

    return look


class _Visible:
    """What CUDA_VISIBLE_DEVICES shows; asked again when a GPU comes that was not there."""

    def __init__(self) -> None:
        self._uuids: set[str] = set()
        self._shown: tuple[str, ...] | None = None

    def of(self, machine: Machine) -> tuple[str, ...] | None:
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            return None
        uuids = {gpu.uuid for gpu in machine.gpus if gpu.uuid}
        if self._shown is None or not uuids <= self._uuids:
            from oomph.sensing.mapping import only_visible

            shown = only_visible(machine).gpus
            self._shown = tuple(device.uuid for device in shown if device.uuid)
            self._uuids = uuids
        return self._shown


def look_once(
    *,
    filter: Filter,  # noqa: A002 - as the view and the command line call it
    glyphs: Glyphs,
    width: int,
    emulate: str | None = None,
) -> tuple[Look, list[Line]]:
    """One look, and its lines."""
    from oomph.showing.live import Frame, draw_once
    from oomph.showing.live_history import Histories
    from oomph.showing.live_view import View

    look = looking(emulate=emulate)()
    view = View(filter=filter)
    frame = Frame(look=look, histories=Histories(), view=view, interval_s=1.0, glyphs=glyphs)
    return look, draw_once(frame, width)


def watch_live(
    *,
    interval_s: float,
    filter: Filter,  # noqa: A002 - as the view and the command line call it
    colours: bool,
    glyphs: Glyphs,
    emulate: str | None = None,
) -> Machine | None:
    """Show the live view until somebody ends it.

    Returns the machine if it cannot be read from the start, for there is nothing to show then.
    """
    from oomph.sensing.background import Background
    from oomph.showing.live_view import View
    from oomph.showing.screen import Ended, Screen

    screen = Screen()
    background = Background(looking(emulate=emulate), interval_s, screen.wake)
    background.start()
    try:
        first = _first_answer(background)
        if first is not None and not first.machine.gpus:
            return first.machine
        with screen.taken():
            live = _Live(screen, background, interval_s, colours, glyphs, View(filter=filter))
            live.run()
    except Ended as ended:
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)  # the terminal is back: end as the signal wants it
    finally:
        background.stop()
    return None


def _first_answer(background: Background[Look]) -> Look | None:
    until_s = time.monotonic() + _FIRST_ANSWER_S
    while background.newest is None and background.error is None and time.monotonic() < until_s:
        time.sleep(0.005)
    if background.error is not None:
        raise background.error
    return background.newest.value if background.newest else None


class _Live:
    """The loop: draw, wait for a key or a look, draw again."""

    def __init__(
        self,
        screen: Screen,
        background: Background[Look],
        interval_s: float,
        colours: bool,
        glyphs: Glyphs,
        view: View,
    ) -> None:
        from oomph.showing.live import Frame
        from oomph.showing.live_history import Histories

        self._screen = screen
        self._background = background
        self._interval_s = interval_s
        self._colours = colours
        self._histories = Histories()
        self._number = -1  # of the look that the histories have last
        self._page = 1
        self._frame = Frame(
            look=None,
            histories=self._histories,
            view=view,
            interval_s=interval_s,
            glyphs=glyphs,
            hears_keys=screen.hears_keys,
        )

    def run(self) -> None:
        is_wanted = True
        while is_wanted:
            self._take_newest()
            self._draw()
            keys = self._screen.wait(max(self._interval_s, 1.0))
            is_wanted = keys is not None and self._press(keys)

    def _take_newest(self) -> None:
        if self._background.error is not None:
            raise self._background.error
        answer = self._background.newest
        if answer is not None and answer.number != self._number:
            num_missed = answer.number - self._number - 1
            self._histories.add(answer.value.machine, num_missed=num_missed)
            self._number = answer.number
            if not self._frame.view.is_paused:
                self._frame = replace(self._frame, look=answer.value)
        waiting_s = self._background.waiting_s()
        silent_s = waiting_s if waiting_s > _SILENCE_S else 0.0
        self._frame = replace(self._frame, silent_s=silent_s)

    def _draw(self) -> None:
        from oomph.showing.cells import ansi
        from oomph.showing.live import draw

        drawn = draw(self._frame, *self._screen.size())
        self._page = drawn.page
        self._frame = replace(self._frame, view=replace(self._frame.view, scroll=drawn.scroll))
        self._screen.show([ansi(line, colours=self._colours) for line in drawn.lines])

    def _press(self, raw: bytes) -> bool:
        """Follow the keys; False to quit."""
        from oomph.showing.live_view import keys_in, pressed

        for key in keys_in(raw):
            view = pressed(self._frame.view, key, self._page)
            if view is None:
                return False
            if view.is_paused != self._frame.view.is_paused:
                self._pause(view.is_paused)
            self._frame = replace(self._frame, view=view)
        return True

    def _pause(self, is_paused: bool) -> None:
        """A picture that is paused keeps its histories too, while new looks are gathered."""
        histories = copy.deepcopy(self._histories) if is_paused else self._histories
        look = self._frame.look
        if not is_paused and self._background.newest:
            look = self._background.newest.value
        self._frame = replace(self._frame, look=look, histories=histories)
