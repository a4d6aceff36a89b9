"""What one connection may take: how long, and how many there may be.

uvicorn waits for ever for a request that is never finished, and for a client that never reads.
Here the first has ten seconds, and the second half a minute; neither holds up anybody else.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0  # from the first byte (or from connecting) to the end of the request's head
IDLE_S = 15  # between two requests
READING_S = 30.0  # for a client to make room, once its buffers are full
MOST_CONNECTIONS = 256  # far below the 1024 files that a process may usually open
MOST_VIEWERS = 200  # of the live stream; the rest is for everything else
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: 28\r\n\r\noomph: too many connections\n"
)


class Deadline:
    """A connection is cut when it runs out."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self, transport: asyncio.Transport) -> None:
        """If it is not running already."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._lasts_s, transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BoundedConnection(H11Protocol):
    """One connection, which ends when it takes too long."""

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
        """The server ends: whoever does not read now is not waited for."""
        if self._reading.is_running:
            self.transport.abort()
        else:
            super().shutdown()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete
