"""A gRPC client that has no generated code: it learns the services by reflection, as grpcurl does."""

from __future__ import annotations

import grpc
from contract import GRPC, MODEL, ability, report
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
    found = call(request(model=MODEL, prompt="One two three", max_tokens=8), timeout=60)
    assert found.text


@ability("stream")
def stream() -> None:
    request, chunk = _types("GenerateStream")
    call = _channel.unary_stream(f"/{SERVICE}/GenerateStream", request.SerializeToString, chunk.FromString)
    assert list(call(request(model=MODEL, prompt="One two three", max_tokens=8), timeout=60))


if __name__ == "__main__":
    report()
