"""Who may speak to a served page, and how slowly."""

import asyncio
import contextlib
import socket
import threading
import time
import urllib.request

import pytest

from polyclinic.report.serve import server
from polyclinic.report.serve.app import OPEN, bare_app
from polyclinic.report.serve.server import CONTENT_POLICY, LONGEST, MOST_BYTES, Access

API = "/api/overview"


@pytest.mark.parametrize("path", ["/", "/style.css", "/shared.js", "/charts.js", "/folder.js", "/icon.svg"])
def test_the_empty_page_needs_no_token_and_has_strict_headers(served, path):
    answer = served.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == CONTENT_POLICY
    assert "unsafe" not in CONTENT_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert served.folder.name not in answer.text


JSON = {"content-type": "application/json"}
START = ("POST", "/api/start")
#: what is refused: method, path, headers beside (or in the place of) the token, and the status
REFUSED = [
    *(("GET", API, {"authorization": given}, 401) for given in (
        "", "Bearer ", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x", "BEARER {TOKEN}",
        "Bearer caf\u00e9".encode("latin-1"),
    )),
    ("GET", API, {"authorization": None, "cookie": "token={token}"}, 401),
    ("GET", API + "?token={token}", {"authorization": None, "x-token": "{token}"}, 401),
    # DNS rebinding: a page of evil.example whose name leads to 127.0.0.1 all at once
    *(("GET", path, {"host": host}, 421) for path in ("/", API, "/files/x") for host in (
        "evil.example", "evil.example:8642", "127.0.0.1:8643", "127.0.0.1", "localhost.evil.example:8642",
        "127.0.0.1:8642.evil.example", "0.0.0.0:8642", "127.0.0.1:8642@evil.example", "[::1]", "",
    )),
    # other pages can neither read nor act
    *((method, path, {**JSON, "origin": origin}, 403) for method, path in (("GET", API), START, ("GET", "/files/x"))
      for origin in ("http://evil.example", "null", "", "https://127.0.0.1:8642", "http://127.0.0.1:8643",
                     "http://127.0.0.1:8642.evil.example")),
    *((method, path, {**JSON, "sec-fetch-site": site}, 403) for site in ("cross-site", "same-site")
      for method, path in (("GET", API), START, ("GET", "/files/x"))),
    ("GET", API, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
    *((verb, path, {}, 405) for verb in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
      for path in ("/", API, "/api/start")),
    # a form of another page
    *((*START, {"content-type": kind}, 415)
      for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")),
    # pages about the program itself do not exist
    *(("GET", path, {}, 404) for path in ("/docs", "/redoc", "/openapi.json", "/api", "/static/folder.js", "/app.py")),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "headers", "status"), REFUSED, ids=str)
def test_a_request_that_is_refused(served, method, path, headers, status):
    def filled(value):
        return value if isinstance(value, bytes) else value.replace("{token}", served.access.token)

    given = {n: filled(value) for n, value in {**served.token, **headers}.items() if value is not None}
    answer = served.client.request(method, filled(path), headers=given, content=b'{"study": "study.toml"}')
    assert answer.status_code == status
    assert served.jobs.facts() == []


def test_the_token_opens_it_and_every_server_has_its_own(served):
    assert served.get(API).status_code == 200
    assert Access(1).token != Access(1).token
    assert len(Access(1).token) > 40
    assert served.access.token not in repr(served.access)


@pytest.mark.parametrize("host", ["127.0.0.1:8642", "localhost:8642", "LOCALHOST:8642", "[::1]:8642"])
def test_our_own_names_and_pages_may_ask(served, host):
    assert served.client.get(API, headers={**served.token, "host": host}).status_code == 200
    own = {"origin": "http://127.0.0.1:8642", "sec-fetch-site": "same-origin"}
    assert served.client.get(API, headers={**served.token, **own}).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}  # on another page, to ours
    assert served.client.get("/", headers=link).status_code == 200


def test_large_endless_and_ambiguous_requests_are_refused(served):
    json = {**served.token, **JSON}
    assert served.client.post("/api/stop", content=b"x" * (MOST_BYTES + 1), headers=json).status_code == 413
    assert served.client.get(API + "?" + "a" * LONGEST, headers=served.token).status_code == 414

    def parts():
        for _ in range(100):
            yield b" " * 10_000

    json = {**served.token, **JSON}
    assert served.client.post("/api/stop", content=parts(), headers=json).status_code >= 400
    twice = [("host", "127.0.0.1:8642"), ("host", "evil.example"), *served.token.items()]
    assert served.client.get(API, headers=twice).status_code == 400


def test_a_websocket_is_closed(served):
    sent: list = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    asyncio.run(served.app({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.fixture
def listening():
    found = server.listen("127.0.0.1", 0)
    yield found
    found.socket.close()


@pytest.fixture
def running(listening, monkeypatch):
    monkeypatch.setattr(server, "MOST_WAITING", 80)
    app = server.Guard(bare_app("a test", "/site.js"), listening.access, OPEN)
    made = server.make(app)
    thread = threading.Thread(target=made.run, kwargs={"sockets": [listening.socket]})
    thread.start()
    yield listening.access.port
    made.should_exit = True
    thread.join()


def page(port):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20).status


def slow(port, text=b"GET / HTTP/1.1\r\nHost: "):
    one = socket.create_connection(("127.0.0.1", port))
    one.sendall(text)
    return one


def test_the_address_answers_as_soon_as_it_is_printed(listening):
    socket.create_connection(("127.0.0.1", listening.access.port), timeout=5).close()


@pytest.mark.parametrize("text", [b"", b"GET / HTTP/1.1\r\nHost: "])
def test_the_page_opens_beside_many_slow_connections(running, text):
    held = [slow(running, text) for _ in range(150)]
    assert page(running) == 200
    assert page(running) == 200
    for one in held:
        one.close()


def test_a_connection_without_a_whole_request_is_closed_in_time(running, monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    one = slow(running)
    one.settimeout(20)
    begun = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        assert one.recv(1) == b""
    assert time.monotonic() - begun < 15
    again = slow(running, f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{running}\r\n\r\nGET / HT".encode())
    again.settimeout(20)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := again.recv(65536):  # the first is answered, and the half of a second one is not waited for
            got += part
    assert got.startswith(b"HTTP/1.1 200")


def test_a_request_beyond_the_most_is_told_so(listening, monkeypatch):
    monkeypatch.setattr(server, "MOST_REQUESTS", 0)
    from starlette.testclient import TestClient

    client = TestClient(server.Guard(bare_app("a test", "/site.js"), listening.access, OPEN))
    assert client.get("/", headers={"host": f"127.0.0.1:{listening.access.port}"}).status_code == 503
