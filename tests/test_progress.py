"""Progress: a line that says what is done and for how long, also from a forked child."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
from collections.abc import Iterator

import pytest

from oomph import progress
from oomph.progress import Progress


class Screen:
    """A terminal that somebody looks at: what it shows so far, and waiting for more."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self._shown = ""

    def isatty(self) -> bool:
        return os.isatty(self.theirs)

    def fileno(self) -> int:
        return self.theirs

    def wait_for(self, pattern: str) -> str:
        """Read until it is there: the test fails by hanging, never by a slow machine."""
        while not (found := re.search(pattern, self._shown)):
            self._shown += os.read(self.ours, 4096).decode()
        self._shown = self._shown[found.end() :]
        return found[0]


@contextlib.contextmanager
def on(screen: Screen) -> Iterator[None]:
    """pytest has a standard error of its own for each phase of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", screen)
        yield


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    os.close(made.ours)
    os.close(made.theirs)


def test_a_terminal_sees_at_once_that_the_work_has_begun(screen: Screen) -> None:
    with on(screen), Progress("starting torch"):
        screen.wait_for(r"0 s: starting torch")


def test_the_time_goes_on_although_nothing_is_said(screen: Screen) -> None:
    with on(screen), Progress("starting torch") as say:
        say("rehearsing 1 of 8: bf16")
        screen.wait_for(r"[1-9]\d* s: rehearsing 1 of 8: bf16")


def test_the_line_is_gone_before_the_answer_is_printed(screen: Screen) -> None:
    with on(screen), Progress("starting torch"):
        pass
    screen.wait_for(r"starting torch\r\x1b\[K$")


def test_a_forked_child_may_say_where_it_is(screen: Screen) -> None:
    with on(screen), Progress("starting torch") as say:
        child = os.fork()
        if child == 0:
            say("rehearsing 2 of 8\nwith a line end")
            progress.tell_detail("41,200 allocations")
            os._exit(0)
        os.waitpid(child, 0)
        screen.wait_for(r"s: rehearsing 2 of 8 with a line end \(41,200 allocations\)")


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(progress, "_TICK_S", 0.01)
    monkeypatch.setattr(progress, "_BEATS_S", (0.0, 0.02))
    with os.fdopen(writing, "w") as stderr, os.fdopen(reading) as log:
        monkeypatch.setattr("sys.stderr", stderr)
        with Progress("starting torch"):
            assert log.readline() == "oomph: 0 s: starting torch\n"
            assert re.fullmatch(r"oomph: \d+ s: starting torch\n", log.readline())


def test_a_quick_answer_leaves_a_log_empty(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("starting torch") as say:
        say("comparing")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_closed_or_odd_standard_error_is_no_trouble(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("starting torch") as say:
        say("comparing")
    assert not progress.is_shown()
