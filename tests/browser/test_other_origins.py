"""What a web page of another origin, and a name that was rebound to this machine, get from a gateway without keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline_testing.echo_router import EchoRouter

REBOUND = "evil.example"
# A simple request, which a browser sends without asking first; one with JSON's type, which it asks for; and a read.
ATTACKS = """async (url) => {
    const body = JSON.stringify({prompt: "stolen", max_tokens: 3});
    const ask = async (path, options) => {
        try {
            const answer = await fetch(url + path, options);
            return answer.status + " " + await answer.text();
        } catch (error) {
            return "refused";
        }
    };
    const json = {"Content-Type": "application/json"};
    const sent = await fetch(url + "/v1/completions", {method: "POST", mode: "no-cors", body});
    return [
        sent.type,
        await ask("/v1/completions", {method: "POST", body}),
        await ask("/v1/completions", {method: "POST", body, headers: json}),
        await ask("/v1/models", {}),
        await ask("/metrics", {}),
    ];
}"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>another site</title>")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def other_site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def test_a_page_of_another_origin_makes_the_server_do_nothing_and_reads_nothing(
    page: Any, gateway: tuple[str, EchoRouter], router: EchoRouter, other_site: str
) -> None:
    page.goto(other_site)
    assert page.evaluate(ATTACKS, gateway[0]) == ["opaque", "refused", "refused", "refused", "refused"]
    assert router.requests == []  # not even the simple request, which came through, was carried out
    page.goto(gateway[0])
    assert page.evaluate(ATTACKS, gateway[0])[2].startswith("200 ")  # the attack is none from the page itself
    assert len(router.requests) == 1


def test_a_name_that_was_rebound_to_this_machine_is_refused(
    page: Any, gateway: tuple[str, EchoRouter], router: EchoRouter
) -> None:
    rebound = gateway[0].replace("127.0.0.1", REBOUND)
    answer = page.goto(rebound)
    assert answer.status == 403
    assert "gateway.allowed_hosts" in answer.text()
    said = page.evaluate(ATTACKS, rebound)  # of its own origin, so that the browser hides nothing
    assert [text.partition(" ")[0] for text in said[1:]] == ["403"] * 4
    assert router.requests == []
