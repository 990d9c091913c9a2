"""The server: a port, an address with its token, and a guard that every request passes first.

A web page of somebody else, open in the same browser, must neither read this server nor act through it. So the name in
the address is checked (DNS rebinding), requests that come from other pages are refused (CSRF), and everything but the
empty page itself needs a token that only the terminal has shown. Other users of this machine have no token either.
"""

import asyncio
import errno
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from polyclinic.errors import BadInput

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
#: bytes that a request may carry: the longest is a few names
MOST_BYTES = 64 * 1024
#: characters of a path with its query
LONGEST = 8000
#: for our own pages: nothing from elsewhere, nothing inline, in no frame
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """Names under which the server may be called, and the secret of those who may ask."""

    port: int
    names: tuple[str, ...] = LOOPBACK
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def hosts(self) -> set[str]:
        """Host headers that are ours."""
        return {f"{name}:{self.port}" for name in self.names} | (set(self.names) if self.port == 80 else set())

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def key_for(self, what: str) -> str:
        """A key to one file: it stands in a link, where the token itself must not."""
        return hmac.new(self.token.encode(), what.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    def is_key_for(self, what: str, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.key_for(what).encode())


class Refused(Exception):  # noqa: N818
    """A request that goes no further: status and one sentence."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class Guard:
    """ASGI middleware around the application."""

    def __init__(self, app: App, access: Access, open_paths: Iterable[str] = ()) -> None:
        """`open_paths` need no token: they hold nothing but the empty page. Files have keys of their own."""
        self.app, self.access, self.open_paths = app, access, frozenset(open_paths)
        self.at_work = 0  # requests that have passed

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket, which nothing here speaks
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check(scope)
        except Refused as refused:
            await _answer(send, refused.status, refused.words)
            return
        if self.at_work >= MOST_REQUESTS:
            await _answer(send, 503, "the server has too much to do; try again in a moment")
            return
        self.at_work += 1
        try:
            await self.app(scope, _bounded(receive), _with_headers(send))
        finally:
            self.at_work -= 1

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        if len(scope["path"]) + len(scope.get("query_string", b"")) > LONGEST:
            raise Refused(414, "the address is too long")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused(405, "the server answers GET and POST only")
        if _one(headers, "host").lower() not in self.access.hosts:
            raise Refused(421, "this server is not called so; use the address that `polyclinic serve` printed")
        opens_page = scope["method"] == "GET" and scope["path"] in self.open_paths
        if not (opens_page and _one(headers, "sec-fetch-mode") == "navigate"):  # a link elsewhere may lead to the page
            self._check_origin(headers)
        if scope["method"] == "POST":
            _check_body(headers)
        elif scope["path"] in self.open_paths or scope["path"].startswith("/files/"):
            return
        kind, _, given = _one(headers, "authorization").partition(" ")
        if kind.lower() != "bearer" or not self.access.is_token(given.strip()):
            raise Refused(401, "this needs the token: open the address that `polyclinic serve` printed")

    def _check_origin(self, headers: dict[str, list[str]]) -> None:
        """A browser says which page a request comes from; a program says nothing."""
        origin, fetch = _one(headers, "origin").lower(), _one(headers, "sec-fetch-site").lower()
        ours = {f"http://{host}" for host in self.access.hosts}
        if ("origin" in headers and origin not in ours) or fetch in ("cross-site", "same-site"):
            raise Refused(403, "requests from other pages are refused")


def _one(headers: dict[str, list[str]], name: str) -> str:
    """The value of a header; nothing where it is missing. Two are refused: readers disagree which one counts."""
    values = headers.get(name, [])
    if len(values) > 1:
        raise Refused(400, f"the header {name} is there more than once")
    return values[0] if values else ""


def _check_body(headers: dict[str, list[str]]) -> None:
    kind = _one(headers, "content-type").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of another page cannot send this without being asked about first
        raise Refused(415, "send JSON (content-type: application/json)")
    length = _one(headers, "content-length")
    if length and (not length.isdigit() or len(length) > 9 or int(length) > MOST_BYTES):
        raise Refused(413, f"a request has at most {MOST_BYTES} bytes")


def _bounded(receive: Receive) -> Receive:
    """The body of a request, cut off where it is longer than it may be: not every request says how long it is."""
    taken = 0

    async def read() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        return {"type": "http.disconnect"} if taken > MOST_BYTES else message

    return read


def _with_headers(send: Send) -> Send:
    """Add what every answer says; an answer that has a content policy of its own keeps it."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", [])}
            more = {**HEADERS, "content-security-policy": CONTENT_POLICY}
            added = [(name.encode(), value.encode()) for name, value in more.items() if name.encode() not in given]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return answer


async def _answer(send: Send, status: int, words: str) -> None:
    body = json.dumps({"error": words}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    send = _with_headers(send)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


#: requests at once of who has passed the guard: a browser sends six
MOST_REQUESTS = 64
#: connections that may wait for the head of a request, and seconds that each has for it
MOST_WAITING, HEAD_SECONDS = 256, 10.0


class PromptProtocol(H11Protocol):
    """A connection that brings no whole head of a request in time is closed; of too many, the one that waits longest.
    So connections that say nothing, or say it slowly, shut nobody out."""

    waiting: ClassVar["dict[PromptProtocol, None]"] = {}
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._end_wait()
        self.waiting[self] = None
        self.timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        if len(self.waiting) > MOST_WAITING:
            next(iter(self.waiting)).transport.abort()

    def _end_wait(self) -> None:
        self.waiting.pop(self, None)
        if self.timer is not None:
            self.timer.cancel()


@dataclass(frozen=True)
class Listening:
    """A socket that is bound, and who may ask."""

    socket: socket.socket
    access: Access
    host: str

    @property
    def address(self) -> str:
        """The address to open in a browser. The token stands behind '#': no browser sends that part to anybody."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.access.port}/#token={self.access.token}"


def listen(host: str, port: int, names: tuple[str, ...] = ()) -> Listening:
    """Bind the address; `names` are further names under which browsers may call the server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)  # the address that is printed next answers
    except (OSError, OverflowError, UnicodeError) as error:
        bound.close()
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        reason = "is taken already" if taken else f"cannot be used ({getattr(error, 'strerror', None) or error})"
        raise BadInput(f"--host {host} --port {port}: this address {reason}; choose another --port") from None
    own = [] if host in ("0.0.0.0", "::", "") else [f"[{host}]" if ":" in host else host]
    called = (*LOOPBACK, *names, *own)
    lower = tuple(dict.fromkeys(name.lower() for name in called))
    return Listening(bound, Access(bound.getsockname()[1], lower), host)


def is_loopback(host: str) -> bool:
    """True for an address that is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make(app: App) -> uvicorn.Server:
    """A server that says nothing about itself, trusts no header of a proxy, and speaks plain HTTP only."""
    config = uvicorn.Config(
        app,
        http=PromptProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)
