"""Connections that say nothing, or say it slowly, shut nobody out of a page."""

import contextlib
import socket
import threading
import time
import urllib.request

import pytest

from polyclinic.report.serve import server
from polyclinic.report.serve.app import OPEN, bare_app


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
