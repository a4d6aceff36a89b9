"""A socket, a loop, and an end that is quick: the dashboard, served until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from oomph.errors import OomphError, UsageError
from oomph.serving import connections
from oomph.serving.application import Dashboard

_TICK_S = 1.0
_BACKLOG = 128
_LAST_WORDS_S = 1  # for viewers to be let go
# A viewer that reads nothing fills this much of the kernel's memory, and not the megabytes that
# it would be given.
_SEND_BUFFER_BYTES = 256 * 1024


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OomphError in words."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"there is no address {host!r:.80}", because=str(error), attempt="--host 127.0.0.1"
        ) from None
    opened = socket.socket(family, kind)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart at once
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        opened.bind(address)
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        raise OomphError(
            f"port {port} of {host} cannot be listened on",
            because=error.strerror or str(error),
            attempt="oomph serve --port 0, which takes any that is free",
        ) from None
    return opened


def is_local(listening: socket.socket) -> bool:
    """Can it be reached from this machine only?"""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def serve(dashboard: Dashboard, listening: socket.socket, on_ready: Callable[[], object]) -> None:
    """Until SIGINT or SIGTERM, which end it well from the moment that it is ready."""
    asyncio.run(_serve(dashboard, listening, on_ready))


async def _serve(
    dashboard: Dashboard, listening: socket.socket, on_ready: Callable[[], object]
) -> None:
    loop = asyncio.get_running_loop()
    server = _Server(
        _config(dashboard.application),
        on_ready,
        lambda: loop.call_soon_threadsafe(dashboard.hub.close),
    )
    ticking = asyncio.create_task(_tick(dashboard))
    ticking.add_done_callback(lambda _: server.end())  # it never ends but by a fault
    try:
        await server.serve(sockets=[listening])
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking


async def _tick(dashboard: Dashboard) -> None:
    """At a steady pace: what was missed is not made up for."""
    next_s = time.monotonic()
    while True:
        next_s = max(next_s + _TICK_S, time.monotonic())
        await asyncio.sleep(next_s - time.monotonic())
        dashboard.tick()


class _Server(uvicorn.Server):
    """uvicorn's, which would end the process by the signal once it is done."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], object],
        on_exit: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_exit = on_exit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        self.end()

    def end(self) -> None:
        """Soon; at once, where it is asked for twice."""
        self.force_exit = self.should_exit
        self.should_exit = True
        logging.getLogger("uvicorn.error").disabled = True  # it would tell of each one cut off
        self._on_exit()


def _config(application: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=connections.BoundedConnection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        access_log=False,  # addresses hold tokens
        log_config=None,
        log_level="error",  # faults of ours; what clients do wrong is a warning
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=connections.IDLE_S,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
