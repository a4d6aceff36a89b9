"""Decide which requests are answered, and set the security headers of every answer.

When serving this machine alone (127.0.0.1), refuse a request for another host name (otherwise a web
page could point its own name here and read the answers: DNS rebinding), and refuse other users of
this machine. With a token, refuse requests without it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# ---- a connection from this machine -> the user at its other end ----
# Every logged-in user can reach 127.0.0.1, but a command line or a run may hold its user's secrets.
# The kernel knows who opened a socket: /proc/net/tcp has a line for each, with its user.
# Limits: Linux. If the line is not found, the request is refused.

_ROOT = 0
# The kernel prints the table page by page; a socket can be missed while others come and go.
_LOOKS = 5
_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def is_own(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Return whether the client is this user, or root, who can read everything anyway."""
    return user_of(client, server) in (os.geteuid(), _ROOT)


def user_of(
    client: tuple[str, int], server: tuple[str, int], read: Callable[[str], str] = _read
) -> int | None:
    """Return the uid of the user whose socket is at `client`, connected to `server`."""
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    wanted = [_as_listed(family, *client), _as_listed(family, *server)]
    for _ in range(_LOOKS):
        try:
            lines = read(_TABLES[family]).splitlines()[1:]
        except OSError:
            return None
        # sl, local and remote address, state, queues, timer, retransmits, uid: proc_net_tcp.rst
        found = (line.split() for line in lines)
        users = {int(words[7]) for words in found if words[1:3] == wanted}
        if users:
            return users.pop() if len(users) == 1 else None
    return None


def _as_listed(family: socket.AddressFamily, host: str, port: int) -> str:
    """Format an address as the kernel does: words of four bytes, in the machine's byte order."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{port:04X}"


_MOST_ADDRESS_BYTES = 1024  # path and query: the longest that a page asks for has 200
_MONTH_S = 30 * 24 * 3600
# For scrapers, and without command lines: anybody on this machine may read it, just as they may
# ask NVML.
_OF_THE_MACHINE = ("/metrics",)
_OWN_HEADER = "x-oomph"
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # the first address holds the token
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Door:
    """Where the server is reachable, and for whom."""

    host: str  # as requested
    is_local: bool  # reachable only from this machine
    token: str | None  # None: only this user


class Guard:
    """Wrap an application; refused requests never reach it."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the refusal to send; None if the request is allowed."""
        if scope["method"] not in ("GET", "HEAD"):
            return _refused(405, "nothing can be changed here")
        if len(scope["raw_path"]) + len(scope["query_string"]) > _MOST_ADDRESS_BYTES:
            return _refused(414, "this address is too long")
        if _is_of_another_page(scope):
            return _refused(403, "this is not for pages of other sites")
        if self._door.is_local and not self._is_named(scope):
            return _refused(421, "this server is only for its own machine, under its own name")
        if self._door.token is not None:
            return _check_token(scope, self._door.token)
        if scope["path"] in _OF_THE_MACHINE or _is_this_user(scope):
            return None
        return _refused(403, "this is another user's: oomph serve --token would let you in")

    def _is_named(self, scope: Scope) -> bool:
        """Return whether the host is this machine, on any port: a tunnel may use another."""
        host = Headers(scope=scope).get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name in _LOCAL_NAMES or name == self._door.host.lower()


def _is_of_another_page(scope: Scope) -> bool:
    """Return whether another site's page sent the request; following a link here is allowed."""
    headers = Headers(scope=scope)
    is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return is_foreign and headers.get("sec-fetch-mode") != "navigate"


def is_of_our_page(scope: Scope) -> bool:
    """Return whether a request has the header that only our page, or a program, adds.

    A page of another site cannot add it without asking first, and OPTIONS is refused. A link cannot
    add it either, so none starts a search.
    """
    return Headers(scope=scope).get(_OWN_HEADER) is not None


def _is_this_user(scope: Scope) -> bool:
    client, server = scope.get("client"), scope.get("server")
    return bool(client and server and is_own(tuple(client), tuple(server)))


def _check_token(scope: Scope, token: str) -> Response | None:
    headers = Headers(scope=scope)
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    given = [value for name, value in query if name == "token"]
    if given and _is_same(given[0], token):
        return _remember(scope, token, [pair for pair in query if pair[0] != "token"])
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and _is_same(bearer.strip(), token):
        return None
    if _is_same(_cookie(headers.get("cookie", ""), token), token):
        return None
    refusal = _refused(401, "open the address that oomph serve has printed: it holds the token")
    refusal.headers["www-authenticate"] = "Bearer"
    return refusal


def _remember(scope: Scope, token: str, query: list[tuple[str, str]]) -> Response:
    """Redirect to the address without the token, which would stay in histories and on screens."""
    last = scope["path"].rpartition("/")[2]
    address = f"./{last}" if not query else f"./{last}?{urlencode(query)}"
    answer = RedirectResponse(address, status_code=303)
    answer.set_cookie(_cookie_name(token), token, max_age=_MONTH_S, httponly=True, samesite="lax")
    return answer


def _cookie_name(token: str) -> str:
    """Name the cookie by token: cookies ignore ports, and two servers must not share one."""
    return f"oomph-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _cookie(header: str, token: str) -> str:
    try:
        found = SimpleCookie(header).get(_cookie_name(token))
    except CookieError:
        return ""
    return found.value if found else ""


def _is_same(given: str, token: str) -> bool:
    """Compare in constant time, so that timing reveals nothing about the token."""
    return hmac.compare_digest(given.encode(), token.encode())


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"oomph: {why}\n", status_code=status)
