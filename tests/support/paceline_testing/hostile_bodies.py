"""Bodies of calls for fuzzing: valid ones by the JSON schemas of the OpenAPI document, and damaged ones."""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import zstandard

from paceline_testing.hostile_constraints import hostile_requests
from paceline_testing.random_schemas import RandomSchemas

TEXTS = (
    "", "a", "hello", "the quick brown fox", "1", "0", "get_weather", "low", "auto", "suffix", "\x00", "😀",
    "e\u0301", "\u202e", "\ufeff", "\ufffd", "<|end|>", "<|start|>assistant", "<think>", "{}", '{"city": "Bern"}',
    "[]", '"', "\\", "{{ 7 * 7 }}", "{% for", "%s%n", "\r\n", "null", "call_1", "NaN", "../../etc/passwd", "$ref",
    "٣", "ß" * 300,
)  # fmt: skip
_NO_TEXTS = ("\ud800", "a\udfff", "\ude00\ud83d", "x" * 3_000, "\x00\x1b[2J")
NUMBERS = (
    0, 1, -1, 2, 3, 16, 255, 256, 375, 376, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64,
    10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
# Written as they stand in place of a text, since Python's json cannot write them.
_RAW = {
    "@deep list": "[" * 3_000 + "]" * 3_000,
    "@deep object": '{"a":' * 3_000 + "1" + "}" * 3_000,
    "@deeper list": "[" * 30_000 + "]" * 30_000,
    "@open lists": "[" * 5_000,
    "@many items": "[" + "0," * 20_000 + "0]",
    "@many keys": "{" + ",".join(f'"k{index}":0' for index in range(5_000)) + "}",
    "@same keys": '{"a":0,"a":1,"a":{"a":0,"a":0}}',
    "@overflow": "1e999",
    "@digits": "9" * 5_000,
    "@fraction": "0." + "3" * 5_000,
    "@leading zero": "01",
    "@plus": "+1",
    "@half a surrogate": '"\\ud800"',
    "@halves in wrong order": '"\\udc00\\ud800"',
    "@bad escape": '"\\x41"',
    "@control character": '"\x01"',
    "@single quotes": "'a'",
    "@comment": "/* */ 1",
    "@true": "True",
    "@long text": json.dumps("x" * 70_000),
    "@white space": " " * 50_000 + "1",
}
_UNKNOWN_NAMES = ("max_token", "temprature", "", "\ud800", "a" * 300, "__proto__", "model_config", "0", "stream ", "Ⅷ")
_OPTIONAL_FIELDS = (0, 1, 1, 2, 3, 4, 8)  # of an object, one of these at random
_MOST_DEPTH = 7
_TYPE_NAMES = {str: "string", int: "integer", list: "array", dict: "object"}


class HostileBodies:
    def __init__(self, rng: random.Random, document: Mapping[str, Any], likely: Mapping[str, tuple[Any, ...]]) -> None:
        """document: the OpenAPI document. likely: see `likely_fields`."""
        self._rng = rng
        self._schemas = document["components"]["schemas"]
        self._likely = likely
        self._random_schemas = RandomSchemas(rng.randrange(2**32))
        self._constraints = [body for _, body in hostile_requests()]

    def valid(self, name: str) -> Any:
        """A value that follows the schema of this name, as far as schemas tell."""
        return self._value(self._schemas[name], "", 0)

    def body(self, names: tuple[str, ...]) -> bytes:
        """JSON text of an object of one of these schemas: right, wrong in places, or not JSON at all."""
        rng = self._rng
        value = self.valid(rng.choice(names))
        if "stream" in self._schemas[names[0]]["properties"] and rng.random() < 0.05:
            constraint = rng.choice(self._constraints)
            if isinstance(constraint, str):
                return constraint.encode("utf-8", "surrogatepass")
            value |= copy.deepcopy(constraint)
        if "stream" in self._schemas[names[0]]["properties"] and rng.random() < 0.35:
            value["stream"] = True
        if rng.random() < 0.4:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                value = self._damaged_value(value)
        data = self._written(value)
        return self._damaged_bytes(data) if rng.random() < 0.15 else data

    def encoded(self, data: bytes) -> tuple[bytes, str]:
        """The data with a content encoding, which may be damaged or another than the header says, and the header."""
        rng = self._rng
        kind = rng.randrange(9)
        if kind < 2:
            return gzip.compress(data, 1), "gzip"
        if kind == 2:
            return zstandard.compress(data), rng.choice(("zstd", "ZSTD", "gzip"))
        if kind == 3:
            return gzip.compress(data)[: -rng.randint(1, 12)], "x-gzip"
        if kind == 4:
            return zstandard.compress(data)[: -rng.randint(1, 6)], "zstd"
        if kind == 5:
            return zlib.compress(data), rng.choice(("gzip", "deflate", "br", "gzip, gzip", "identity", "", "\x80"))
        if kind == 6:
            return gzip.compress(b" " * 4_000_000 + data, 1), "gzip"
        if kind == 7:
            return gzip.compress(data[:5]) + gzip.compress(data[5:]) + rng.choice((b"", b"\x00", b"x")), "gzip"
        return self._damaged_bytes(rng.choice((gzip.compress, zstandard.compress))(data)), rng.choice(("gzip", "zstd"))

    def _value(self, schema: Mapping[str, Any], field: str, depth: int) -> Any:
        rng = self._rng
        likely = [value for value in self._likely.get(field, ()) if _may_be(value, schema)]
        if likely and rng.random() < 0.9:
            return copy.deepcopy(rng.choice(likely))
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], field, depth)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                kinds = [one for one in schema[union] if one.get("type") != "null"] or schema[union]
                return self._value(rng.choice(kinds), field, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, field, depth)
        if kind == "array":
            most = min(schema.get("maxItems", 3), 3 if depth < _MOST_DEPTH else 0)
            least = schema.get("minItems", 0)
            return [
                self._value(schema.get("items", {}), "", depth + 1) for _ in range(rng.randint(least, max(least, most)))
            ]
        if kind == "string":
            return self._text(schema)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind == "boolean":
            return rng.random() < 0.5
        return self.anything(3)

    def _object(self, schema: Mapping[str, Any], field: str, depth: int) -> Any:
        rng = self._rng
        properties = schema.get("properties")
        if properties is None:
            if field in ("parameters", "input_schema", "json", "schema", "json_schema", "guided_json"):
                return self._random_schemas.next()
            patterns = schema.get("patternProperties") or {"": schema.get("additionalProperties", True)}
            ((pattern, inner),) = list(patterns.items())[:1]
            inner = inner if isinstance(inner, dict) else {}
            names = {self._text({"pattern": pattern}) for _ in range(rng.randrange(4))}
            return {name: self._value(inner, "", depth + 1) for name in names}
        required = schema.get("required", [])
        optional = [name for name in properties if name not in required]
        count = rng.choice(_OPTIONAL_FIELDS) if depth < _MOST_DEPTH else 0
        chosen = [*required, *rng.sample(optional, min(count, len(optional)))]
        title = schema.get("title")
        fields = {name: f"{title}.{name}" if f"{title}.{name}" in self._likely else name for name in chosen}
        return {name: self._value(properties[name], fields[name], depth + 1) for name in chosen}

    def _text(self, schema: Mapping[str, Any]) -> str:
        pattern, most = re.compile(schema.get("pattern", "")), schema.get("maxLength", 400)
        fit = [text for text in TEXTS if schema.get("minLength", 0) <= len(text) <= most and pattern.search(text)]
        return self._rng.choice(fit or TEXTS)

    def _number(self, schema: Mapping[str, Any], kind: str) -> Any:
        least, most = schema.get("minimum", -(2**70)), schema.get("maximum", 2**70)
        above, below = schema.get("exclusiveMinimum", -(2**70)), schema.get("exclusiveMaximum", 2**70)
        fit = [
            number
            for number in NUMBERS
            if least <= number <= most and above < number < below and (kind == "number" or isinstance(number, int))
        ]
        return self._rng.choice(fit or NUMBERS)

    def anything(self, depth: int) -> Any:
        """Any JSON value, and some that are not."""
        rng = self._rng
        kind = rng.randrange(8 if depth else 6)
        if kind == 6:
            return [self.anything(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {rng.choice(TEXTS): self.anything(depth - 1) for _ in range(rng.randrange(4))}
        if kind == 5:
            return rng.choice(list(_RAW))
        return (None, rng.random() < 0.5, rng.choice(NUMBERS), rng.choice(TEXTS), rng.choice(_NO_TEXTS))[kind]

    def _damaged_value(self, value: Any) -> Any:
        """The value with one change at a random place."""
        rng = self._rng
        places = list(_places(value))
        if not places or rng.random() < 0.02:
            return self.anything(2)
        holder, key = rng.choice(places)
        change = rng.randrange(8)
        if change < 4:
            holder[key] = self.anything(2)
        elif change == 4:
            del holder[key]
        elif change == 5 and isinstance(holder, dict):
            holder[rng.choice(_UNKNOWN_NAMES)] = holder.pop(key) if rng.random() < 0.5 else self.anything(2)
        elif change == 6:
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 40, 400)))]
        else:
            other_holder, other_key = rng.choice(places)
            holder[key] = copy.deepcopy(other_holder[other_key])
        return value

    def _written(self, value: Any) -> bytes:
        rng = self._rng
        text = json.dumps(value, ensure_ascii=rng.random() < 0.7)
        for name, raw in _RAW.items():
            text = text.replace(json.dumps(name), raw)
        if rng.random() < 0.03:
            text = text.replace("{", '{"n": 1, "stream": true, "model": "toy", ', 1)  # keys that come twice
        return text.encode("utf-8", "surrogatepass")

    def _damaged_bytes(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randint(0, len(data))
        change = rng.randrange(10)
        if change == 0:
            return data[:at]
        if change == 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at:]
        if change == 2:
            return data[:at] + rng.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xf8")) + data[at + 1 :]
        if change == 3:
            return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"//\n", b"\x1e", b")]}'\n")) + data
        if change == 4:
            return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7", "utf-16-be")))
        if change == 5:
            return data + rng.choice((b"}", b"{}", data, b"\x00", b",", b"\n\n"))
        if change == 6:
            return rng.choice((b"", b"null", b"[]", b"1", b'""', b"{", b"NaN", b"{} {}", b"\x00" * 50))
        if change == 7:
            return rng.randbytes(rng.randrange(200))
        if change == 8:
            return data[:at] + data[at // 2 :]
        return data.replace(rng.choice((b'"', b":", b",", b"}")), rng.choice((b"", b"'", b"\\")), 1)


def _may_be(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of a schema's type, as far as it names one."""
    kinds = {one.get("type", "object") for one in schema.get("anyOf", (schema,))}
    return _TYPE_NAMES[type(value)] in kinds


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value with each of its keys or indices."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
