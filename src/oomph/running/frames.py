"""Bytes <-> frames on a stream: eight bytes of length, most significant first, then the bytes."""

from __future__ import annotations

import struct
from typing import BinaryIO

LENGTH = struct.Struct(">Q")


def write_frame(stream: BinaryIO, content: bytes) -> None:
    """Write one frame and flush it."""
    stream.write(LENGTH.pack(len(content)) + content)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or None where the stream ended before it was whole."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (num_bytes,) = LENGTH.unpack(head)
    content = stream.read(num_bytes)
    return content if len(content) == num_bytes else None
