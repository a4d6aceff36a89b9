"""Requests -> answers over pipes, and the end of what the other side printed.

A frame is its length in eight bytes, most significant first, then the content. The side that asks
reads everything that arrives while it waits, so neither side ever blocks on a full pipe. It uses no
thread, because forking a process with threads is risky.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable
from typing import BinaryIO

from oomph.errors import OutOfTime, SpokeNonsense
from oomph.units import GIB, KIB, MIB

LENGTH = struct.Struct(">Q")
KEPT_OUTPUT_BYTES = 64 * KIB  # judgement: a long traceback and more
LARGEST_ANSWER_BYTES = GIB  # judgement: far more than the largest trace
_PIECE_BYTES = MIB


def write_frame(stream: BinaryIO, content: bytes) -> None:
    """Write one frame and flush it."""
    stream.write(LENGTH.pack(len(content)) + content)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame, or None if the stream ended before it was complete."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (num_bytes,) = LENGTH.unpack(head)
    content = stream.read(num_bytes)
    return content if len(content) == num_bytes else None


class Conversation:
    """Our ends of three pipes: requests to write, answers and output to read."""

    def __init__(self, *, requests: int, answers: int, output: int) -> None:
        self._requests = requests
        self._answers = answers
        self._output = output
        self._unread = bytearray()
        self._printed = bytearray()
        self.num_printed = 0  # bytes so far; only the end is kept
        self._open = {requests, answers, output}
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def send(self, word: bytes) -> None:
        """Send a short message and do not wait for an answer."""
        self._write(LENGTH.pack(len(word)) + word)

    def receive(
        self,
        request: bytes | None = None,
        *,
        within_s: float | None = None,
        on_output: Callable[[bytes], None] = lambda _: None,
    ) -> bytes | None:
        """Send `request` and return the next frame; None if the other side ended first.

        `on_output` is called with what the other side prints meanwhile.
        """
        unsent = b"" if request is None else LENGTH.pack(len(request)) + request
        until_s = None if within_s is None else time.monotonic() + within_s
        while (frame := self._take_frame()) is None:
            ready = self._wait(bool(unsent), until_s)
            if not ready:
                raise OutOfTime(
                    f"no answer within {within_s:g} s; everything in the sandbox was killed"
                )
            if self._requests in ready:
                unsent = self._write(unsent)
            if self._output in ready:
                on_output(self._read_output())
            if self._answers in ready:
                piece = os.read(self._answers, _PIECE_BYTES)
                if not piece:
                    return None
                self._unread += piece
        return frame

    def _wait(self, is_sending: bool, until_s: float | None) -> set[int]:
        poll = select.poll()
        for descriptor in self._open & {self._answers, self._output}:
            poll.register(descriptor, select.POLLIN)
        if is_sending and self._requests in self._open:
            poll.register(self._requests, select.POLLOUT)
        left_ms = None if until_s is None else max(0.0, until_s - time.monotonic()) * 1000
        return {descriptor for descriptor, _ in poll.poll(left_ms)}

    def _write(self, unsent: bytes) -> bytes:
        try:
            return unsent[os.write(self._requests, unsent[:_PIECE_BYTES]) :]
        except BrokenPipeError:  # the reader is gone; the end of the answers will show it
            return b""

    def _take_frame(self) -> bytes | None:
        if len(self._unread) < LENGTH.size:
            return None
        (num_bytes,) = LENGTH.unpack(self._unread[: LENGTH.size])
        if num_bytes > LARGEST_ANSWER_BYTES:
            raise SpokeNonsense(
                "the answer from the sandbox is not valid",
                because=f"it announces {num_bytes} bytes; the limit is {LARGEST_ANSWER_BYTES}",
            )
        end = LENGTH.size + num_bytes
        if len(self._unread) < end:
            return None
        frame = bytes(self._unread[LENGTH.size : end])
        del self._unread[:end]
        return frame

    def _read_output(self) -> bytes:
        """Read available output; return empty bytes if there is none."""
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
        """Return the end of the output inside, from byte `since` on."""
        while self._output in self._open and self._read_output():
            pass
        num_new = min(self.num_printed - since, len(self._printed))
        return self._printed[len(self._printed) - num_new :].decode(errors="replace")

    def _shut(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        """Read the remaining output and close the pipes."""
        self.output()
        for descriptor in tuple(self._open):
            self._shut(descriptor)
