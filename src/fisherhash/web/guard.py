"""What stands between the network and the application: who may ask, how much, and how long.

Every refusal is an answer of the 4xx kind with a sentence. Strict headers go with every answer: no
page runs a script or loads anything that this server did not send.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

import h11
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fisherhash.web.metrics import RequestMetrics
from fisherhash.web.options import ServeOptions, is_loopback

logger = logging.getLogger(__name__)

MOST_HEADERS = 100
LONGEST_URL = 16 << 10
HEADER_SECONDS = 10.0
"""How long the headers of a request may take to arrive."""
DRAIN_SECONDS = 2.0
"""How long a refused body is still read, so that its sender gets to see the answer."""
COOKIE = "fisherhash-token"
OPEN_ROUTES = ("/healthz",)
"""What needs no token on any address."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

Refuse = Callable[[Scope, int, str], ASGIApp]
"""Makes the answer to a request that is refused, from its status and a sentence."""


class Guard:
    """The outermost layer of the application.

    Args:
        app: what it guards.
        options: who may ask, and the limits.
        metrics: counts the requests.
        refuse: makes the answer to a request that is refused.
    """

    def __init__(
        self, app: ASGIApp, *, options: ServeOptions, metrics: RequestMetrics, refuse: Refuse
    ) -> None:
        self.app, self.options, self.metrics, self.refuse = app, options, metrics, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            refused, entry = self.check(scope), self.entry(scope)
            if refused is not None:
                await self.refuse(scope, *refused)(scope, receive, answer)
            elif entry is not None:
                await entry(scope, receive, answer)
            else:
                body = _Body(receive, Headers(scope=scope), self.options)
                await self.app(scope, body, answer)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self.metrics.observe(path, status, time.perf_counter() - began)

    def check(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the sentence for a request that is refused; None for any other."""
        headers = Headers(scope=scope)
        if len(scope["headers"]) > MOST_HEADERS:
            return 431, f"The request has more than {MOST_HEADERS} headers."
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > LONGEST_URL:
            return 414, f"The address is longer than {LONGEST_URL:,} bytes."
        # A page of another site could let its own name point here, and read what we answer.
        if self.options.local and not is_loopback(_host(headers.get("host", ""))):
            return 403, "This server answers on this machine only: use 127.0.0.1 or localhost."
        changes = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if changes and headers.get("sec-fetch-site") not in (None, "same-origin", "none"):
            return 403, "A page of another site may not send requests to this server."
        if not self.options.local and scope["path"] not in OPEN_ROUTES and not self.knows(scope):
            return 401, (
                "A token is needed: open the address that the server printed, or send the header "
                "'Authorization: Bearer TOKEN'."
            )
        return None

    def entry(self, scope: Scope) -> ASGIApp | None:
        """Where an address with the token leads: to the same one without it, with a cookie."""
        params = QueryParams(scope["query_string"])
        if self.options.local or scope["method"] != "GET" or "token" not in params:
            return None
        rest = urlencode([pair for pair in params.multi_items() if pair[0] != "token"])
        answer = RedirectResponse(quote(scope["path"]) + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(COOKIE, params["token"], httponly=True, samesite="lax")
        return answer

    def knows(self, scope: Scope) -> bool:
        """Whether a request carries the token: in a header, a cookie, or the address."""
        headers = Headers(scope=scope)
        given = [bearer(headers), cookie_token(headers)]
        if scope["method"] in ("GET", "HEAD"):
            given.append(QueryParams(scope["query_string"]).get("token"))
        return any(same_token(one, self.options.token) for one in given)


def bearer(headers: Headers) -> str | None:
    """The token of the header Authorization."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def cookie_token(headers: Headers) -> str | None:
    """The token of the cookie."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def same_token(given: str | None, token: str | None) -> bool:
    """Compare two tokens in a time that does not say where they differ."""
    if given is None or token is None:
        return False
    return hmac.compare_digest(given.encode(errors="replace"), token.encode(errors="replace"))


def _host(header: str) -> str:
    """The name in a header Host, without the port."""
    if header.startswith("["):
        return header.partition("]")[0].strip("[")
    return header.rpartition(":")[0] if ":" in header else header


class _Body:
    """The body of a request: at most so many bytes, in at most so many seconds."""

    def __init__(self, receive: Receive, headers: Headers, options: ServeOptions) -> None:
        self._receive, self._options = receive, options
        self._left = options.max_upload
        self._deadline = time.monotonic() + options.seconds
        length = headers.get("content-length", "")
        self._too_long = length.isdecimal() and int(length) > options.max_upload

    async def __call__(self) -> Message:
        if self._too_long:
            await self._refuse_length()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408,
                f"The upload did not arrive within {self._options.seconds:g} seconds.",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                await self._refuse_length()
        return message

    async def _refuse_length(self) -> None:
        # Whoever still sends does not read the answer, and a closed connection would lose it.
        dropped, most = 0, 4 * self._options.max_upload
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while dropped < most:
                    message = await self._receive()
                    dropped += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        break
        except TimeoutError:
            pass
        raise HTTPException(
            413,
            f"The upload is larger than {self._options.max_upload:,} bytes, the limit of this "
            "server.",
            headers={"connection": "close"},
        )


class GuardedProtocol(H11Protocol):
    """HTTP whose headers must arrive in time: uvicorn itself would wait for them forever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A connection was opened."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Some bytes arrived."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self.send_400_response("The headers of the request did not arrive in time.")
