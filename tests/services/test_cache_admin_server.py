"""The administrators' server: the same actions over HTTP, for those who have the credential.

Covers `cluster.cache.admin.errors`, `cluster.cache.admin.http_app`, `cluster.cache.admin.store_access` and
`cluster.cli.cache.admin_server`.
"""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest

from actors.errors import InvalidRequest
from actors.home import paceline_home
from actors.models.catalog import resolve_model
from cache_service.admin.administration import CacheAdministration
from cache_service.admin.audit_log import AuditLog
from cache_service.formats.key_ring import KeyRing
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.admin.credential import Credential, load_credential
from cluster.cache.admin.documents import ImportModel
from cluster.cache.admin.names import Names
from cluster.cache.admin.server import AdminServerSettings, serve_admin
from cluster.cache.admin.service import CacheAdminService
from cluster.cache.admin.work import Work, lines, pulled
from cluster.errors import ConfigError
from cluster.tenants.registry_file import read_registry
from paceline_testing.cache_stores import PATIENCE_S, Namespace, kill, piece
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model

TOKEN = "a-credential-of-32-characters-00"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with EmbeddedServer(tmp_path_factory.mktemp("cache")) as server:
        yield server


@contextmanager
def running(service):
    """In a thread: the port."""
    ports, loop, stop = [], asyncio.new_event_loop(), asyncio.Event()
    is_ready = threading.Event()

    def ready(port):
        ports.append(port)
        is_ready.set()

    settings = AdminServerSettings(port=0)
    serving = serve_admin(service, Credential(TOKEN, "test"), settings, stop, ready)
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
    thread.start()
    try:
        assert is_ready.wait(PATIENCE_S)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        loop.close()


def test_an_import_that_has_stalled_is_told_that_the_server_stops(redis_server, target, monkeypatch, caplog):
    monkeypatch.setattr("cluster.cache.admin.server._DRAIN_S", 1)
    model = ImportModel(resolve_model(str(target), paceline_home()))
    namespace = Namespace(redis_server.settings, "open.docs")
    service = CacheAdminService(CacheAdministration(namespace.connection), lambda: model, Names)
    head = f"POST /v1/cache/namespaces/docs/documents HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    with running(service) as port:
        client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        client.sendall(f"{head}Content-Length: 99\r\nExpect: 100-continue\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 100 "), "it waits for the document"
        client.sendall(b'{"text": ')
    with client:
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"stopping"' in answer
    assert not [record for record in caplog.records if record.exc_info]
    namespace.connection.close()


@pytest.fixture(scope="module")
def audit_file(tmp_path_factory):
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def port(redis_server, target, audit_file):
    connection = Namespace(redis_server.settings).connection
    administration = CacheAdministration(connection, audit=AuditLog(audit_file))
    model = ImportModel(resolve_model(str(target), paceline_home()))
    with running(CacheAdminService(administration, lambda: model, Names)) as port:
        yield port


@pytest.fixture
def http(port, redis_server):
    Namespace(redis_server.settings).redis.flushall()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/cache", headers=BEARER, timeout=PATIENCE_S) as client:
        yield client


def ids(text):
    return list(make_byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


ROWS = b"".join(json.dumps(row).encode() + b"\n" for row in [{"text": "some text"}, {"token_ids": [1, 2]}])


def test_documents_come_and_go_over_http(http, audit_file):
    place = "/namespaces/docs/documents"
    assert http.post(place, content=ROWS).json() == {
        "documents": 2, "tokens": 11, "known_documents": 0, "known_tokens": 0, "dropped_generations": 0,
        "stored_bytes": pytest.approx(100, abs=99),
    }  # fmt: skip
    answer = http.post(place, content="Grüße".encode(), headers={"Content-Type": "text/plain; charset=utf-8"})
    assert (answer.status_code, answer.json()["documents"]) == (200, 1)
    exported = http.get(place)
    assert exported.headers["content-type"] == "application/x-ndjson"
    header, *pieces = map(json.loads, exported.text.splitlines())
    assert header["namespace"] == "open.docs"
    assert sorted(row["token_ids"] for row in pieces) == sorted([ids("some text"), [1, 2], ids("Grüße")])
    assert http.post("/namespaces/copy/documents", content=exported.content).json()["documents"] == 3
    assert http.post("/namespaces/copy/documents", content=iter([exported.content])).json()["known_documents"] == 3
    listed = http.get("/namespaces").json()["namespaces"]
    assert [each["namespace"] for each in listed] == ["open.copy", "open.docs"]
    assert http.get("/namespaces", params={"fingerprint": "other"}).json() == {"namespaces": []}
    stats = http.get("/namespaces/docs").json()
    assert (stats["documents"], stats["tokens"], stats["earnings"]["hits"]) == (3, 11 + len(ids("Grüße")), 0)
    assert http.post("/namespaces/docs/compact").json()["is_busy"] is False
    assert http.post("/namespaces/docs/verify").json()["problems"] == []
    (purged,) = http.delete("/namespaces/docs", params={"since_s": 5, "until_s": 6}).json()["purged"]
    assert purged["tokens"] == 0
    assert http.get("/namespaces/docs").status_code == 200
    assert http.delete("/namespaces/docs").json()["purged"][0]["namespace"] == "open.docs"
    assert http.get("/namespaces/docs").status_code == 404
    actors = {json.loads(line)["actor"] for line in audit_file.read_text().splitlines()}
    assert any(actor.startswith("http 127.0.0.1:") for actor in actors)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "words"),
    [
        ("GET", "/namespaces/absent", b"", 404, "namespace_not_found", "no namespace 'open.absent'"),
        ("GET", "/namespaces/No%20Name", b"", 400, "invalid_value", "namespace is 'No Name'"),
        ("DELETE", "/namespaces/docs?since_s=x", b"", 400, "invalid_value", "since_s is 'x'"),
        ("DELETE", "/namespaces/docs?since_s=9&until_s=8", b"", 400, "invalid_value", "not be later than until_s"),
        ("DELETE", "/tenants/acme", b"", 400, "invalid_value", "there are no tenants"),
        ("POST", "/namespaces/docs/documents", b'{"text": "x"}\nno', 400, "invalid_document", "body:2: not valid JSON"),
        ("POST", "/namespaces/docs/documents?fingerprint=x", b"", 400, "invalid_value", "imports here are for"),
        ("POST", "/namespaces/docs/documents", b'{"token_ids": [259]}', 400, "invalid_document", "0 to 258"),
        ("GET", "/namespaces/docs?fingerprint=" + "f" * 10_000, b"", 404, "namespace_not_found", "of model 'ffff"),
        ("GET", "/nothing", b"", 404, "not_found", "Not Found"),
        ("PUT", "/namespaces", b"", 405, "method_not_allowed", "Method Not Allowed"),
    ],
)
def test_what_is_refused_over_http_says_why(http, method, path, content, status, code, words):
    answer = http.request(method, path, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert words in answer.json()["error"]["message"]


def test_without_the_credential_nothing_is_read(port):
    url = f"http://127.0.0.1:{port}"
    for headers in (
        {}, {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}, [("Authorization", f"Bearer {TOKEN}")] * 2,
    ):  # fmt: skip
        for path in ("/v1/cache/namespaces", "/v1/cache/namespaces/docs/documents", "/nothing", "/openapi.json"):
            answer = httpx.post(url + path, headers=headers, content=b"garbage")
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{url}/livez").status_code == 200


def test_an_outage_is_told_and_passes(tmp_path, target):
    with EmbeddedServer(tmp_path) as server:
        namespace = Namespace(server.settings, "open")
        namespace.append(piece("a", 0, [1]))
        service = CacheAdminService(CacheAdministration(namespace.connection), lambda: None, Names)
        with running(service) as port:
            url = f"http://127.0.0.1:{port}/v1/cache/namespaces"
            assert len(httpx.get(url, headers=BEARER, timeout=PATIENCE_S).json()["namespaces"]) == 1
            kill(server)
            answer = httpx.get(url, headers=BEARER, timeout=PATIENCE_S)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            server.restart()
            assert httpx.get(url, headers=BEARER, timeout=PATIENCE_S).status_code == 200


def test_tenants_that_cannot_be_read_are_no_fault_of_the_caller(redis_server, tmp_path):
    file = tmp_path / "tenants.json"
    file.write_text('{"version": 1, "tenants": [')
    namespace = Namespace(redis_server.settings)
    administration = CacheAdministration(namespace.connection)
    service = CacheAdminService(administration, lambda: None, lambda: Names(read_registry(file)))
    with running(service) as port:
        url = f"http://127.0.0.1:{port}/v1/cache/namespaces/-"
        answer = httpx.get(url, params={"tenant": "acme"}, headers=BEARER, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unusable")
        assert str(file) in answer.json()["error"]["message"]
    namespace.connection.close()


def test_an_export_tells_what_it_could_not_read(http, redis_server):
    secret = Namespace(redis_server.settings, "open", ring=KeyRing({1: b"1" * 32}))
    secret.append(piece("a", 0, [1]))
    assert http.get("/namespaces/open/documents").json()["error"]["code"] == "namespace_unread"
    Namespace(redis_server.settings, "open").append(piece("b", 0, [2]))
    exported = http.get("/namespaces/open/documents")
    assert (len(exported.text.splitlines()), exported.headers["x-paceline-unread"]) == (2, "1")


async def test_who_comes_when_all_threads_are_busy_is_told_to_come_again():
    from actors.errors import Overloaded

    work, release = Work("actions", 2), threading.Event()
    busy = [asyncio.create_task(work.run(release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 actions are under way"):
        await work.run(lambda: None)
    release.set()
    assert await asyncio.gather(*busy) == [True, True]
    assert await work.run(lambda: 7) == 7
    work.close()


async def test_what_a_loop_receives_comes_to_a_thread_and_so_does_its_end():
    async def source():
        for number in range(3):
            yield number
        raise ConnectionError("the client goes away")

    taken, loop = [], asyncio.get_running_loop()

    def take(items):
        for item in items:
            taken.append(item)

    with pytest.raises(ConnectionError):
        await asyncio.to_thread(take, pulled(source(), loop))
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_in_whatever_pieces_they_come(size):
    data = b"one\n\ntwo\nthree"
    chunks = (data[begin : begin + size] for begin in range(0, len(data), size))
    assert list(lines(chunks, 100)) == [b"one", b"", b"two", b"three"]


@pytest.mark.parametrize("chunks", [[b"1234", b"567"], [b"12345678\n"], [b"ok\n12345", b"67\nok"]])
def test_lines_have_an_end(chunks):
    with pytest.raises(InvalidRequest, match="a line of more than 6 bytes"):
        list(lines(iter(chunks), 6))
    assert list(lines(iter(chunks), 8))


def test_credentials_come_from_a_file_or_the_environment_and_are_long(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert load_credential(path).admits(f"bearer {TOKEN}")
    monkeypatch.setenv("PACELINE_CACHE_ADMIN_TOKEN", TOKEN)
    credential = load_credential(None)
    assert credential.admits(f"Bearer {TOKEN}")
    assert TOKEN not in repr(credential)
    for wrong in (None, "", "Bearer", "Bearer ü", f"Bearer {TOKEN} x", f"Token {TOKEN}"):
        assert not credential.admits(wrong)
    for text in ("short", "with spaces in it, and long enough", "ü" * 30):
        path.write_text(text)
        with pytest.raises(ConfigError, match="openssl rand -hex 32") as raised:
            load_credential(path)
        assert text not in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_credential(tmp_path / "absent")
