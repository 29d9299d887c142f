"""What a pod that ends is told of its requests, by servers of all kinds, and how long it waits for them."""

import math
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from cluster.deploy import drain
from cluster.deploy.drain import metrics_reader, ongoing_requests
from paceline_testing.clock import Clock

BUSY = 'ray_serve_num_ongoing_http_requests{NodeId="a"} 2.0\nray_serve_num_ongoing_grpc_requests{NodeId="a"} 1.0\n'
QUIET = 'ray_serve_num_ongoing_http_requests{NodeId="a"} 0.0\nray_other 7.0\n'
HEAD = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (BUSY, 3),
        (QUIET, 0),
        ("", 0),
        ("<html>not these</html>\nwrong{ line\n" + BUSY, 3),  # what others write there must not end streams
        ("ray_serve_num_ongoing_http_requests 4 1700000000\n", 4),
        ('ray_serve_replica_processing_queries{NodeId="a",deployment="Gateway",replica="x"} 3.0\n', 3),
        ('ray_serve_replica_processing_queries{deployment="Router",replica="Gateway"} 3.0\n', 0),
        ("ray_serve_num_ongoing_http_requests_total 4\n", 0),
        ("ray_serve_num_ongoing_http_requests lots\n", math.inf),
    ],
)
def test_requests_of_both_protocols_are_counted(text, number):
    assert ongoing_requests(text) == number


@contextmanager
def serving(answer):
    """A server that calls answer(connection) for each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones = []

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_ones.append(connection)
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in open_ones:
            connection.close()


def send(text):
    def answer(connection):
        connection.recv(4096)
        connection.sendall(text.encode())
        connection.close()

    return answer


def hang(connection):
    connection.recv(4096)


def drip(connection):
    connection.recv(4096)
    try:
        connection.sendall(HEAD.encode())
        while True:
            connection.sendall(b"x")
            time.sleep(0.01)
    except OSError:
        return


@pytest.mark.parametrize(
    ("answer", "ongoing"),
    [
        (send(HEAD + BUSY), 3),
        (send(HEAD + QUIET), 0),
        (send(HEAD.replace("200 OK", "500 Oh") + QUIET), math.inf),
        (send("SSH-2.0-OpenSSH\r\n"), math.inf),
        (send(""), math.inf),
        (hang, math.inf),
        (drip, math.inf),
    ],
)
def test_a_page_is_read_in_a_while_or_not_at_all(answer, ongoing, monkeypatch):
    monkeypatch.setattr(drain, "_READ_S", 0.5)
    with serving(answer) as url:
        assert metrics_reader(url)() == ongoing


def test_a_page_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(drain, "_MAX_BYTES", 1000)
    with serving(send(HEAD + "#" * 2000)) as url:
        assert metrics_reader(url)() == math.inf


def test_where_nobody_listens_ray_has_ended():
    with serving(hang) as url:
        pass
    assert metrics_reader(url)() is None


def test_no_proxy_stands_between_a_pod_and_itself(monkeypatch):
    with serving(send(HEAD + QUIET)) as proxy, serving(send(HEAD + BUSY)) as url:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)
        assert metrics_reader(url)() == 3


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://host/metrics", "http://", "http://host:99999999/"])
def test_what_is_no_url_is_refused_in_one_line(refuse, url):
    line = refuse("k8s", "drain", "--metrics", url, "--settle-s", "0", "--limit-s", "0")
    assert line.startswith(f"--metrics is {url!r}: ")


@pytest.mark.parametrize(
    ("ongoing", "limit_s", "is_quiet", "waited_s"),
    [
        (lambda now: 3.0 if now < 100 else 0.0, 600, True, 120),  # until the last request, and then a while
        (lambda now: None, 600, True, 12),  # Ray has ended
        (lambda now: 3.0, 60, False, 60),
        (lambda now: math.inf, 60, False, 60),  # nobody can tell
    ],
)
def test_a_pod_waits_for_its_last_request_and_no_longer_than_its_limit(ongoing, limit_s, is_quiet, waited_s):
    clock = Clock()

    def sleep(seconds):
        clock.now += seconds

    assert drain.drain(lambda: ongoing(clock.now), 5, limit_s, clock, sleep) == is_quiet
    assert waited_s <= clock.now < waited_s + 10
