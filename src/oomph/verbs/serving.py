"""oomph serve: the dashboard of this machine, its runs and its plans, until a signal ends it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

    from oomph.records.sighting import Sighting
    from oomph.sensing.sampling import Sampler
    from oomph.serving.application import Content
    from oomph.serving.guarding import Door

TOKEN = "OOMPH_TOKEN"  # noqa: S105 - the name of a variable
_LEAST_TOKEN = 16  # characters
_TOKEN_BYTES = 32
_MOST_RUNS = 500
_MOST_PLANS = 200
_LEAVES_AFTER_S = 0.5  # one that hangs is left behind
_FIRST_ANSWER_S = 3.0  # a driver that does not answer by then is served as one that does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where the dashboard is."""

    url: str  # with the token, where one was made up
    is_local: bool  # it can be reached from this machine only
    token: str | None  # that was made up


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: bool = False,
    plans: Path | str | None = None,
    per_process: bool = False,
    tell: Callable[[Served], object],
) -> None:
    """Serve until SIGINT or SIGTERM. `tell` is told once where it is. Raises OomphError.

    `token` demands one also on this machine; anywhere else it is demanded always. It is made up,
    unless OOMPH_TOKEN has one. `plans` is a directory. Call it from the main thread.
    """
    _check_extra()
    from oomph.serving.application import Dashboard
    from oomph.serving.connections import MOST_VIEWERS
    from oomph.serving.feed import Feed
    from oomph.serving.guarding import Door
    from oomph.serving.server import bound_socket, is_local
    from oomph.serving.server import serve as serve_on

    given = _given_token()
    directory = _directory(plans)
    with bound_socket(host, port) as listening:
        is_here = is_local(listening)
        secret = given or (_new_token() if token or not is_here else None)
        door = Door(host=host, is_local=is_here, token=secret)
        content = _content(directory, shows_commands=bool(secret), per_process=per_process)
        with _sampling() as sampler:
            dashboard = Dashboard(Feed(sampler), content, door, MOST_VIEWERS)
            served = _served(listening, door, None if given else secret)
            serve_on(dashboard, listening, lambda: tell(served))


def grafana_dashboard() -> str:
    """A dashboard for Grafana, over what /metrics tells Prometheus."""
    from oomph.showing.grafana import dashboard

    return dashboard()


def _check_extra() -> None:
    from importlib.util import find_spec

    from oomph.errors import OomphError

    missing = [n for n in ("starlette", "uvicorn", "prometheus_client") if find_spec(n) is None]
    if missing:
        raise OomphError(
            "oomph serve needs what is not installed here",
            because=f"there is no {' and no '.join(missing)}",
            attempt="pip install 'oomph[web]'",
        )


# ---- who may come in -----------------------------------------------------------------------------


def _given_token() -> str | None:
    from oomph.errors import UsageError

    given = os.environ.get(TOKEN)
    if given is None:
        return None
    if len(given) < _LEAST_TOKEN or not given.isascii() or not given.isprintable():
        raise UsageError(
            f"{TOKEN} is no token that keeps anybody out",
            because=f"it has to have {_LEAST_TOKEN} characters or more, all of ASCII",
            attempt=f'export {TOKEN}="$(openssl rand -hex 32)"',
        )
    return given


def _new_token() -> str:
    import secrets

    return secrets.token_urlsafe(_TOKEN_BYTES)


def _served(listening: socket.socket, door: Door, token: str | None) -> Served:
    port = listening.getsockname()[1]
    query = f"?token={token}" if token else ""
    url = f"http://{_reachable(door.host)}:{port}/{query}"
    return Served(url=url, is_local=door.is_local, token=token)


def _reachable(host: str) -> str:
    """A name that a browser can open: every address of this machine is none."""
    import socket

    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - it is not bound to here
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


# ---- what is served ------------------------------------------------------------------------------


def _content(plans: Path | None, *, shows_commands: bool, per_process: bool) -> Content:
    from oomph.sensing.jobs import Jobs
    from oomph.serving.application import Content
    from oomph.showing.dashboard import as_frame, as_history
    from oomph.showing.html_page import read_parts
    from oomph.showing.metrics import as_metrics

    jobs = Jobs()

    def frame(sighting: Sighting) -> dict[str, Any]:
        on_gpus = (p for seen in sighting.gpus for p in seen.device.processes or ())
        return as_frame(sighting, jobs.of(on_gpus), shows_commands=shows_commands)

    return Content(
        files=read_parts("dashboard", ("html", "js", "css", "svg")),
        frame=frame,
        history=lambda sighting, past: {**_where(), **as_history(sighting, past)},
        metrics=lambda sighting, viewers: as_metrics(sighting, viewers, per_process=per_process),
        runs=_runs,
        run=_run,
        plans=lambda: _plans(plans),
        plan=lambda name: _plan(plans, name),
    )


def _where() -> dict[str, str | None]:
    from oomph import __version__
    from oomph.running.diary import this_host, this_user

    return {"host": this_host(), "user": this_user(), "version": __version__}


@contextlib.contextmanager
def _sampling() -> Iterator[Sampler]:
    """All GPUs of this machine, watched while it is entered."""
    from oomph.verbs.watching import sampler

    watching = sampler("all")
    watching.start()
    watching.is_ready.wait(_FIRST_ANSWER_S)
    try:
        yield watching
    finally:
        watching.stop(timeout_s=_LEAVES_AFTER_S)


def _runs() -> dict[str, Any]:
    from oomph.records.stored import to_jsonable
    from oomph.running.run_places import run_directories
    from oomph.showing.runs import how_it_went
    from oomph.verbs.watching import runs

    kept = runs(last=_MOST_RUNS)
    told = [{**to_jsonable(run), "path": None, "how": how_it_went(run)} for run in kept]
    num_runs = len(kept) if len(kept) < _MOST_RUNS else len(run_directories())
    return {"runs": told, "num_runs": num_runs}


def _run(name: str) -> dict[str, Any] | None:
    """The report on a run. Only one that is listed: the name is no path."""
    from oomph.explaining.diagnose import diagnose
    from oomph.running.diary_reader import read_run
    from oomph.running.run_places import directory_of
    from oomph.running.run_summaries import summarise
    from oomph.showing.report_page import report_data

    directory = directory_of(name)
    summary = None if directory is None else summarise(directory)
    if directory is None or summary is None:
        return None
    run = read_run(directory)
    return {"state": summary.state, "page": report_data(diagnose(run), run)}


def _directory(plans: Path | str | None) -> Path | None:
    from oomph.errors import UsageError

    if plans is None:
        return None
    directory = Path(plans)
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory", attempt="--plans with one that exists")
    return directory


def _plans(directory: Path | None) -> dict[str, Any]:
    from oomph.errors import OomphError
    from oomph.showing.plan_files import plan_files, read_plan_file, summary_of

    def told(path: Path) -> dict[str, Any] | None:
        try:
            return summary_of(path, read_plan_file(path))
        except OomphError:  # another file of that kind: a directory may hold anything
            return None

    files = plan_files(directory, _MOST_PLANS) if directory else []
    lines = [line for line in map(told, files) if line is not None]
    return {"plans": lines, "is_served": directory is not None}


def _plan(directory: Path | None, name: str) -> dict[str, Any] | None:
    from oomph.showing.plan_files import plan_files, read_plan_file

    files = plan_files(directory, _MOST_PLANS) if directory else []
    path = next((path for path in files if path.name == name), None)
    return None if path is None else read_plan_file(path)
