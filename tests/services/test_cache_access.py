"""Ways to reach the store: users with few rights, TLS with client certificates, Cluster and Sentinel."""

import datetime
import ipaddress
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.exceptions import NoPermissionError, ResponseError

from cache_service.admin.administration import CacheAdministration
from cache_service.counts.soft_codec import Delta, encode_delta
from cache_service.counts.soft_compactor import SoftCompactor
from cache_service.counts.soft_ngram import SoftNgramTable
from cache_service.counts.soft_reader import SoftReader
from cache_service.errors import StoreRefused, StoreUnavailable
from cache_service.formats.earnings import Earnings
from cache_service.formats.purged_times import TimeRange
from cache_service.log.compactor import Compactor
from cache_service.log.log_feed import LogFeed
from cache_service.log.log_reader import LogReader
from cache_service.log.publisher import Publisher, PublisherSettings
from cache_service.promotion.promotion_gate import PromotionGate
from cache_service.promotion.promotion_policy import PromotionPolicy
from cache_service.store.admin_store import AdminStore
from cache_service.store.connection import ConnectionSettings
from cache_service.store.embedded_server import MAX_PORT, MIN_PORT, EmbeddedServer, find_server_binary
from paceline_testing.cache_stores import Documents, Namespace, contents, piece, until

GIVEN = [piece("a", 0, range(10)), piece("a", 10, range(10)), piece("b", 0, [1, 2])]

# What each role needs, in the words of an ACL; the keys are those of one namespace. Of the commands about connections
# those about other people's are dangerous.
WRITER = "+@connection -@dangerous +watch +unwatch +multi +exec +discard +get +set +xadd +expire +ttl"
READER = "+@connection -@dangerous +multi +exec +discard +get +hget +hstrlen +getrange +xrange"
COMPACTOR = f"{READER} +set +xtrim +expire +pexpire +pttl +evalsha +eval +hset +hmget +del"
EXCHANGE = f"{COMPACTOR} +xadd +xrange"
ADMINISTRATOR = f"{COMPACTOR} +watch +unwatch +xadd +xlen +xdel +scan +ttl +memory|usage +hincrby +hgetall +hscan"
GATE = (
    f"{COMPACTOR} +incr +zadd +zcard +zrange +zremrangebyscore +zremrangebyrank +hlen +hexists +hsetnx +hdel +hscan"
    " +hgetall +time"
)

ROLES = {
    "writer": WRITER,
    "reader": READER,
    "compactor": COMPACTOR,
    "exchange": EXCHANGE,
    "gate": GATE,
    "administrator": ADMINISTRATOR,
}

# (command, what stands behind its key) -> who may send it about their own namespace; nobody may about another's.
FOLDING = frozenset({"compactor", "exchange", "gate", "administrator"})
ABOUT_A_NAMESPACE = {
    ("GET", "epoch"): frozenset(ROLES),
    ("SET", "epoch", "x"): FOLDING | {"writer"},
    ("XADD", "log", "*", "e", "x"): frozenset({"writer", "exchange", "administrator"}),
    ("XRANGE", "log", "-", "+"): FOLDING | {"reader"},
    ("XTRIM", "log", "MAXLEN", 1): FOLDING,
    ("HGET", "manifest", "body"): FOLDING | {"reader"},
    ("HSET", "manifest", "body", "x"): FOLDING,
    ("GETRANGE", "segment:0", 0, 1): FOLDING | {"reader"},
    ("DEL", "segment:0"): FOLDING,
    ("XDEL", "log", "1-1"): frozenset({"administrator"}),
    ("HGETALL", "earnings"): frozenset({"administrator", "gate"}),
    ("HINCRBY", "earnings", "hits", 1): frozenset({"administrator"}),
    ("ZADD", "gate:supporters:0", 1, "x"): frozenset({"gate"}),
    ("FLUSHDB",): frozenset(),
    ("FLUSHALL",): frozenset(),
    ("KEYS", "*"): frozenset(),
    ("SCAN", 0): frozenset({"administrator"}),
    ("CONFIG", "GET", "dir"): frozenset(),
    ("ACL", "LIST"): frozenset(),
    ("CLIENT", "LIST"): frozenset(),
    ("CLIENT", "PAUSE", 1): frozenset(),
    ("REPLICAOF", "NO", "ONE"): frozenset(),
}
WITHOUT_A_KEY = frozenset({"FLUSHDB", "FLUSHALL", "KEYS", "SCAN", "CONFIG", "ACL", "CLIENT", "REPLICAOF"})


def use(writer, compacting=None, reader=None):
    """Append, fold and read: every question that is ever asked."""
    compacting, reader = compacting or writer, reader or writer
    for part in GIVEN:
        writer.append(part)
        compactor = Compactor(compacting.store, compacting.codec)
        compactor.fold()
        compactor.release()
    documents, counters = reader.read()
    assert documents.contents == contents(GIVEN)
    assert counters.segments > 0
    if reader.connection.settings.address.mode != "cluster":
        be_told(writer, reader)


def be_told(writer, reader):
    """Follow the log by push messages."""
    feed, documents = LogFeed(reader.connection.settings), Documents()
    source = feed.follow(reader.store, 8, 0.02, lambda: None)
    following = LogReader(reader.store, reader.codec, documents, source=source)
    assert until(lambda: not following.step() and following.is_current)
    writer.append(GIVEN[0])
    assert until(lambda: not following.is_current)
    assert until(lambda: not following.step() and following.is_current)
    assert following.counters.entries
    assert feed.close(20)


def exchange_and_promote(namespace, exchanging=None, promoting=None):
    """Every question that soft counts and the promotion gate ask; each with its own connection."""
    learning = SoftNgramTable(64 * 1024, delta_bytes=32 * 1024)
    rows = np.array([[1, 2, 3, 4]], np.int32), np.array([[5, 6]], np.int32), np.array([[0.5, 0.4]], np.float32)
    told = []
    listener = SimpleNamespace(counts=told.append, reset=told.clear)
    for _ in range(2):
        store, codec = (exchanging or namespace).open()
        reader = SoftReader(store, codec, 3, listener, origin=b"r" * 16)
        assert until(lambda reader=reader: not reader.step() and reader.epoch)
        learning.learn(*rows)
        delta = Delta(b"o" * 16, reader.epoch, learning.take_delta().entries())
        assert reader.store.append_in_epoch(reader.epoch, encode_delta(codec, 3, delta), 100)
        compactor = SoftCompactor(store, codec, 3)
        compactor.fold()
        compactor.release()
    while reader.step():
        pass
    assert told
    policy = PromotionPolicy(min_tenants=5, min_age_s=0, release_every_s=1)
    gate = PromotionGate(*(promoting or namespace).open(), b"s" * 32, lambda tokens: tokens < 0, policy)
    gate.opt_in("tenant 0")
    for tenant in range(6):
        gate.offer(f"tenant {tenant}", [(1, 2, 3), (4, 5)])
    assert until(lambda: gate.release() and gate.public() == {(1, 2, 3), (4, 5)})
    gate.opt_out("tenant 0")
    assert (gate.revoke(), gate.public()) == (True, {(1, 2, 3), (4, 5)})
    gate.opt_out("tenant 1")
    assert (gate.revoke(), gate.public()) == (True, set())
    gate.opt_in("tenant 1")


def administer(namespace, administering=None):
    """Every question that administrators ask, and what publishers ask because of them."""
    administration = CacheAdministration((administering or namespace).connection)
    keys = namespace.keys
    assert administration.import_documents(keys, GIVEN).documents == len(GIVEN)
    assert administration.find(keys.namespace) == [keys]
    AdminStore((administering or namespace).connection, keys).add_earnings(Earnings(1, 1, 1, 1))
    stats = administration.stats(keys)
    assert (stats.documents, stats.tokens, stats.earnings.hits) == (2, 22, 1)
    assert administration.verify(keys).problems == ()
    assert not administration.compact(keys).is_busy
    assert contents(administration.export(keys).pieces) == contents(GIVEN)
    assert administration.purge(keys, TimeRange(0, 5)).tokens == 0
    assert namespace.read()[0].contents == contents(GIVEN)
    administration.purge(keys)
    assert namespace.read()[0].contents == {}
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=0.01))
    publisher.publish(keys.namespace, GIVEN[0].document_id, 0, [1, 2, 3])
    assert publisher.close(20)
    counters = publisher.counters
    assert (counters.purged_tokens + counters.written_tokens, counters.refused_tokens) == (3, 0)


def with_rights(settings, user, keys, rights):
    """settings: of somebody who may make users."""
    Namespace(settings).redis.execute_command(
        "ACL", "SETUSER", user, "reset", "on", ">pass", f"~{keys.key('*')}", *rights.split()
    )
    return replace(settings, username=user, password="pass")


def is_allowed(redis, *command):
    try:
        redis.execute_command(*command)
    except NoPermissionError:
        return False
    except ResponseError:  # it may be sent, and is wrong at this place
        return True
    return True


def assert_matrix(settings):
    """Every role may do what it has to in its own namespace, nothing else there, and nothing in another one."""
    own, other = Namespace(settings), Namespace(settings)
    found = {}
    for role, rights in ROLES.items():
        redis = Namespace(with_rights(settings, role, own.keys, rights)).redis
        for command, *rest in ABOUT_A_NAMESPACE:
            if command in WITHOUT_A_KEY:
                may = is_allowed(redis, command, *rest)
            else:
                kind, *values = rest
                may = is_allowed(redis, command, own.keys.key(kind), *values)
                assert not is_allowed(redis, command, other.keys.key(kind), *values), (role, command)
            found.setdefault((command, *rest), set()).update({role} if may else ())
        script = "return redis.call('GET', KEYS[1])"
        assert is_allowed(redis, "EVAL", script, 1, own.keys.key("epoch")) == (role in FOLDING)
        assert not is_allowed(redis, "EVAL", script, 1, other.keys.key("epoch")), role
    assert found == ABOUT_A_NAMESPACE


def test_roles_need_few_rights_and_have_no_others(shared_server):
    whole = Namespace(shared_server.settings)
    name = whole.keys.namespace
    writer = Namespace(with_rights(shared_server.settings, "writer", whole.keys, WRITER), name)
    reader = Namespace(with_rights(shared_server.settings, "reader", whole.keys, READER), name)
    compacting = Namespace(with_rights(shared_server.settings, "compactor", whole.keys, COMPACTOR), name)
    use(writer, compacting, reader)
    for refused in (
        writer.read,
        lambda: reader.append(GIVEN[0]),
        Namespace(writer.connection.settings, "other").read,
        lambda: Namespace(writer.connection.settings, "other").append(GIVEN[0]),
        Compactor(writer.store, writer.codec).fold,
    ):
        with pytest.raises(StoreRefused, match="NoPermission"):
            refused()


def test_every_role_may_do_its_own_work_and_nothing_else(engine, tmp_path):
    with EmbeddedServer(tmp_path / "server", engine) as server:
        assert_matrix(server.settings)


def test_exchange_and_gate_need_few_rights(shared_server):
    whole = Namespace(shared_server.settings)
    name = whole.keys.namespace
    exchanging = Namespace(with_rights(shared_server.settings, "exchange", whole.keys, EXCHANGE), name)
    promoting = Namespace(with_rights(shared_server.settings, "gate", whole.keys, GATE), name)
    exchange_and_promote(whole, exchanging, promoting)


def test_administrators_need_few_rights(shared_server):
    whole = Namespace(shared_server.settings)
    settings = with_rights(shared_server.settings, "administrator", whole.keys, ADMINISTRATOR)
    administer(whole, Namespace(settings, whole.keys.namespace))


def test_a_publisher_without_rights_drops_and_counts(shared_server):
    allowed = Namespace(shared_server.settings)
    settings = with_rights(shared_server.settings, "only-own", allowed.keys, WRITER)
    publisher = Publisher(Namespace(settings).open, PublisherSettings(flush_s=0.01))
    publisher.publish("foreign", GIVEN[0].document_id, 0, [1, 2, 3])
    publisher.publish(allowed.keys.namespace, GIVEN[0].document_id, 0, [1, 2])
    assert publisher.close(20)
    assert (publisher.counters.refused_tokens, publisher.counters.written_tokens) == (3, 2)


def test_a_wrong_password_is_an_outage_that_does_not_show_it(shared_server):
    wrong = Namespace(replace(shared_server.settings, password="wrong-secret"))
    with pytest.raises(StoreUnavailable, match="Authentication") as raised:
        wrong.append(GIVEN[0])
    assert "wrong-secret" not in str(raised.value) + repr(raised.value)


def certificate(directory, name, issuer=None):
    """Files <name>.pem and <name>.key; returns what signs others."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    issuer_name, issuer_key = issuer or (subject, key)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    (directory / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return subject, key


@pytest.fixture
def tls_server(tmp_path):
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not on the PATH; the bundled server speaks no TLS")
    authority = certificate(tmp_path, "authority")
    certificate(tmp_path, "server", authority)
    certificate(tmp_path, "client", authority)
    certificate(tmp_path, "stranger")
    port = random.randrange(MIN_PORT, MAX_PORT)
    extra = (
        f"tls-port {port}",
        f"tls-cert-file {tmp_path}/server.pem",
        f"tls-key-file {tmp_path}/server.key",
        f"tls-ca-cert-file {tmp_path}/authority.pem",
        "tls-auth-clients yes",
    )
    with EmbeddedServer(tmp_path / "data", Path(found), extra=extra) as server:
        yield ConnectionSettings(
            f"rediss://127.0.0.1:{port}",
            password=server.settings.password,
            ca_file=tmp_path / "authority.pem",
            certificate_file=tmp_path / "client.pem",
            key_file=tmp_path / "client.key",
        )


def test_over_tls_with_a_client_certificate_every_role_does_its_work_and_nothing_else(tls_server):
    assert_matrix(tls_server)
    whole = Namespace(tls_server)
    name = whole.keys.namespace
    roles = {role: Namespace(with_rights(tls_server, role, whole.keys, rights), name) for role, rights in ROLES.items()}
    use(roles["writer"], roles["compactor"], roles["reader"])
    exchange_and_promote(whole, roles["exchange"], roles["gate"])
    administer(whole, roles["administrator"])


def test_a_server_without_tls_is_told_as_such(server):
    url = server.url.replace("redis://", "rediss://")
    for given in (url, url.replace("rediss://", "rediss+cluster://")):
        plain = Namespace(ConnectionSettings(given, connect_timeout_s=0.3, num_retries=0))
        with pytest.raises(StoreUnavailable, match="it does not answer in TLS"):
            plain.store.read_epoch()


def test_tls_refuses_strangers_on_both_sides(tls_server, tmp_path):
    no_certificate = replace(tls_server, certificate_file=None, key_file=None)
    stranger = replace(tls_server, certificate_file=tmp_path / "stranger.pem", key_file=tmp_path / "stranger.key")
    other_authority = replace(tls_server, ca_file=tmp_path / "stranger.pem")
    other_name = replace(tls_server, url=tls_server.url.replace("127.0.0.1", "localhost"))
    for settings in (no_certificate, stranger, other_authority, other_name):
        with pytest.raises(StoreUnavailable):
            Namespace(settings).append(GIVEN[0])


def test_cluster(engine, tmp_path):
    with EmbeddedServer(tmp_path, engine, extra=("cluster-enabled yes",)) as server:
        # Redis 6.2 takes no ranges of slots.
        Namespace(server.settings).redis.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        settings = replace(server.settings, url=server.settings.url.replace("redis://", "redis+cluster://"))
        assert until(lambda: b"cluster_state:ok" in Namespace(server.settings).redis.execute_command("CLUSTER", "INFO"))
        namespace = Namespace(settings)
        use(namespace)
        exchange_and_promote(Namespace(settings))
        administer(Namespace(settings))
        namespace.connection.close()


def test_an_absent_cluster_is_an_outage():
    with pytest.raises(StoreUnavailable):
        Namespace(ConnectionSettings("redis+cluster://127.0.0.1:1")).append(GIVEN[0])


def test_sentinel_names_the_primary(server, tmp_path):
    port = random.randrange(MIN_PORT, MAX_PORT)
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {server.port} 1\n"
        f"sentinel auth-pass main {server.settings.password}\n"
    )
    command = [str(find_server_binary()), str(configuration), "--sentinel"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as sentinel:
        try:
            settings = replace(server.settings, url=f"redis+sentinel://127.0.0.1:{port}/main")
            assert until(lambda: answers(settings))
            use(Namespace(settings))
            with pytest.raises(StoreUnavailable):
                Namespace(replace(settings, url=f"redis+sentinel://127.0.0.1:{port}/none")).append(GIVEN[0])
        finally:
            sentinel.terminate()


def answers(settings):
    try:
        return Namespace(settings).read()
    except StoreUnavailable:
        return False
