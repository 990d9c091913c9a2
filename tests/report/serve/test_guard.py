"""Who may ask at all: the name in the address, the page that a request comes from, the token, the size."""

from __future__ import annotations

import asyncio

import pytest

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


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic {token}"},
        {"authorization": "{token}"},
        {"authorization": "Bearer {token}x"},
        {"authorization": "Bearer {token}".upper()},
        {"cookie": "token={token}"},
        {"x-token": "{token}"},
        {"authorization": "Bearer caf\u00e9".encode("latin-1")},
    ],
)
def test_everything_else_needs_the_token(served, headers):
    filled = {
        name: value if isinstance(value, bytes) else value.replace("{token}", served.access.token)
        for name, value in headers.items()
    }
    assert served.client.get(API, headers=filled).status_code == 401
    assert served.client.get(f"{API}?token={served.access.token}").status_code == 401


def test_the_token_opens_it_and_every_server_has_its_own(served):
    assert served.get(API).status_code == 200
    assert Access(1).token != Access(1).token
    assert len(Access(1).token) > 40
    assert served.access.token not in repr(served.access)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "127.0.0.1:8643",
        "127.0.0.1",
        "localhost.evil.example:8642",
        "127.0.0.1:8642.evil.example",
        "0.0.0.0:8642",
        "127.0.0.1:8642@evil.example",
        "[::1]",
        "",
    ],
)
def test_a_name_that_is_not_ours_is_refused_even_for_the_page(served, host):
    """DNS rebinding: a page of evil.example whose name leads to 127.0.0.1 all at once."""
    for path in ("/", API, "/files/x"):
        assert served.client.get(path, headers={**served.token, "host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8642", "localhost:8642", "LOCALHOST:8642", "[::1]:8642"])
def test_our_own_names_are_taken(served, host):
    assert served.client.get(API, headers={**served.token, "host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "https://127.0.0.1:8642"},
        {"origin": "http://127.0.0.1:8643"},
        {"origin": "http://127.0.0.1:8642.evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_pages_can_neither_read_nor_act(served, headers):
    assert served.client.get(API, headers={**served.token, **headers}).status_code == 403
    assert (
        served.client.post("/api/start", json={"study": "study.toml"}, headers=served.token | headers).status_code
        == 403
    )
    assert served.client.get("/files/runs/first/result.json", headers=headers).status_code == 403
    assert served.jobs.facts() == []


def test_a_link_on_another_page_may_lead_to_the_page(served):
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert served.client.get("/", headers=link).status_code == 200
    assert served.client.get(API, headers={**served.token, **link}).status_code == 403


def test_our_own_page_may_ask(served):
    own = {"origin": "http://127.0.0.1:8642", "sec-fetch-site": "same-origin"}
    assert served.client.get(API, headers={**served.token, **own}).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_other_verbs_are_refused(served, method):
    for path in ("/", API, "/api/start"):
        assert served.client.request(method, path, headers=served.token).status_code == 405


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_form_of_another_page_starts_nothing(served, kind):
    headers = {**served.token, "content-type": kind}
    assert served.client.post("/api/start", content=b'{"study": "study.toml"}', headers=headers).status_code == 415
    assert served.jobs.facts() == []


def test_large_and_long_requests_are_refused(served):
    json = {**served.token, "content-type": "application/json"}
    assert served.client.post("/api/stop", content=b"x" * (MOST_BYTES + 1), headers=json).status_code == 413
    assert served.client.get(API + "?" + "a" * LONGEST, headers=served.token).status_code == 414


def test_a_body_of_unknown_length_is_cut_off(served):
    def parts():
        for _ in range(100):
            yield b" " * 10_000

    json = {**served.token, "content-type": "application/json"}
    assert served.client.post("/api/stop", content=parts(), headers=json).status_code >= 400


def test_two_headers_of_one_name_are_refused(served):
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


def test_pages_about_the_program_itself_do_not_exist(served):
    for path in ("/docs", "/redoc", "/openapi.json", "/api", "/static/folder.html", "/app.py"):
        assert served.get(path).status_code == 404
