"""The machine, its runs and its plans -> answers to addresses.

No part of an address ever reaches the file system.

/                   the page                 /api/live        the machine, second by second
/dashboard.js ...   the page's files         /api/machine     the machine now
/api/runs           recorded runs            /api/runs/ID     the report on one of them
/api/figures        their peaks and activity
/api/plans          served plans             /api/plans/NAME  one of them
/api/fit            "Will it fit?"           /api/fit/choices what may be asked there
/metrics            for Prometheus
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from oomph import __version__
from oomph.errors import OomphError, UsageError
from oomph.explaining.diagnose import diagnose
from oomph.monitoring.command import runs
from oomph.monitoring.diary import directory_of, newest_first, this_host, this_user
from oomph.monitoring.diary_reader import read_run, summarise
from oomph.records.machine import Past, Sighting
from oomph.records.run import RunSummary
from oomph.records.stored import to_jsonable
from oomph.sensing.live import Jobs
from oomph.serving.feed import Feed, Hub, encoded, event
from oomph.serving.guarding import Door, Guard, is_of_our_page
from oomph.serving.questions import Questions
from oomph.serving.searches import MOST_WAITING, Searches
from oomph.showing.html_page import read_parts
from oomph.showing.plan import plan_files, read_plan_file, summary_of
from oomph.showing.report import report_data
from oomph.showing.runs import how_it_went
from oomph.showing.serve import as_frame, as_history, as_metrics

Data = Mapping[str, Any]  # can be written by `json`
MAX_RUNS = 500
_MAX_PLANS = 200


# ---- what is served: the machine, its runs and its plans, as data ----


class Content:
    """What is served. An unknown name gives None; any method may raise OomphError or OSError."""

    def __init__(
        self,
        plans: str | Path | None = None,
        workloads: str | Path | None = None,
        *,
        shows_commands: bool = False,  # also other users'
        per_process: bool = False,  # also in the metrics
    ) -> None:
        self._plans = None if plans is None else Path(plans)
        if self._plans is not None and not self._plans.is_dir():
            raise UsageError(
                f"{self._plans} is not a directory", attempt="--plans with one that exists"
            )
        self.questions = Questions(workloads)
        self._shows_commands, self._per_process = shows_commands, per_process
        self._jobs = Jobs()
        self._figures = Figures()
        self.files = read_parts("dashboard", ("html", "js", "css", "svg"))  # by name

    def frame(self, sighting: Sighting) -> Data:
        on_gpus = (p for seen in sighting.gpus for p in seen.device.processes or ())
        return as_frame(sighting, self._jobs.of(on_gpus), shows_commands=self._shows_commands)

    def history(self, sighting: Sighting, past: Sequence[Past]) -> Data:
        where = {"host": this_host(), "user": this_user(), "version": __version__}
        return {**where, **as_history(sighting, past)}

    def metrics(self, sighting: Sighting, num_viewers: int) -> bytes:
        return as_metrics(sighting, num_viewers, per_process=self._per_process)

    def runs(self) -> Data:
        found = runs(last=MAX_RUNS)
        listed = [{**to_jsonable(run), "path": None, "how": how_it_went(run)} for run in found]
        num_runs = len(found) if len(found) < MAX_RUNS else sum(1 for _ in newest_first())
        return {"runs": listed, "num_runs": num_runs}

    def figures(self) -> Data:
        """Return the figures of the listed runs; `num_left` are to be asked for again."""
        return self._figures.of(runs(last=MAX_RUNS))

    def run(self, name: str) -> Data | None:
        """Return the report on a run. It must be a listed run: the name is not used as a path."""
        directory = directory_of(name)
        summary = None if directory is None else summarise(directory)
        if directory is None or summary is None:
            return None
        run = read_run(directory)
        return {"state": summary.state, "page": report_data(diagnose(run), run)}

    def plans(self) -> Data:
        lines = [line for line in map(_plan_line, self._plan_files()) if line is not None]
        return {"plans": lines, "is_served": self._plans is not None}

    def plan(self, name: str) -> Data | None:
        path = next((path for path in self._plan_files() if path.name == name), None)
        return None if path is None else read_plan_file(path)

    def _plan_files(self) -> list[Path]:
        return plan_files(self._plans, _MAX_PLANS) if self._plans else []


def _plan_line(path: Path) -> Data | None:
    try:
        return summary_of(path, read_plan_file(path))
    except OomphError:  # not a plan: the directory may hold any files
        return None


# ---- peak memory and activity of runs: reports are read for them, once each ----------------------

_FIGURES_S = 1.0  # of reading for one request; judgement: the page asks again for the rest
_SO_FAR_S = 30.0  # how old the figures of a run under way may be


class Figures:
    """The figures that runs are sorted by. One request at a time, as `Cache` has it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Data] = {}  # by run, and by how far it was

    def of(self, listed: Sequence[RunSummary]) -> Data:
        """Return what is known by run, with as many more as a second allows, the newest first."""
        until_s = time.monotonic() + _FIGURES_S
        keys = {run.id: (run.id, int(run.duration_s // _SO_FAR_S)) for run in listed}
        self._known = {key: self._known[key] for key in keys.values() if key in self._known}
        missing = [run for run in listed if keys[run.id] not in self._known]
        for run in sorted(missing, key=lambda run: run.started_at, reverse=True):
            if time.monotonic() > until_s:
                break
            self._known[keys[run.id]] = _figures_in(Path(run.path))
        by_run = {run: figures for (run, _), figures in self._known.items()}
        return {"figures": by_run, "num_left": len(keys) - len(by_run)}


def _figures_in(directory: Path) -> Data:
    """Return the fullest GPU's peak, and the mean of all its GPUs' activity; null if unknown."""
    try:
        report = diagnose(read_run(directory))
    except (OomphError, OSError):  # damaged or deleted: its own page says why
        return {"peak_bytes": None, "total_bytes": None, "busy_ratio": None}
    memories = [gpu.memory for gpu in report.gpus if gpu.memory.peak_bytes is not None]
    fullest = max(memories, key=lambda memory: memory.peak_bytes or 0, default=None)
    spans = [gpu.busy.working or gpu.busy.whole for gpu in report.gpus if gpu.busy is not None]
    return {
        "peak_bytes": fullest and fullest.peak_bytes,
        "total_bytes": fullest and fullest.total_bytes,
        "busy_ratio": sum(one.mean for one in spans) / len(spans) if spans else None,
    }


# ---- costly answers: computed once for simultaneous requests, and cached for a moment ----
# Reading a run of weeks takes a second of CPU. Fifty viewers who ask for it at once wait for the
# first request; requests in the next seconds get the same answer.

Answer = TypeVar("Answer")


class Cache(Generic[Answer]):
    """Cache the last few answers of a function, for `fresh_s` seconds each. Thread-safe."""

    def __init__(self, fresh_s: float, most: int) -> None:
        self._fresh_s = fresh_s
        self._most = most
        self._lock = threading.Lock()
        self._answers: dict[Hashable, tuple[float, Answer]] = {}  # oldest first

    def get(self, question: Hashable, make: Callable[[], Answer]) -> Answer:
        """Return the answer, computed if not cached. One at a time, since they share the cores."""
        with self._lock:
            kept = self._answers.get(question)
            if kept is not None and time.monotonic() - kept[0] < self._fresh_s:
                return kept[1]
            answer = make()
            self._answers.pop(question, None)
            self._answers[question] = (time.monotonic(), answer)
            if len(self._answers) > self._most:
                del self._answers[next(iter(self._answers))]
            return answer


# ---- addresses -> answers ----

# Judgement: too short to notice.
_LIST_FRESH_S = 2.0
_ONE_FRESH_S = 3.0  # a run under way is written every second
_MOST_CACHED = 8  # a report with its series has about a megabyte
# prometheus.io/docs/instrumenting/exposition_formats
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
Endpoint = Callable[[Request], Awaitable[Response]]
_STREAM = "text/event-stream"
_LINES = "application/x-ndjson"
_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would buffer
_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


class Dashboard:
    """One feed, one hub, and the application that serves them."""

    def __init__(self, feed: Feed, content: Content, door: Door, most_viewers: int) -> None:
        self._feed = feed
        self._content = content
        self._bodies: Cache[bytes | None] = Cache(_ONE_FRESH_S, _MOST_CACHED)
        self._lists: Cache[bytes | None] = Cache(_LIST_FRESH_S, _MOST_CACHED)
        self._greeting: tuple[int, bytes] = (-1, b"")
        self.hub = Hub(self._greet, most_viewers)
        self._searches = Searches()
        guard = Middleware(Guard, door=door)
        self.application = Starlette(routes=self._routes(), middleware=[guard])

    def tick(self) -> None:
        """Take the new spans, and send them to all viewers."""
        sighting = self._feed.look()
        if self.hub.num_viewers:
            self.hub.publish(event("now", self._content.frame(sighting)))

    def close(self) -> None:
        """End all streams and searches."""
        self.hub.close()
        self._searches.close()

    def _greet(self) -> bytes:
        """Return history and present, encoded once for all who connect in the same second."""
        newest = self._feed.newest
        if self._greeting[0] != newest.number:
            history = event("history", self._content.history(newest, tuple(self._feed.history)))
            self._greeting = newest.number, history + event("now", self._content.frame(newest))
        return self._greeting[1]

    def _routes(self) -> list[BaseRoute]:
        return [
            Route("/", self._file("dashboard.html")),
            *(Route(f"/{name}", self._file(name)) for name in self._content.files),
            Route("/metrics", self._metrics),
            Route("/api/live", self._live),
            Route("/api/machine", self._machine),
            Route("/api/runs", self._listed(self._content.runs)),
            Route("/api/figures", self._listed(self._content.figures)),
            Route("/api/runs/{name}", self._named(self._content.run)),
            Route("/api/plans", self._listed(self._content.plans)),
            Route("/api/plans/{name}", self._named(self._content.plan)),
            Route("/api/fit", self._fit, methods=["GET"]),
            Route("/api/fit/choices", self._listed(self._choices)),
        ]

    def _file(self, name: str) -> Endpoint:
        body, kind = self._content.files[name], _KINDS[name.rpartition(".")[2]]

        async def answer(_: Request) -> Response:
            return Response(body, media_type=kind)

        return answer

    async def _live(self, request: Request) -> Response:
        if self.hub.is_full or self.hub.is_closed:
            return PlainTextResponse("oomph: too many viewers\n", status_code=503)
        if request.method == "HEAD":
            return Response(headers=_STREAM_HEADERS, media_type=_STREAM)
        return StreamingResponse(self.hub.frames(), headers=_STREAM_HEADERS, media_type=_STREAM)

    async def _machine(self, _: Request) -> Response:
        return _json(encoded(self._content.frame(self._feed.newest)))

    async def _metrics(self, _: Request) -> Response:
        body = self._content.metrics(self._feed.newest, self.hub.num_viewers)
        return Response(body, media_type=_EXPOSITION)

    def _choices(self) -> Data:
        return self._content.questions.choices(self._feed.newest)

    async def _fit(self, request: Request) -> Response:
        """Search plans, for as long as somebody reads the lines."""
        if request.method == "HEAD" or not is_of_our_page(request.scope):
            return _json(
                encoded({"error": "this is asked by the page, with a header of its own"}), 403
            )
        asked = dict(request.query_params)
        try:
            question = await run_in_threadpool(self._content.questions.question, asked)
        except OomphError as error:
            return _json(encoded({"error": error.in_one_line()}), 400)
        if self._searches.is_full:
            busy = f"busy: {MOST_WAITING} others are waiting for an answer; try again in a minute"
            return _json(encoded({"error": busy}), 503)
        lines = self._searches.lines(question)
        return StreamingResponse(lines, headers=_STREAM_HEADERS, media_type=_LINES)

    def _listed(self, make: Callable[[], Data]) -> Endpoint:
        async def answer(_: Request) -> Response:
            return await self._answer(self._lists, make, make)

        return answer

    def _named(self, make: Callable[[str], Data | None]) -> Endpoint:
        async def answer(request: Request) -> Response:
            name: str = request.path_params["name"]
            return await self._answer(self._bodies, (make, name), lambda: make(name))

        return answer

    async def _answer(
        self, cache: Cache[bytes | None], question: Hashable, make: Callable[[], Data | None]
    ) -> Response:
        """Answer in a thread, since files are read. An error names what cannot be read."""

        def encode() -> bytes | None:
            data = make()
            return None if data is None else encoded(data)

        try:
            body = await run_in_threadpool(cache.get, question, encode)
        except OomphError as error:
            return _json(encoded({"error": error.in_one_line()}), 500)
        except OSError as error:  # for example, a run that is being deleted
            return _json(encoded({"error": error.strerror or "it cannot be read"}), 500)
        if body is None:
            return _json(encoded({"error": "there is nothing of this name"}), 404)
        return _json(body)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")
