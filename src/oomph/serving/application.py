"""Addresses -> answers. Nothing of an address ever reaches the file system.

/                   the page                 /api/live        the machine, second by second
/dashboard.js ...   what it is made of       /api/machine     the machine now
/api/runs           runs that are kept       /api/runs/ID     the report on one of them
/api/plans          plans that are served    /api/plans/NAME  one of them
/metrics            for Prometheus
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from oomph.errors import OomphError
from oomph.records.sighting import Past, Sighting
from oomph.serving.answers import Kept
from oomph.serving.feed import Feed
from oomph.serving.guarding import Door, Guard
from oomph.serving.stream import EventStream, Hub, event

Data = Mapping[str, Any]
_LIST_FRESH_S = 2.0
_ONE_FRESH_S = 3.0  # a run that goes on is written each second
_MOST_KEPT = 8  # a report with its series has about a megabyte
# prometheus.io/docs/instrumenting/exposition_formats
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is served. None of an unknown name; any of these may raise OomphError."""

    files: Mapping[str, bytes]  # by name: "dashboard.js"
    frame: Callable[[Sighting], Data]
    history: Callable[[Sighting, Sequence[Past]], Data]
    metrics: Callable[[Sighting, int], bytes]  # with so many viewers
    runs: Callable[[], Data]
    run: Callable[[str], Data | None]
    plans: Callable[[], Data]
    plan: Callable[[str], Data | None]


class Dashboard:
    """One feed, one hub, and the application that shows them."""

    def __init__(self, feed: Feed, content: Content, door: Door, most_viewers: int) -> None:
        self._feed = feed
        self._content = content
        self._bodies: Kept[bytes | None] = Kept(_ONE_FRESH_S, _MOST_KEPT)
        self._lists: Kept[bytes | None] = Kept(_LIST_FRESH_S, _MOST_KEPT)
        self._greeting: tuple[int, bytes] = (-1, b"")
        self.hub = Hub(self._greet, most_viewers)
        guard = Middleware(Guard, door=door)
        self.application = Starlette(routes=self._routes(), middleware=[guard])

    def tick(self) -> None:
        """Take what is new, and tell everybody."""
        sighting = self._feed.look()
        if self.hub.num_viewers:
            self.hub.publish(event("now", self._content.frame(sighting)))

    def _greet(self) -> bytes:
        """Past and present, encoded once for all who come within the same second."""
        newest = self._feed.newest
        if self._greeting[0] != newest.number:
            history = event("history", self._content.history(newest, tuple(self._feed.history)))
            self._greeting = newest.number, history + event("now", self._content.frame(newest))
        return self._greeting[1]

    def _routes(self) -> list[BaseRoute]:
        files = [Route(f"/{name}", self._file(name)) for name in self._content.files]
        return [
            Route("/", self._file("dashboard.html")),
            *files,
            Route("/metrics", self._metrics),
            Route("/api/live", self._live),
            Route("/api/machine", self._machine),
            Route("/api/runs", self._listed(self._content.runs)),
            Route("/api/runs/{name}", self._named(self._content.run)),
            Route("/api/plans", self._listed(self._content.plans)),
            Route("/api/plans/{name}", self._named(self._content.plan)),
        ]

    def _file(self, name: str) -> Callable[[Request], Any]:
        body, kind = self._content.files[name], _KINDS[name.rpartition(".")[2]]

        async def answer(_: Request) -> Response:
            return Response(body, media_type=kind)

        return answer

    async def _live(self, _: Request) -> Any:
        if self.hub.is_full or self.hub.is_closed:
            return PlainTextResponse("oomph: too many viewers\n", status_code=503)
        return EventStream(self.hub)

    async def _machine(self, _: Request) -> Response:
        return _json(_encoded(self._content.frame(self._feed.newest)))

    async def _metrics(self, _: Request) -> Response:
        body = self._content.metrics(self._feed.newest, self.hub.num_viewers)
        return Response(body, media_type=_EXPOSITION)

    def _listed(self, make: Callable[[], Data]) -> Callable[[Request], Any]:
        async def answer(_: Request) -> Response:
            return await self._answer(self._lists, make, make)

        return answer

    def _named(self, make: Callable[[str], Data | None]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            name: str = request.path_params["name"]
            return await self._answer(self._bodies, (make, name), lambda: make(name))

        return answer

    async def _answer(
        self, kept: Kept[bytes | None], question: Any, make: Callable[[], Data | None]
    ) -> Response:
        """In a thread: files are read. What cannot be read is told, and nothing else."""
        try:
            body = await run_in_threadpool(kept.get, question, lambda: _encoded_if(make()))
        except OomphError as error:
            return _json(_encoded({"error": error.in_one_line()}), 500)
        except OSError as error:  # a run that is being deleted, say
            return _json(_encoded({"error": error.strerror or "it cannot be read"}), 500)
        if body is None:
            return _json(_encoded({"error": "there is nothing of this name"}), 404)
        return _json(body)


def _encoded(data: Data) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def _encoded_if(data: Data | None) -> bytes | None:
    return None if data is None else _encoded(data)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")
