"""Serve the dashboard on a socket until a signal ends it, with a quick shutdown."""

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
from uvicorn.protocols.http.h11_impl import H11Protocol

from oomph.errors import OomphError, UsageError
from oomph.serving.application import Dashboard

# ---- limits per connection: time, and their number (judgement) ----
# uvicorn waits forever for a request that is never finished, and for a client that never reads.
# Here the first gets ten seconds, the second half a minute; neither delays other connections.

REQUEST_S = 10.0  # from the first byte (or from connecting) to the end of the request's head
IDLE_S = 15  # between two requests
READING_S = 30.0  # for a client to make room once its buffers are full
MOST_CONNECTIONS = 256  # well below the usual limit of 1024 open files per process
MOST_VIEWERS = 200  # of the live stream; leaves connections for everything else
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: 28\r\n\r\noomph: too many connections\n"
)


class Deadline:
    """Abort a connection when the time is up."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self, transport: asyncio.Transport) -> None:
        """Start the timer, unless it is already running."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._lasts_s, transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BoundedConnection(H11Protocol):
    """A connection that is aborted when it takes too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._asking, self._reading = Deadline(REQUEST_S), Deadline(READING_S)
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(_BUSY)
            transport.close()
        else:
            self._asking.start(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_answering():
            self._asking.start(self.transport)
        super().data_received(data)
        if self._is_answering():
            self._asking.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asking.stop()
        self._reading.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.start(self.transport)

    def resume_writing(self) -> None:
        self._reading.stop()
        super().resume_writing()

    def shutdown(self) -> None:
        """Shut down; do not wait for a client that does not read."""
        if self._reading.is_running:
            self.transport.abort()
        else:
            super().shutdown()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


_TICK_S = 1.0
_BACKLOG = 128
_LAST_WORDS_S = 1  # for viewers to disconnect
# The kernel buffers at most this much for a viewer that reads nothing, instead of megabytes.
_SEND_BUFFER_BYTES = 256 * 1024


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises OomphError with a readable reason."""
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
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows an immediate restart
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
    """Return whether it is reachable only from this machine."""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def serve(dashboard: Dashboard, listening: socket.socket, on_ready: Callable[[], object]) -> None:
    """Serve until SIGINT or SIGTERM; once ready, either ends it cleanly."""
    asyncio.run(_serve(dashboard, listening, on_ready))


async def _serve(
    dashboard: Dashboard, listening: socket.socket, on_ready: Callable[[], object]
) -> None:
    loop = asyncio.get_running_loop()
    server = _Server(
        _config(dashboard.application),
        on_ready,
        lambda: loop.call_soon_threadsafe(dashboard.close),
    )
    ticking = asyncio.create_task(_tick(dashboard))
    ticking.add_done_callback(lambda _: server.end())  # it ends only by a fault
    try:
        await server.serve(sockets=[listening])
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking


async def _tick(dashboard: Dashboard) -> None:
    """Tick at a steady pace; missed ticks are not made up for."""
    next_s = time.monotonic()
    while True:
        next_s = max(next_s + _TICK_S, time.monotonic())
        await asyncio.sleep(next_s - time.monotonic())
        dashboard.tick()


class _Server(uvicorn.Server):
    """uvicorn's server, without re-raising the signal at the end, which would kill us."""

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
        """End soon; at once on the second call."""
        self.force_exit = self.should_exit
        self.should_exit = True
        logging.getLogger("uvicorn.error").disabled = True  # it would log every aborted connection
        self._on_exit()


def _config(application: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=BoundedConnection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        access_log=False,  # addresses hold tokens
        log_config=None,
        log_level="error",  # our own faults; clients' mistakes are warnings
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
