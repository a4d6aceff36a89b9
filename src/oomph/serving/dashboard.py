"""oomph serve: serve the dashboard of this machine, its runs and plans, until a signal ends it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from oomph.errors import OomphError, UsageError
from oomph.sensing.sampling import Sampler

TOKEN = "OOMPH_TOKEN"  # noqa: S105 - the name of a variable
_MIN_TOKEN = 16  # characters; judgement: at least 64 bits in any sensible token
_TOKEN_BYTES = 32  # for a generated token, as `secrets` advises
_STOP_S = 0.5  # do not wait longer for a hung sampler
_FIRST_ANSWER_S = 3.0  # after this, serve even if the driver has not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The address of the dashboard."""

    url: str  # with the token, if one was generated
    is_local: bool  # reachable only from this machine
    token: str | None  # the generated token


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: bool = False,
    plans: Path | str | None = None,
    workloads: Path | str | None = None,
    per_process: bool = False,
    tell: Callable[[Served], object],
) -> None:
    """Serve until SIGINT or SIGTERM; `tell` is called once with the address. Raises OomphError.

    `token` requires a token on this machine too; for any other machine it is always required. The
    token comes from OOMPH_TOKEN or is generated. `plans` and `workloads` are directories. Call it
    from the main thread.
    """
    _check_extra()
    from oomph.serving.application import Content, Dashboard
    from oomph.serving.feed import Feed
    from oomph.serving.guarding import Door
    from oomph.serving.server import MOST_VIEWERS, bound_socket, is_local
    from oomph.serving.server import serve as serve_on

    given = _given_token()
    with bound_socket(host, port) as listening:
        is_here = is_local(listening)
        needs_token = token or not is_here
        secret = given or (secrets.token_urlsafe(_TOKEN_BYTES) if needs_token else None)
        shows = bool(secret)
        content = Content(plans, workloads, shows_commands=shows, per_process=per_process)
        made_up = None if given else secret
        served = Served(url=_url(listening, host, made_up), is_local=is_here, token=made_up)
        door = Door(host=host, is_local=is_here, token=secret)
        with _sampling() as sampler:
            dashboard = Dashboard(Feed(sampler), content, door, MOST_VIEWERS)
            serve_on(dashboard, listening, lambda: tell(served))


def grafana_dashboard() -> str:
    """Return a Grafana dashboard for the metrics that Prometheus gets from /metrics."""
    from oomph.showing.serve import dashboard

    return dashboard()


def _check_extra() -> None:
    missing = [n for n in ("starlette", "uvicorn", "prometheus_client") if find_spec(n) is None]
    if missing:
        raise OomphError(
            "oomph serve needs packages that are not installed",
            because=f"missing: {', '.join(missing)}",
            attempt="pip install 'oomph[web]'",
        )


def _given_token() -> str | None:
    given = os.environ.get(TOKEN)
    if given is None:
        return None
    if len(given) < _MIN_TOKEN or not given.isascii() or not given.isprintable():
        raise UsageError(
            f"{TOKEN} is too weak to be a token",
            because=f"a token has {_MIN_TOKEN} characters or more, all of them ASCII",
            attempt=f'export {TOKEN}="$(openssl rand -hex 32)"',
        )
    return given


def _url(listening: socket.socket, host: str, token: str | None) -> str:
    """Return an address that a browser can open; "every address of this machine" is not one."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - nothing is bound here
        host = socket.gethostname()
    elif ":" in host:
        host = f"[{host}]"
    query = f"?token={token}" if token else ""
    return f"http://{host}:{listening.getsockname()[1]}/{query}"


@contextlib.contextmanager
def _sampling() -> Iterator[Sampler]:
    """Sample all GPUs of this machine within the context."""
    sampler = Sampler("all")
    sampler.start()
    sampler.is_ready.wait(_FIRST_ANSWER_S)
    try:
        yield sampler
    finally:
        sampler.stop(timeout_s=_STOP_S)
