"""Who is answered, and who is not; and what every answer says to the browser.

On this machine alone (127.0.0.1): a request that names another host is refused, or a page of the
internet could point its own name here and read what is answered (DNS rebinding); and so is a
request of another user of this machine. With a token: a request without it is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oomph.serving.peers import is_own

_MOST_ADDRESS_BYTES = 1024  # of path and query: the longest that a page asks for has 200
_MONTH_S = 30 * 24 * 3600
# For machines that scrape, and without a command line: whoever is on this machine may read it, as
# they may ask NVML.
_OF_THE_MACHINE = ("/metrics",)
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
    """Where the server is reached, and by whom."""

    host: str  # as it was asked for
    is_local: bool  # only from this machine
    token: str | None  # None: this user alone


class Guard:
    """Stands before an application: what it refuses never reaches it."""

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
        """The answer to those who are not let in; None: they are."""
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
        """By the name of this machine to itself, whatever the port: a tunnel may have another."""
        host = Headers(scope=scope).get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name in _LOCAL_NAMES or name == self._door.host.lower()


def _is_of_another_page(scope: Scope) -> bool:
    """Asked by a page of another site, which cannot read it; a link that leads here is fine."""
    headers = Headers(scope=scope)
    is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return is_foreign and headers.get("sec-fetch-mode") != "navigate"


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
    """The same address without the token, which would stay in histories and on screens."""
    last = scope["path"].rpartition("/")[2]
    address = f"./{last}" if not query else f"./{last}?{urlencode(query)}"
    answer = RedirectResponse(address, status_code=303)
    answer.set_cookie(_cookie_name(token), token, max_age=_MONTH_S, httponly=True, samesite="lax")
    return answer


def _cookie_name(token: str) -> str:
    """Cookies do not know ports: two servers on a machine must not take each other's."""
    return f"oomph-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _cookie(header: str, token: str) -> str:
    try:
        found = SimpleCookie(header).get(_cookie_name(token))
    except CookieError:
        return ""
    return found.value if found else ""


def _is_same(given: str, token: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(), token.encode())


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"oomph: {why}\n", status_code=status)
