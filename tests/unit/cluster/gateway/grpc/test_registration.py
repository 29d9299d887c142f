"""What our handlers add to those of Serve's proxy, on Serve's own server: a retry time, no empty last message, limits,
keys before messages."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import grpc
import pytest
from ray.serve._private import grpc_util
from ray.serve._private.grpc_util import gRPCGenericServer

from cluster.gateway.door import front_door
from cluster.gateway.door.front_door import FrontDoor, grpc_server_options
from cluster.gateway.grpc import open_calls, registration
from cluster.gateway.grpc.registration import add_health, add_inference
from cluster.gateway.paceline.v1.inference_pb2 import GenerateChunk, GenerateRequest, GenerateResponse
from cluster.gateway.paceline.v1.inference_pb2_grpc import InferenceStub
from cluster.tenants.administration import TenantAdministration

KEY = "grpc-retry-pushback-ms"
OK = GenerateResponse(text="whole").SerializeToString()
CHUNK = GenerateChunk(text="a").SerializeToString()
EMPTY = GenerateChunk().SerializeToString()


SERVES_OWN = "Application metadata not set. Ping /ray.serve.RayServeAPIService/ListApplications for available ones."


def refuse(context, code, details, known):
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(known)


@asynccontextmanager
async def serving(code, known=(), details="why"):
    """A stub of a server whose every call is refused with `code`; a stream after two messages, and an empty one."""

    def factory(service_method, streaming_type):
        async def unary(request, context):
            if code is not None:
                refuse(context, code, details, known)
            return OK

        async def stream(request, context):
            yield CHUNK
            yield CHUNK
            if code is not None:
                refuse(context, code, details, known)
                yield EMPTY

        return unary if streaming_type == "unary_unary" else stream

    server = gRPCGenericServer(factory)
    add_inference(_Methods(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield InferenceStub(channel)
    await server.stop(None)


class _Methods:
    """Their names are all that counts: the server takes its own handlers."""

    Generate = GenerateStream = ListModels = Tokenize = Detokenize = None


async def ending(call):
    """(texts, status code, details, retry time) of a call."""
    texts = []
    try:
        if hasattr(call, "__aiter__"):
            async for chunk in call:
                texts.append(chunk.text)
        else:
            texts.append((await call).text)
    except grpc.RpcError:
        pass
    metadata = await call.trailing_metadata()
    return texts, await call.code(), await call.details(), dict(metadata).get(KEY)


@pytest.mark.parametrize(
    ("code", "known", "retry"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (("request_id", "x"),), "1000"),
        (grpc.StatusCode.UNAVAILABLE, (), "1000"),
        (grpc.StatusCode.UNAVAILABLE, ((KEY, "2500"),), "2500"),
        (grpc.StatusCode.INVALID_ARGUMENT, (), None),
    ],
)
async def test_a_refusal_that_may_be_tried_again_says_when(code, known, retry):
    async with serving(code, known) as stub:
        assert await ending(stub.Generate(GenerateRequest())) == ([], code, "why", retry)
        assert await ending(stub.GenerateStream(GenerateRequest())) == (["a", "a"], code, "why", retry)


async def test_an_answer_has_no_retry_time():
    async with serving(None) as stub:
        assert await ending(stub.Generate(GenerateRequest())) == (["whole"], grpc.StatusCode.OK, "", None)
        assert await ending(stub.GenerateStream(GenerateRequest())) == (["a", "a"], grpc.StatusCode.OK, "", None)


GENERATE = "/paceline.v1.Inference/Generate"
STREAM = "/paceline.v1.Inference/GenerateStream"


@asynccontextmanager
async def raw_calls(monkeypatch, seen, **door):
    """Calls by method name with any bytes, on a server with these settings of the front door."""
    monkeypatch.setattr(front_door, "_installed", FrontDoor(**door))
    monkeypatch.setattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", grpc_server_options(front_door.current()))

    def factory(service_method, streaming_type):
        async def unary(request, context):
            seen.append(request)
            return OK

        async def stream(request, context):
            seen.append(request)
            yield CHUNK

        return unary if streaming_type == "unary_unary" else stream

    server = gRPCGenericServer(factory)
    add_inference(_Methods(), server)
    add_health(_Health(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def call(method, message, metadata=()):
            make = channel.unary_stream if method == STREAM else channel.unary_unary
            answer = make(method, _as_is, _as_is)(message, metadata=metadata, timeout=10)
            with contextlib.suppress(grpc.RpcError):
                if method == STREAM:
                    [part async for part in answer]
                else:
                    await answer
            return await answer.code(), await answer.details()

        yield call
    await server.stop(None)


class _Health:
    Check = List = Watch = None


def _as_is(message):
    return message


@pytest.mark.parametrize("method", [GENERATE, STREAM])
async def test_bytes_that_are_no_message_are_refused_without_pythons_words(monkeypatch, method):
    seen = []
    async with raw_calls(monkeypatch, seen) as call:
        code, details = await call(method, b"\xff" * 9)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "the message is not of the type that this method takes"
    assert seen == []


@pytest.mark.parametrize("method", [GENERATE, STREAM])
async def test_where_keys_are_asked_for_no_message_is_read_without_one(monkeypatch, method):
    seen = []
    message = GenerateRequest(prompt="a").SerializeToString()
    async with raw_calls(monkeypatch, seen, asks_for_keys=True) as call:
        for metadata in ((), (("authorization", "Basic a"),)):
            code, details = await call(method, message, metadata)
            assert (code, details.split(";")[0]) == (grpc.StatusCode.UNAUTHENTICATED, "an API key is required")
        assert seen == []
        assert (await call(method, message, (("authorization", "Bearer pl-1"),)))[0] is grpc.StatusCode.OK
        assert len(seen) == 1
        assert (await call("/grpc.health.v1.Health/Check", b""))[0] is grpc.StatusCode.OK


@pytest.mark.parametrize("method", [GENERATE, STREAM])
async def test_no_message_is_read_with_a_key_that_the_registry_has_not(monkeypatch, method, tmp_path):
    seen = []
    file = tmp_path / "tenants.json"
    key = TenantAdministration(file).add("first", {}).key
    message = GenerateRequest(prompt="a").SerializeToString()
    async with raw_calls(monkeypatch, seen, asks_for_keys=True, tenants_file=file) as call:
        code, details = await call(method, message, (("authorization", "Bearer pl-1"),))
        assert (code, details.split(",")[0]) == (grpc.StatusCode.UNAUTHENTICATED, "the API key is not known here")
        assert seen == []
        assert (await call(method, message, (("authorization", f"Bearer {key}"),)))[0] is grpc.StatusCode.OK


async def test_a_message_or_metadata_above_the_limit_is_refused(monkeypatch):
    seen = []
    async with raw_calls(monkeypatch, seen, max_body_bytes=100_000) as call:
        large = GenerateRequest(prompt="a" * 200_000).SerializeToString()
        assert (await call(GENERATE, large))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await call(GENERATE, b"", (("x", "y" * 100_000),)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert seen == []
        fits = GenerateRequest(prompt="a" * 100_000).SerializeToString()
        assert (await call(GENERATE, fits))[0] is grpc.StatusCode.OK


async def test_while_there_is_no_application_calls_are_told_to_come_again():
    async with serving(grpc.StatusCode.NOT_FOUND, details=SERVES_OWN) as stub:
        wanted = ([], grpc.StatusCode.UNAVAILABLE, "the server is starting", "1000")
        assert await ending(stub.Generate(GenerateRequest())) == wanted


# --- limits of calls -------------------------------------------------------------------------------------------------


class Served:
    """A server of Serve's whose calls wait until they are cancelled, or write without an end."""

    def __init__(self):
        self.num_open = 0
        self._changed = asyncio.Condition()

    def factory(self, service_method, streaming_type):
        async def unary(request, context):
            async with self._opened():
                await asyncio.Event().wait()

        async def stream(request, context):
            async with self._opened():
                while True:
                    yield LARGE
                    await asyncio.sleep(0.0001)

        return unary if streaming_type == "unary_unary" else stream

    @asynccontextmanager
    async def _opened(self):
        await self._count(1)
        try:
            yield
        finally:
            await self._count(-1)

    async def _count(self, change):
        async with self._changed:
            self.num_open += change
            self._changed.notify_all()

    async def until(self, count):
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_open == count)


WATCH = "/grpc.health.v1.Health/Watch"
LARGE = GenerateChunk(text="a" * 10_000).SerializeToString()
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@asynccontextmanager
async def served(monkeypatch, **door):
    """(what is served, its address)."""
    monkeypatch.setattr(front_door, "_installed", FrontDoor(**door))
    monkeypatch.setattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", grpc_server_options(front_door.current()))
    one = Served()
    server = gRPCGenericServer(one.factory)
    add_inference(_Methods(), server)
    add_health(_Health(), server)
    grpc_util.enable_server_reflection(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield one, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def code_of(call):
    try:
        await asyncio.wait_for(asyncio.ensure_future(call if asyncio.iscoroutine(call) else _awaited(call)), 10)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return None


async def _awaited(call):
    return await (call.read() if hasattr(call, "read") else call)


async def test_each_service_has_a_limit_of_open_calls_that_others_do_not_use_up(monkeypatch):
    """And probes have another one than those who watch."""
    monkeypatch.setattr(registration, "KEYLESS_CALLS", 3)
    async with served(monkeypatch, max_connections=3) as (one, address), grpc.aio.insecure_channel(address) as channel:
        check, watch = (channel.unary_unary("/grpc.health.v1.Health/Check"), channel.unary_stream(WATCH))
        watches = [watch(b"") for _ in range(3)]
        await one.until(3)
        probe = check(b"")
        await asyncio.wait_for(one.until(4), 10)
        probe.cancel()
        await one.until(3)
        generate = channel.unary_unary(GENERATE)
        calls = [generate(b"") for _ in range(3)]
        await one.until(6)
        for refused in (watch(b""), generate(b"")):
            code, details = await code_of(refused)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details.startswith("there are 3 open calls of this service, and more are not taken")
            assert dict(await refused.trailing_metadata())[KEY] == "1000"
        calls[0].cancel()
        await one.until(5)
        calls.append(generate(b""))
        await one.until(6)
        for call in (*watches, *calls):
            call.cancel()
        await one.until(0)


async def test_a_call_without_a_message_is_refused(monkeypatch):
    async with served(monkeypatch) as (_, address), grpc.aio.insecure_channel(address) as channel:
        wanted = grpc.StatusCode.INVALID_ARGUMENT, "the message is not of the type that this method takes"
        assert await code_of(channel.stream_unary(GENERATE)(iter(()))) == wanted


@pytest.mark.parametrize("method", [GENERATE, REFLECTION])
async def test_a_call_whose_message_does_not_come_ends(monkeypatch, method):
    monkeypatch.setattr(open_calls, "MESSAGE_WITHIN_S", 0.2)
    monkeypatch.setattr(registration, "KEYLESS_CALLS", 1)
    async with served(monkeypatch, max_connections=1) as (one, address), grpc.aio.insecure_channel(address) as channel:
        silent = channel.stream_stream(method)()
        await silent.wait_for_connection()
        second = channel.stream_stream(method)()
        assert (await code_of(second.read()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        wanted = grpc.StatusCode.DEADLINE_EXCEEDED, "the message did not come within 0.2 s"
        assert await code_of(silent.read()) == wanted
        call = channel.unary_unary(GENERATE)(b"")
        await one.until(1)
        await asyncio.sleep(0.3)  # the limit concerns the message alone
        assert one.num_open == 1
        call.cancel()


async def test_a_client_that_takes_nothing_of_its_answer_loses_it(monkeypatch):
    monkeypatch.setattr(open_calls, "READ_WITHIN_S", 0.2)
    async with served(monkeypatch) as (one, address), grpc.aio.insecure_channel(address) as channel:
        unread = channel.unary_stream(STREAM)(b"")
        await one.until(1)
        await asyncio.wait_for(one.until(0), 20)
        wanted = grpc.StatusCode.DEADLINE_EXCEEDED, "the client has taken nothing of its answer for 0.2 s"
        assert await code_of(_all(unread)) == wanted


async def _all(call):
    while await call.read() is not grpc.aio.EOF:
        pass
    await call  # raises


async def test_connections_have_a_limit_and_end_when_idle(monkeypatch):
    monkeypatch.setattr(front_door, "_IDLE_MS", 300)
    async with served(monkeypatch, max_connections=4) as (one, address):
        host, port = address.split(":")
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with empty settings
        connections = []
        for _ in range(6):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(hello)
            connections.append((reader, writer))
        began = asyncio.get_running_loop().time()
        open_ones = [bool(await reader.read(9)) for reader, _ in connections]
        assert open_ones.count(True) == 4
        for (reader, writer), is_open in zip(connections, open_ones, strict=True):
            if is_open:
                await asyncio.wait_for(reader.read(), 10)  # until its end
            writer.close()
        assert 0.2 < asyncio.get_running_loop().time() - began < 5
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(GENERATE)(b"")
            await one.until(1)
            call.cancel()
