"""TLS of HTTP and gRPC: certificates that are replaced while connections are open, and certificates of clients."""

import asyncio
import contextlib
import ssl

import grpc
import pytest

from actors.errors import InvalidRequest
from cluster.gateway.door.certificates import Certificates
from cluster.gateway_config import TlsConfig
from paceline_testing.certificates import Authority

PING = "/test/Ping"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def tls(authority, tmp_path):
    certificate, key = authority.issue("server", "first")
    return TlsConfig(certificate_file=certificate, key_file=key)


@contextlib.asynccontextmanager
async def echoing(context):
    """The port of a server that sends back what it gets."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def connect(port, authority, pair=None):
    context = ssl.create_default_context(cafile=authority.file)
    if pair is not None:
        context.load_cert_chain(*pair)
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


def name_of(writer):
    (subject,) = writer.get_extra_info("peercert")["subject"]
    return subject[0][1]


async def echoed(reader, writer):
    writer.write(b"ping")
    return await asyncio.wait_for(reader.read(100), 5)


async def test_new_http_connections_see_a_new_certificate_and_old_ones_go_on(authority, tls):
    async with echoing(Certificates(tls).http_context()) as port:
        old = await connect(port, authority)
        assert name_of(old[1]) == "first"
        authority.issue("server", "second")
        new = await connect(port, authority)
        assert name_of(new[1]) == "second"
        assert await echoed(*old) == await echoed(*new) == b"ping"
        old[1].close()
        new[1].close()


async def test_files_that_cannot_be_used_leave_the_certificate_before_in_force(authority, tls):
    async with echoing(Certificates(tls).http_context()) as port:
        for spoil in (
            lambda: tls.certificate_file.write_text("half of"),
            tls.certificate_file.unlink,
            lambda: tls.certificate_file.write_bytes(
                authority.issue("other", "other")[0].read_bytes()
            ),  # another key's
        ):
            spoil()
            _, writer = await connect(port, authority)
            assert name_of(writer) == "first"
            writer.close()
        authority.issue("server", "second")
        _, writer = await connect(port, authority)
        assert name_of(writer) == "second"
        writer.close()


async def test_an_http_client_may_leave_its_certificate_out_but_not_show_a_wrong_one(authority, tls, tmp_path):
    known, stranger = tmp_path / "known.pem", Authority(tmp_path / "stranger")
    known.write_bytes(authority.file.read_bytes())
    tls = tls.model_copy(update={"client_ca_file": known})
    async with echoing(Certificates(tls).http_context()) as port:
        for pair in (None, authority.issue("client", "client")):
            reader, writer = await connect(port, authority, pair)
            assert await echoed(reader, writer) == b"ping"
            writer.close()
        echo = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            echo = await echoed(*await connect(port, authority, stranger.issue("client", "client")))
        assert echo == b""
        known.write_bytes(stranger.file.read_bytes())
        assert await echoed(*await connect(port, authority, stranger.issue("client", "client"))) == b"ping"


@contextlib.asynccontextmanager
async def grpc_pings(tls):
    """The port of a gRPC server."""

    async def ping(requests, context):
        async for one in requests:
            yield one

    handlers = {"Ping": grpc.stream_stream_rpc_method_handler(ping)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_secure_port("127.0.0.1:0", Certificates(tls).grpc_credentials())
    await server.start()
    yield port
    await server.stop(None)


def grpc_channel(port, authority, pair=None):
    key, certificate = (None, None) if pair is None else (pair[1].read_bytes(), pair[0].read_bytes())
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), key, certificate)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, [("grpc.use_local_subchannel_pool", 1)])


async def pinged(call):
    await call.write(b"ping")
    return await asyncio.wait_for(call.read(), 5)


async def test_new_grpc_connections_see_a_new_certificate_and_open_streams_go_on(authority, tls, tmp_path):
    async with grpc_pings(tls) as port, grpc_channel(port, authority) as old:
        stream = old.stream_stream(PING)()
        assert await pinged(stream) == b"ping"
        other = Authority(tmp_path / "other")
        for ours, theirs in zip((tls.certificate_file, tls.key_file), other.issue("server", "second"), strict=True):
            ours.write_bytes(theirs.read_bytes())
        async with grpc_channel(port, other) as new:  # it knows the new authority alone
            assert await pinged(new.stream_stream(PING)()) == b"ping"
        assert await pinged(stream) == b"ping"


async def test_a_grpc_client_needs_a_certificate_where_one_is_asked_for(authority, tls, tmp_path):
    known, stranger = tmp_path / "known.pem", Authority(tmp_path / "stranger")
    known.write_bytes(authority.file.read_bytes())
    tls = tls.model_copy(update={"client_ca_file": known})
    async with grpc_pings(tls) as port:
        async with grpc_channel(port, authority, authority.issue("client", "client")) as channel:
            assert await pinged(channel.stream_stream(PING)()) == b"ping"
        async with grpc_channel(port, authority) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await pinged(channel.stream_stream(PING)())
        known.write_bytes(stranger.file.read_bytes())
        async with grpc_channel(port, authority, stranger.issue("client", "client")) as channel:
            assert await pinged(channel.stream_stream(PING)()) == b"ping"


def test_files_that_cannot_be_used_are_named_at_the_start(tls):
    tls.key_file.write_text("nonsense")
    with pytest.raises(InvalidRequest, match=r"gateway\.tls is .*server\.pem.*cannot be used"):
        Certificates(tls)
