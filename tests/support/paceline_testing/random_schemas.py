"""Random JSON schemas over all keywords that constrained output takes, and now and then one that it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

KEYS = ("a", "b", "ab", "id", "name", "größe", "日本", "😀", "with space", 'quo"te', "back\\slash", "a/b", "a.b", "",
        "$ref", "new\nline", "tab\t", "del\x7f", "bell\x07", "%", "@a", "<[1]>", "{", "type", "0")  # fmt: skip
PATTERNS = (
    "^[a-c]{2,5}$", "^(x|yy|zzz)+$", "a+b", '^[^"\\\\]{1,6}$', "^[0-9]{3}-[0-9]{4}$", "^.{0,4}$", "[α-ω]", "^$", "end$",
    "^é?[\\w]{1,3}$", "^\\d{1,3}(\\.\\d{1,2})?$", "^\\S+ \\S+$", "^(?:ab|cd){1,3}$", "^start",
)  # fmt: skip
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_WORDS = ("x", "true", "null", "12", "é", "日本", "😀", 'q"', "\\", "\n", "", "a b", "\u2028", "</s>", "<|end|>")


class RandomSchemas:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._definitions: list[str] = []

    def next(self) -> dict[str, Any]:
        count = self._rng.choice((0, 0, 0, 1, 2))
        self._definitions = [
            self._rng.choice(("node", "größe", "a b", "x~y", "p/q", "item")) + str(n) for n in range(count)
        ]
        root = self._schema(self._rng.randint(1, 4))
        if isinstance(root, bool):
            root = {}
        if self._definitions:
            root["$defs"] = {name: self._schema(2) for name in self._definitions}
        return root

    def _schema(self, depth: int) -> Any:
        rng = self._rng
        if self._chance(0.03):
            return rng.choice((True, True, {}, False))
        kinds: list[Callable[[int], dict[str, Any]]] = [
            self._string, self._number, self._number, self._literal, self._union_of_types, self._plain,
        ]  # fmt: skip
        if depth > 0:
            kinds += [self._object] * 6 + [self._array] * 3 + [self._any_of, self._one_of, self._all_of]
            if self._definitions:
                kinds += [self._reference] * 3
        schema = rng.choice(kinds)(depth)
        if self._chance(0.1):
            schema |= rng.choice((
                {"title": "t"}, {"description": 'd "quoted" %ignore /x/\nstart: "a"'}, {"default": {"a": [1]}},
                {"examples": [1]}, {"$comment": "c"}, {"readOnly": True},
            ))  # fmt: skip
        if self._chance(0.01):
            schema |= rng.choice((
                {"not": {"const": 1}}, {"uniqueItems": True}, {"contains": {"type": "null"}}, {"if": {}, "then": {}},
                {"dependentRequired": {"a": ["b"]}}, {"propertyNames": {"maxLength": 3}},
                {"unevaluatedProperties": False}, {"dependentSchemas": {"a": {}}}, {"$dynamicRef": "#a"},
                {"minContains": 1},
            ))  # fmt: skip
        return schema

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _plain(self, depth: int) -> dict[str, Any]:
        return {"type": self._rng.choice(("null", "boolean", "string", "integer", "number"))}

    def _string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "string"}
        if self._chance(0.25):
            schema["format"] = rng.choice(FORMATS)
        elif self._chance(0.4):
            schema["pattern"] = rng.choice(PATTERNS)
        if self._chance(0.4):
            schema["minLength"] = rng.randint(0, 4)
        if self._chance(0.6):
            schema["maxLength"] = schema.get("minLength", 0) + rng.randint(0, 12)
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": rng.choice(("integer", "number"))}
        low = rng.choice((-1e6, -100, -3, -0.5, 0, 1, 2.5, 7, 99, 1000, 123456789))
        if self._chance(0.6):
            schema[rng.choice(("minimum", "minimum", "exclusiveMinimum"))] = low
        if self._chance(0.6):
            schema[rng.choice(("maximum", "maximum", "exclusiveMaximum"))] = low + rng.choice(
                (0, 0.5, 1, 2, 10, 1234.5, 1e9)
            )
        if self._chance(0.15):
            schema["multipleOf"] = rng.choice((1, 2, 3, 5, 10, 0.5, 0.1, 0.25, 1.5))
        if self._chance(0.1):
            del schema["type"]
        return schema

    def _value(self, depth: int) -> Any:
        rng = self._rng
        if depth > 0 and self._chance(0.3):
            if self._chance(0.5):
                return [self._value(depth - 1) for _ in range(rng.randint(0, 3))]
            return {rng.choice(KEYS): self._value(depth - 1) for _ in range(rng.randint(0, 3))}
        if self._chance(0.005):
            return rng.choice((1e30, 10**20, -(2**53) - 1))
        return rng.choice(
            (None, True, False, 0, 1, -7, 3.5, 0.1, 2**53, 1.5e-7, rng.choice(_WORDS), rng.choice(_WORDS))
        )

    def _literal(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"const": self._value(2)}
        if self._chance(0.7):
            schema = {"enum": [self._value(2) for _ in range(self._rng.randint(1, 6))]}
        if self._chance(0.2):
            schema["type"] = self._rng.choice(("string", "integer", "number", "object", "null"))
        return schema

    def _union_of_types(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema = self._string(depth) | self._number(depth)
        schema["type"] = rng.sample(("null", "string", "number", "boolean", "array", "object"), rng.randint(2, 3))
        if depth > 0:
            schema |= rng.choice(({}, {"maxItems": 2, "items": self._schema(0)}, {"additionalProperties": False}))
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "array"}
        if self._chance(0.3):
            schema["prefixItems"] = [self._schema(depth - 1) for _ in range(rng.randint(1, 3))]
        if self._chance(0.7):
            schema["items"] = False if self._chance(0.1) else self._schema(depth - 1)
        if self._chance(0.4):
            schema["minItems"] = rng.randint(0, 3)
        if self._chance(0.8):
            schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 3)
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        keys = rng.sample(KEYS, rng.randint(0, 5))
        schema: dict[str, Any] = {"type": "object", "properties": {key: self._schema(depth - 1) for key in keys}}
        required = [key for key in keys if self._chance(0.5)]
        if self._chance(0.1):
            required.append(rng.choice(KEYS))  # described nowhere
        if required or self._chance(0.2):
            schema["required"] = list(dict.fromkeys(required))
        if self._chance(0.7):
            schema["additionalProperties"] = rng.choice(
                (False, False, False, True, {"type": "integer"}, self._schema(0))
            )
        if self._chance(0.12):
            schema["patternProperties"] = {rng.choice(("^a", "^[xyz]{1,3}$", "b$", "^\\d+$", "^é")): self._schema(0)}
        if self._chance(0.1):
            schema["minProperties"] = rng.randint(0, 4)
        if self._chance(0.15):
            schema["maxProperties"] = len(required) + rng.randint(0, 3)
        if self._chance(0.2):
            del schema["type"]
        if self._chance(0.3):
            items = list(schema.items())
            rng.shuffle(items)  # the order of keywords tells llguidance which come first
            schema = dict(items)
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"anyOf": [self._schema(depth - 1) for _ in range(self._rng.randint(1, 3))]}
        if self._chance(0.2):
            schema["anyOf"].append({"type": "null"})
        if self._chance(0.2):
            schema |= self._schema_of_sibling()
        return schema

    def _one_of(self, depth: int) -> dict[str, Any]:
        if self._chance(0.5):
            tags = self._rng.sample(("p", "q", "r"), self._rng.randint(2, 3))
            options = [self._object(depth - 1) for _ in tags]
            for tag, option in zip(tags, options, strict=True):
                option.setdefault("properties", {})["kind"] = {"const": tag}
                option["required"] = ["kind", *option.get("required", ())]
            return {"oneOf": options}
        return {"oneOf": [self._schema(depth - 1) for _ in range(self._rng.randint(1, 3))]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        parts = self._rng.choice((self._object, self._number, self._string, self._schema, self._array))
        schema: dict[str, Any] = {"allOf": [parts(depth - 1) for _ in range(self._rng.randint(1, 3))]}
        if self._chance(0.3):
            schema |= self._schema_of_sibling()
        return schema

    def _schema_of_sibling(self) -> dict[str, Any]:
        return self._rng.choice(
            ({"type": "object"}, {"maxLength": 5}, {"minimum": 0}, {"required": ["a"]}, {"maxItems": 2})
        )

    def _reference(self, depth: int) -> dict[str, Any]:
        name = quote(self._rng.choice(self._definitions).replace("~", "~0").replace("/", "~1"), safe="")
        schema: dict[str, Any] = {"$ref": f"#/$defs/{name}" if self._chance(0.95) else "#"}
        return schema | (self._schema_of_sibling() if self._chance(0.15) else {})
