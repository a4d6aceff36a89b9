"""The hub: frames for those who wait, nothing kept for those who do not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from oomph.serving.feed import Hub, event
from serving.fakes import no_greeting

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: that of the tests may have a loop already, of a browser's driver."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def test_an_event_is_one_line_of_data_whatever_is_in_it() -> None:
    text = event("now", {"command": "a\n\ndata: hacked\r\nevent: x\u2028"})
    assert text.count(b"\n") == 3
    assert text.startswith(b"event: now\ndata: {")
    assert text.endswith(b"}\n\n")


def test_a_viewer_that_comes_back_gets_the_newest_frame_only() -> None:
    async def watch() -> list[bytes]:
        hub = Hub(no_greeting, most=5)
        frames = hub.frames()
        await anext(frames)
        for number in range(10):
            hub.publish(b"%d" % number)
        first = await anext(frames)
        hub.publish(b"last")
        return [first, await anext(frames)]

    assert run(watch()) == [b"9", b"last"]


def test_viewers_are_counted_while_they_are_there() -> None:
    async def watch() -> list[int]:
        hub = Hub(no_greeting, most=2)
        counts = [hub.num_viewers]
        viewers = [hub.frames(), hub.frames()]
        for viewer in viewers:
            await anext(viewer)
        counts += [hub.num_viewers, hub.is_full]
        await viewers[0].aclose()
        return [*counts, hub.num_viewers, hub.is_full]

    assert run(watch()) == [0, 2, True, 1, False]


def test_closing_ends_every_viewer_also_one_that_waits() -> None:
    async def watch() -> int:
        hub = Hub(no_greeting, most=5)

        async def view() -> int:
            return len([frame async for frame in hub.frames()])

        waiting = [asyncio.create_task(view()) for _ in range(3)]
        await asyncio.sleep(0)
        hub.close()
        await asyncio.gather(*waiting)
        return hub.num_viewers

    assert run(watch()) == 0
