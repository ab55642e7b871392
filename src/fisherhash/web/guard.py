"""What stands between the network and the application: who may connect, how much, and how long.

Every refusal is an answer of the 4xx kind with a sentence. Strict headers go with every answer: no
page runs a script or loads anything that this server did not send.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

import h11
from fastapi import HTTPException
from fastapi.responses import RedirectResponse
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fisherhash.web.options import ServeOptions, is_loopback
from fisherhash.web.rendering import error_answer

MOST_HEADERS = 100
LONGEST_URL = 16 << 10
HEADER_SECONDS = 10.0
"""How long the headers of a request may take to arrive."""
DRAIN_SECONDS = 2.0
"""How long a refused body is still read, so that its sender gets to see the answer."""
COOKIE = "fisherhash-token"
OPEN_ROUTE = "/healthz"
"""What needs no token on any address."""
COUNTERS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder in which the worker processes of a server share their counters."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
REQUESTS = Counter(
    "fisherhash_requests", "Requests by route and kind of status.", ("route", "status")
)
SECONDS = Histogram(
    "fisherhash_request_seconds", "Time from the request to the whole answer.", ("route",)
)


def render_metrics() -> bytes:
    """All counters in the text format of Prometheus, summed over worker processes."""
    if not os.environ.get(COUNTERS_VARIABLE):
        return generate_latest()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class Guard:
    """The outermost layer of the application.

    Args:
        app: what it guards.
        options: who may connect, and the limits.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self.app, self.options = app, options
        self._late: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, late = time.perf_counter(), 0, False
        if scope["method"] == "HEAD":  # the protocol leaves the body out
            scope = {**scope, "method": "GET"}

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = status or message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        async def in_time(message: Message) -> None:
            if not late:
                await answer(message)

        try:
            headers = Headers(scope=scope)
            if app := self.refusal(scope, headers):
                await app(scope, receive, answer)
                return
            # Python cannot stop a thread: what takes too long ends on its own, unanswered.
            task = asyncio.ensure_future(self.app(scope, _Body(receive, self.options), in_time))
            limit = self.options.seconds
            if {"content-length", "transfer-encoding"} & set(headers):
                limit = 2 * limit + DRAIN_SECONDS
            await asyncio.wait({task}, timeout=limit)
            if task.done() or status:
                await task
                return
            late = True
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            text = f"This took longer than {self.options.seconds:g} seconds"
            await error_answer(scope, 503, text)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            REQUESTS.labels(route, f"{(status or 500) // 100}xx").inc()
            SECONDS.labels(route).observe(time.perf_counter() - began)

    def refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        """The answer to a request that does not reach the application; None for any other."""
        if len(scope["headers"]) > MOST_HEADERS:
            return error_answer(scope, 431, f"The request has more than {MOST_HEADERS} headers")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > LONGEST_URL:
            return error_answer(scope, 414, f"The address is longer than {LONGEST_URL:,} bytes")
        # A page of another site could let its own name point here, and read what we answer.
        if self.options.local and not is_loopback(_host(headers.get("host", ""))):
            text = "This server answers on this machine only: use 127.0.0.1 or localhost"
            return error_answer(scope, 403, text)
        changes = scope["method"] not in ("GET", "OPTIONS")
        if changes and headers.get("sec-fetch-site") not in (None, "same-origin", "none"):
            text = "A page of another site may not send requests to this server"
            return error_answer(scope, 403, text)
        if self.options.local or scope["path"] == OPEN_ROUTE:
            return None
        params = QueryParams(scope["query_string"] if scope["method"] == "GET" else b"")
        known = self.options.token
        if same_token(params.get("token"), known):
            # The same address without the token, which a cookie holds from now on.
            rest = urlencode([pair for pair in params.multi_items() if pair[0] != "token"])
            answer = RedirectResponse(quote(scope["path"]) + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, params["token"], httponly=True, samesite="lax")
            return answer
        if same_token(bearer(headers), known) or same_token(_cookie_token(headers), known):
            return None
        text = "A token is needed: open the address that the server printed, or send the "
        return error_answer(scope, 401, text + "header 'Authorization: Bearer TOKEN'")


def bearer(headers: Headers) -> str | None:
    """The token of the header Authorization."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def _cookie_token(headers: Headers) -> str | None:
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

    def __init__(self, receive: Receive, options: ServeOptions) -> None:
        self._receive, self._options = receive, options
        self._left = options.max_upload
        self._deadline = time.monotonic() + options.seconds

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            text = f"The upload did not arrive within {self._options.seconds:g} seconds"
            raise HTTPException(408, text, headers={"connection": "close"}) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            await self._drain(message)
            text = f"The upload is larger than {self._options.max_upload:,} bytes, the limit here"
            raise HTTPException(413, text, headers={"connection": "close"})
        return message

    async def _drain(self, message: Message) -> None:
        """Read on for a while: whoever still sends does not see the answer yet."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while message.get("more_body") and self._left > -4 * self._options.max_upload:
                    message = await self._receive()
                    self._left -= len(message.get("body", b""))
        except TimeoutError:
            pass


class GuardedProtocol(H11Protocol):
    """HTTP whose headers must arrive in time: uvicorn itself would wait for them forever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A connection was opened."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some bytes arrived."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """Run a clock while the headers of a request are due."""
        if self.conn.their_state is h11.IDLE:
            self._timer = self._timer or self.loop.call_later(HEADER_SECONDS, self._end)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self.send_400_response("The headers of the request did not arrive in time.")
