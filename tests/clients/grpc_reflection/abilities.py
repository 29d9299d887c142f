"""A gRPC client that has no generated code: it learns the services by reflection, as grpcurl does."""

from __future__ import annotations

import json

import grpc
from contract import GRPC, MODEL, QUESTION, WEATHER, ability, check_weather, report
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "paceline.v1.Inference"
_channel = grpc.insecure_channel(GRPC)
_database = ProtoReflectionDescriptorDatabase(_channel)
_methods = descriptor_pool.DescriptorPool(_database).FindServiceByName(SERVICE).methods_by_name


def _types(method: str) -> tuple[type, type]:
    found = _methods[method]
    return message_factory.GetMessageClass(found.input_type), message_factory.GetMessageClass(found.output_type)


@ability("services")
def services() -> None:
    assert SERVICE in _database.get_services()


@ability("plain")
def plain() -> None:
    request, answer = _types("Generate")
    call = _channel.unary_unary(f"/{SERVICE}/Generate", request.SerializeToString, answer.FromString)
    found = call(request(model=MODEL, prompt="One two three", max_tokens=8, temperature=0), timeout=60)
    assert found.text


def _generate(**fields: object) -> object:
    request, answer = _types("Generate")
    call = _channel.unary_unary(f"/{SERVICE}/Generate", request.SerializeToString, answer.FromString)
    return call(request(model=MODEL, conversation={"messages": QUESTION}, **fields), timeout=60)


@ability("tools forced")
def tools_forced() -> None:
    tool = {"name": "get_weather", "parameters": json.dumps(WEATHER)}
    (call,) = _generate(tools=[tool], tool_choice={"function": "get_weather"}).tool_calls
    check_weather(call.arguments)


@ability("JSON schema")
def json_schema() -> None:
    check_weather(_generate(structured_outputs={"json": json.dumps(WEATHER)}).text)


@ability("logprobs")
def logprobs() -> None:
    found = _generate(max_tokens=4, logprobs=2)
    assert len(found.logprobs) == found.usage.completion_tokens
    assert len(found.logprobs[0].top) == 2


@ability("stream")
def stream() -> None:
    request, chunk = _types("GenerateStream")
    call = _channel.unary_stream(f"/{SERVICE}/GenerateStream", request.SerializeToString, chunk.FromString)
    assert list(call(request(model=MODEL, prompt="One two three", max_tokens=8, temperature=0), timeout=60))


if __name__ == "__main__":
    report()
