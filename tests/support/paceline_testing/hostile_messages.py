"""gRPC messages for fuzzing: random ones by their descriptors, and damaged bytes."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cluster.gateway.paceline.v1 import inference_pb2 as pb
from paceline_testing.hostile_bodies import NUMBERS, TEXTS
from paceline_testing.hostile_constraints import hostile_requests
from paceline_testing.random_schemas import RandomSchemas

METHODS = {
    "Generate": pb.GenerateRequest,
    "GenerateStream": pb.GenerateRequest,
    "ListModels": pb.ListModelsRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
}
_KNOWN: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 2, 20),
    "temperature": (0.0, 1.0, 2.0),
    "role": ("system", "developer", "user", "user", "user", "assistant", "tool"),
    "drafters": ("auto", "none", "suffix"),
    "timeout_s": (0.001, 3.0, 100.0),
    "logprobs": (0, 1, 20),
    "parameters": ("", "{}", '{"type": "object", "properties": {"city": {"type": "string"}}}'),
    "kwargs": ("", "{}", '{"enable_thinking": false}', '{"messages": 1}', "["),
    "regex": ("a+b", "(a{1000}){1000}", "[", "(?=a)", "^(a+)+$"),
    "grammar": ('start: "a"', 'root ::= "a"', "start: start", "%import x", "\n" * 5_000),
    "name": ("get_weather", "get_time", "f"),
}
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 5),
}
_MOST_DEPTH = 4


class HostileMessages:
    def __init__(self, rng: random.Random, model: str) -> None:
        self._rng = rng
        self._known = {**_KNOWN, "model": ("", model)}
        self._schemas = RandomSchemas(rng.randrange(2**32))
        bodies = (body for _, body in hostile_requests() if isinstance(body, dict))
        found = [body["structured_outputs"]["json"] for body in bodies if "json" in body.get("structured_outputs", ())]
        self._hostile_schemas = [one if isinstance(one, str) else json.dumps(one) for one in found]

    def next(self) -> tuple[str, bytes]:
        """Name of a method and the bytes of its message."""
        rng = self._rng
        name = rng.choice(list(METHODS))
        message = METHODS[name]()
        self._fill(message, 0)
        if rng.random() < 0.002:
            message.CopyFrom(METHODS[name]())
        data = message.SerializeToString()
        return name, self._damaged(data) if rng.random() < 0.2 else data

    def _fill(self, message: Message, depth: int) -> None:
        rng = self._rng
        fields = list(message.DESCRIPTOR.fields)
        if not fields:
            return
        chosen = rng.sample(fields, min(len(fields), rng.choice((0, 1, 2, 3, 4, 8))))
        if "input" in message.DESCRIPTOR.oneofs_by_name and rng.random() < 0.9:
            chosen.append(rng.choice(message.DESCRIPTOR.oneofs_by_name["input"].fields[:]))
        if message.DESCRIPTOR.name in ("Message", "Conversation", "TokenIds", "Tool", "ToolCall"):
            chosen = fields[:2] if rng.random() < 0.5 else chosen
        for field in chosen:
            self._set(message, field, depth)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        rng = self._rng
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.randrange(3)):
                getattr(message, field.name)[rng.choice((0, 1, -1, 258, 2**31 - 1))] = rng.choice(
                    (0.0, 1.5, 1e9, float("nan"))
                )
        elif field.message_type is not None:
            if depth >= _MOST_DEPTH:
                return
            inner = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(rng.choice((1, 1, 2, 3, 200 if rng.random() < 0.02 else 1))):
                    self._fill(inner.add(), depth + 1)
            else:
                inner.SetInParent()
                self._fill(inner, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(self._value(field) for _ in range(rng.choice((0, 1, 1, 3, 40))))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.name in self._known and rng.random() < 0.85:
            return rng.choice(self._known[field.name])
        if field.name == "json":
            return json.dumps(self._schemas.next()) if rng.random() < 0.7 else rng.choice(self._hostile_schemas)
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(TEXTS).encode("utf-8", "replace").decode()
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_DOUBLE:
            return float(rng.choice([number for number in NUMBERS if abs(number) != 10**400]))
        least, most = _RANGES[kind]
        fit = [number for number in NUMBERS if isinstance(number, int) and least <= number <= most]
        return rng.choice(fit) if rng.random() < 0.5 else rng.randint(0, 5)

    def _damaged(self, data: bytes) -> bytes:
        rng = self._rng
        at, change = rng.randint(0, len(data)), rng.randrange(6)
        if change == 0:
            return data[:at]
        if change == 1:
            return data[:at] + rng.randbytes(rng.randint(1, 4)) + data[at:]
        if change == 2:
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        if change == 3:
            return rng.randbytes(rng.randrange(100))
        if change == 4:
            return data + b"\xfa\x7f\x05hello"  # a field that nobody knows
        return data + data
