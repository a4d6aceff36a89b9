"""Requests -> answers over pipes, and the last of what the other side printed.

The one who asks reads everything that comes while he waits, so that neither side ever stands
still before a full pipe. It needs no thread: a process with threads is a bad one to fork.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from oomph.running.failures import OutOfTime, SpokeNonsense
from oomph.running.frames import LENGTH
from oomph.units import GIB, KIB, MIB

KEPT_OUTPUT_BYTES = 64 * KIB
LARGEST_ANSWER_BYTES = GIB
_PIECE_BYTES = MIB


class Conversation:
    """Our ends of three pipes: requests to write, answers and output to read."""

    def __init__(self, *, requests: int, answers: int, output: int) -> None:
        self._requests = requests
        self._answers = answers
        self._output = output
        self._unread = bytearray()
        self._printed = bytearray()
        self.num_printed = 0  # bytes so far, of which the last are kept
        self._open = {requests, answers, output}
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def say(self, word: bytes) -> None:
        """Say something short, to which no answer is awaited now."""
        self._send(LENGTH.pack(len(word)) + word)

    def hear(
        self,
        saying: bytes | None = None,
        *,
        within_s: float | None = None,
        on_output: Callable[[bytes], None] = lambda _: None,
    ) -> bytes | None:
        """Say something and wait for the next frame; None if the other side ended first.

        `on_output` is told what the other side prints meanwhile.
        """
        unsent = b"" if saying is None else LENGTH.pack(len(saying)) + saying
        until_s = None if within_s is None else time.monotonic() + within_s
        while (frame := self._take_frame()) is None:
            ready = self._wait(bool(unsent), until_s)
            if not ready:
                raise OutOfTime(f"no answer within {within_s:g} s; everything inside was killed")
            if self._requests in ready:
                unsent = self._send(unsent)
            if self._output in ready:
                on_output(self._read_output())
            if self._answers in ready and not self._read_answers():
                return None
        return frame

    def _wait(self, is_sending: bool, until_s: float | None) -> set[int]:
        poll = select.poll()
        for descriptor in self._open & {self._answers, self._output}:
            poll.register(descriptor, select.POLLIN)
        if is_sending and self._requests in self._open:
            poll.register(self._requests, select.POLLOUT)
        left_ms = None if until_s is None else max(0.0, until_s - time.monotonic()) * 1000
        return {descriptor for descriptor, _ in poll.poll(left_ms)}

    def _send(self, unsent: bytes) -> bytes:
        try:
            return unsent[os.write(self._requests, unsent[:_PIECE_BYTES]) :]
        except BrokenPipeError:  # nobody reads any more; the end of the answers will say so
            return b""

    def _read_answers(self) -> bool:
        """Whether there may be more."""
        piece = os.read(self._answers, _PIECE_BYTES)
        self._unread += piece
        return bool(piece)

    def _take_frame(self) -> bytes | None:
        if len(self._unread) < LENGTH.size:
            return None
        (num_bytes,) = LENGTH.unpack(self._unread[: LENGTH.size])
        if num_bytes > LARGEST_ANSWER_BYTES:
            raise SpokeNonsense(
                "the answer from inside is none",
                because=f"it announces {num_bytes} bytes, and {LARGEST_ANSWER_BYTES} are the most",
            )
        end = LENGTH.size + num_bytes
        if len(self._unread) < end:
            return None
        frame = bytes(self._unread[LENGTH.size : end])
        del self._unread[:end]
        return frame

    def _read_output(self) -> bytes:
        """What there is to read: nothing, if nothing."""
        try:
            piece = os.read(self._output, _PIECE_BYTES)
        except BlockingIOError:
            return b""
        if not piece:
            self._shut(self._output)
        self._printed += piece
        self.num_printed += len(piece)
        del self._printed[:-KEPT_OUTPUT_BYTES]
        return piece

    def output(self, since: int = 0) -> str:
        """The last of what was printed inside, after so many bytes."""
        while self._output in self._open and self._read_output():
            pass
        num_new = min(self.num_printed - since, len(self._printed))
        return self._printed[len(self._printed) - num_new :].decode(errors="replace")

    def _shut(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        """Keep what was printed, and let go of the pipes."""
        self.output()
        for descriptor in tuple(self._open):
            self._shut(descriptor)
