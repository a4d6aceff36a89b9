"""Frames -> server-sent events, for any number of viewers.

A frame is encoded once and sent to all. Nobody has a queue: a viewer that cannot keep up is sent
the newest frame when there is room again, and misses those between. One that takes nothing at all
is cut off by connections.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

# A comment line each so often shows either side that the other is gone; browsers ask for nothing.
_ALIVE_S = 15.0
_AGAIN_MS = 2000  # when a browser that has lost the stream comes back
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """One event. JSON as `json` writes it has no line breaks, which would end it."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return f"event: {name}\ndata: {written}\n\n".encode()


class Hub:
    """The newest frame, and those who wait for the next. Lives in one event loop."""

    def __init__(self, greet: Callable[[], bytes], most: int) -> None:
        self._greet = greet  # what a new viewer is told first
        self._most = most
        self._frame = b""
        self._bells: set[asyncio.Event] = set()
        self.is_closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._bells)

    @property
    def is_full(self) -> bool:
        return self.num_viewers >= self._most

    def publish(self, frame: bytes) -> None:
        self._frame = frame
        self._ring()

    def close(self) -> None:
        """Let every viewer go."""
        self.is_closed = True
        self._ring()

    def _ring(self) -> None:
        for bell in self._bells:
            bell.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The greeting, then the newest frame whenever there is a new one."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            yield f"retry: {_AGAIN_MS}\n\n".encode() + self._greet()
            while not self.is_closed:
                try:
                    await asyncio.wait_for(bell.wait(), _ALIVE_S)
                except asyncio.TimeoutError:
                    yield b":\n\n"
                    continue
                bell.clear()
                yield self._frame
        finally:
            self._bells.discard(bell)


class EventStream:
    """The response to one viewer, until either side ends it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        async with anyio.create_task_group() as both:  # whichever ends first ends the other

            async def leave() -> None:
                await _gone(receive)
                both.cancel_scope.cancel()

            both.start_soon(leave)
            await self._send_all(send)
            both.cancel_scope.cancel()

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._hub.frames()) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
