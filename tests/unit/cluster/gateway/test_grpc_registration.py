"""What our handlers add to those of Serve's proxy, on Serve's own server: a retry time, and no empty last message."""

from contextlib import asynccontextmanager

import grpc
import pytest
from ray.serve._private.grpc_util import gRPCGenericServer

from cluster.gateway.grpc_registration import add_inference
from cluster.gateway.paceline.v1.inference_pb2 import GenerateChunk, GenerateRequest, GenerateResponse
from cluster.gateway.paceline.v1.inference_pb2_grpc import InferenceStub

KEY = "grpc-retry-pushback-ms"
OK = GenerateResponse(text="whole").SerializeToString()
CHUNK = GenerateChunk(text="a").SerializeToString()
EMPTY = GenerateChunk().SerializeToString()


def refuse(context, code, known):
    context.set_code(code)
    context.set_details("why")
    context.set_trailing_metadata(known)


@asynccontextmanager
async def serving(code, known=()):
    """A stub of a server whose every call is refused with `code`; a stream after two messages, and an empty one."""

    def factory(service_method, streaming_type):
        async def unary(request, context):
            if code is not None:
                refuse(context, code, known)
            return OK

        async def stream(request, context):
            yield CHUNK
            yield CHUNK
            if code is not None:
                refuse(context, code, known)
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
