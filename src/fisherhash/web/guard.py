"""What stands between the network and the application: who may ask, how much, and how long.

Every refusal is an answer of the 4xx kind with a sentence. Strict headers go with every answer: no
page runs a script or loads anything that this server did not send.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

import h11
from fastapi import HTTPException
from fastapi.responses import RedirectResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client import generate_latest as as_text
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
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
OPEN_ROUTES = ("/healthz",)
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


class Guard:
    """The outermost layer of the application.

    Args:
        app: what it guards.
        options: who may ask, and the limits.
        metrics: counts the requests.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: RequestMetrics) -> None:
        self.app, self.options, self.metrics = app, options, metrics
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
            app = self.refusal(scope) or self.entry(scope)
            if app is not None:
                await app(scope, receive, answer)
                return
            headers = Headers(scope=scope)
            body = _Body(receive, headers, self.options)
            # Python cannot stop a thread: what takes too long ends on its own, unanswered.
            task = asyncio.ensure_future(self.app(scope, body, in_time))
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
            self.metrics.observe(route, status or 500, time.perf_counter() - began)

    def refusal(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request that is refused; None for any other."""
        headers = Headers(scope=scope)
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
        if not self.options.local and scope["path"] not in OPEN_ROUTES and not self.knows(scope):
            text = "A token is needed: open the address that the server printed, or send the "
            return error_answer(scope, 401, text + "header 'Authorization: Bearer TOKEN'")
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
        given = [bearer(headers), _cookie_token(headers)]
        if scope["method"] == "GET":
            given.append(QueryParams(scope["query_string"]).get("token"))
        return any(same_token(one, self.options.token) for one in given)


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

    def __init__(self, receive: Receive, headers: Headers, options: ServeOptions) -> None:
        self._receive, self._options = receive, options
        self._left = options.max_upload
        self._deadline = time.monotonic() + options.seconds
        length = headers.get("content-length", "")
        self._too_long = length.isdecimal() and int(length) > options.max_upload

    async def __call__(self) -> Message:
        if self._too_long:
            await self._refuse(more=True)
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408,
                f"The upload did not arrive within {self._options.seconds:g} seconds",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                await self._refuse(more=message.get("more_body", False))
        return message

    async def _refuse(self, *, more: bool) -> None:
        # Whoever still sends does not read the answer, and a closed connection would lose it.
        dropped, most = 0, 4 * self._options.max_upload
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while more and dropped < most:
                    message = await self._receive()
                    dropped += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            pass
        text = f"The upload is larger than {self._options.max_upload:,} bytes, the limit here"
        raise HTTPException(413, text, headers={"connection": "close"})


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
            self._timer = self.loop.call_later(HEADER_SECONDS, self._end)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self.send_400_response("The headers of the request did not arrive in time.")


class RequestMetrics:
    """How often each route answered, with what, and how fast; summed over worker processes."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        self._requests = Counter(
            "fisherhash_requests",
            "Requests by route and kind of status.",
            ("route", "status"),
            registry=self._own,
        )
        self._seconds = Histogram(
            "fisherhash_request_seconds",
            "Time from the request to the whole answer.",
            ("route",),
            registry=self._own,
        )

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, f"{status // 100}xx").inc()
        self._seconds.labels(route).observe(seconds)

    def render(self, facts: dict[str, tuple[str, float]]) -> bytes:
        """All counters in the text format of Prometheus.

        Args:
            facts: further numbers by name, each with what it is.
        """
        rest = CollectorRegistry()
        rest.register(_Facts([GaugeMetricFamily(name, *fact) for name, fact in facts.items()]))
        ProcessCollector(registry=rest)
        if os.environ.get(COUNTERS_VARIABLE):
            MultiProcessCollector(rest)
            return as_text(rest)
        return as_text(self._own) + as_text(rest)


class _Facts(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """The numbers."""
        return self._metrics
