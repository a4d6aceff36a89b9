"""Run the live view: redraw looks at the machine until a key or a signal ends it."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from oomph.records.machine import Look, Machine
from oomph.sensing.devices import emulated_machine, read_machine
from oomph.sensing.live import LiveLooks, Seeing
from oomph.showing.live import Frame, draw
from oomph.showing.live_view import Filter, Histories, View, keys_in, pressed
from oomph.showing.screen import Ended, Screen
from oomph.showing.terminal import Glyphs, ansi

_SILENCE_S = 2.0  # report a missing first answer after this: reading a machine takes milliseconds
_FIRST_ANSWER_S = 1.0  # how long the screen waits for something to show
_LATE_S = 1.5  # spans are a second long; after this long without one, the view goes on
_AGAIN_S = 0.1  # before checking again for a new span


class _EmulatedLooks:
    """Looks at an emulated machine."""

    def __init__(self, description: str) -> None:
        self._description = description
        self.first: Look | None = None

    def start(self) -> None:
        self.first = look_once(emulate=self._description)

    def stop(self) -> None:
        pass

    def take(self, *, even_without_spans: bool) -> Look | None:  # noqa: ARG002 - same signature as LiveLooks
        return look_once(emulate=self._description)


Looks = LiveLooks | _EmulatedLooks


def _looks(emulate: str | None, on_first: Callable[[], None]) -> Looks:
    return LiveLooks(on_first) if emulate is None else _EmulatedLooks(emulate)


def look_once(*, emulate: str | None = None) -> Look:
    """Return a single look at everything."""
    machine = read_machine() if emulate is None else emulated_machine(emulate, time.time())
    return Seeing().look(machine)


def looks(interval_s: float, *, emulate: str | None = None) -> Iterator[Look]:
    """Yield looks for as long as the caller iterates."""
    source = _looks(emulate, lambda: None)
    source.start()
    try:
        while source.first is None:
            source.take(even_without_spans=False)  # raises the thread's error, if any
            time.sleep(_AGAIN_S)
        yield source.first
        while source.first.machine.gpus:
            time.sleep(interval_s)
            yield _next_look(source)
    finally:
        source.stop()


def _next_look(source: Looks) -> Look:
    late_s = time.monotonic() + _LATE_S
    while True:
        look = source.take(even_without_spans=time.monotonic() > late_s)
        if look is not None:
            return look
        time.sleep(_AGAIN_S)


def watch_live(
    *,
    interval_s: float,
    filter: Filter,  # noqa: A002 - as in the view and on the command line
    colours: bool,
    glyphs: Glyphs,
    emulate: str | None = None,
) -> Machine | None:
    """Show the live view until the user ends it. Call it from the main thread.

    Return the machine if it has no GPU from the start, since there is nothing to show then.
    """
    screen = Screen()
    source = _looks(emulate, screen.wake)
    source.start()
    try:
        first = _first_look(source)
        if first is not None and not first.machine.gpus:
            return first.machine
        _collect_seldom()
        with screen.taken():
            _Live(screen, source, interval_s, colours, glyphs, View(filter=filter)).run()
    except Ended as ended:
        signal.signal(ended.number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.number})
        os.kill(os.getpid(), ended.number)  # the terminal is restored: end by the signal
    finally:
        source.stop()
    return None


_MANY_OBJECTS = 50_000  # judgement: some seconds of frames, and a few megabytes


def _collect_seldom() -> None:
    """Look for garbage seldom: frames leave no cycles behind, and what was imported stays."""
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS)


def _first_look(source: Looks) -> Look | None:
    """Wait for the first look; None if the driver is slow, which the screen will say."""
    until_s = time.monotonic() + _FIRST_ANSWER_S
    while source.first is None and time.monotonic() < until_s:
        time.sleep(0.005)
    return source.first


class _Live:
    """The loop: draw, wait for a key or a look, draw again."""

    def __init__(
        self,
        screen: Screen,
        source: Looks,
        interval_s: float,
        colours: bool,
        glyphs: Glyphs,
        view: View,
    ) -> None:
        self._screen = screen
        self._source = source
        self._interval_s = interval_s
        self._colours = colours
        self._histories = Histories()
        self._newest: Look | None = None
        self._began_s = time.monotonic()
        self._due_s = 0.0  # when the next look is due
        self._page = 1
        self._drawn: Frame | None = None  # what the screen shows, and in which size
        self._drawn_size = (0, 0)
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
            wait_s = self._take()
            self._draw()
            is_wanted = self._press(self._screen.wait(wait_s))

    def _take(self) -> float:
        """Take the next look if it is due; return when to check again."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return self._due_s - now_s
        is_late = now_s > self._due_s + _LATE_S
        look = self._source.take(even_without_spans=is_late)
        if self._newest is None:  # the first look has no spans
            look = self._source.first
        if look is None:
            silent_s = now_s - self._began_s
            if self._newest is None and silent_s > _SILENCE_S:
                self._frame = replace(self._frame, silent_s=silent_s)
            return _AGAIN_S
        self._newest = look
        self._histories.add(look)
        self._due_s = now_s + self._interval_s
        if not self._frame.view.is_paused:
            self._frame = replace(self._frame, look=look, silent_s=0.0)
        return self._interval_s

    def _draw(self) -> None:
        """Draw, unless it would be the same: while a look is late, we come here ten times."""
        size = self._screen.size()
        is_same = self._drawn is self._frame and self._drawn_size == size
        if is_same and not self._screen.is_blank:
            return
        drawn = draw(self._frame, *size)
        self._page = drawn.page
        view = self._frame.view
        if view.scroll != drawn.scroll:
            self._frame = replace(self._frame, view=replace(view, scroll=drawn.scroll))
        self._drawn, self._drawn_size = self._frame, size
        self._screen.show([ansi(line, colours=self._colours) for line in drawn.lines])

    def _press(self, raw: bytes) -> bool:
        """Handle the keys; return False to quit."""
        for key in keys_in(raw):
            view = pressed(self._frame.view, key, self._page)
            if view is None:
                return False
            if view.is_paused != self._frame.view.is_paused:
                self._pause(view.is_paused)
            self._frame = replace(self._frame, view=view)
        return True

    def _pause(self, is_paused: bool) -> None:
        """Pause or resume. A paused picture keeps its histories, while new looks are gathered."""
        histories = copy.deepcopy(self._histories) if is_paused else self._histories
        look = self._frame.look if is_paused else self._newest
        self._frame = replace(self._frame, look=look, histories=histories)
