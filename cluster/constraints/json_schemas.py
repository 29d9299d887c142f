"""JSON schemas that answers follow: how a grammar writes them, and what it cannot promise.

The grammars of llguidance keep what a schema says, with exceptions that are closed here: an escape may spell the name
of a described property like one that is not described, keys that are not described may occur twice, and without escapes
of the form \\u a literal loses the characters that need one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from actors.errors import InvalidRequest, Size
from actors.grammar.schema_parts import SchemaPart, schema_parts
from cluster.constraints.closed_objects import with_closed_objects
from cluster.constraints.number_ranges import check_exact_numbers, check_open_ranges, leaves
from cluster.constraints.schema_cycles import check_has_ends

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Without `\u` every text has one spelling, so that the name of a property cannot be written as that of another.
SPELLING: JsonCompileOptions = {"json_allowed_escapes": 'nrbtf\\"'}
# JSON on one line, as chat templates write it: a model that may choose its white space takes more tokens for the same
# values, and the names of keys are not forced.
ONE_LINE: JsonCompileOptions = {**SPELLING, "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
COMPACT: JsonCompileOptions = {**SPELLING, "whitespace_flexible": False}

MAX_PARTS = 5_000  # schemas in one; compiling takes a time that is quadratic in the properties of an object
_OPTIONS = "x-guidance"  # llguidance's own options: they would let the answer be something else than JSON
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# Written as it is or as an escape. Sets of several characters only lose those that cannot be written.
_UNWRITABLE_IN_PATTERN = re.compile(
    rf"{_UNWRITABLE.pattern}|\\(?:[0acev]|[xuU]\{{?0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}}?(?![0-9a-fA-F]))"
)
_SETS = re.compile(r"\[(?:\^(?:\\.|[^\]\\])*|(?:\\.|[^\]\\])+-(?:\\.|[^\]\\])+)\]", re.DOTALL)


def check_schema(schema: Mapping[str, Any], field: str) -> None:
    """Raises InvalidRequest naming a keyword that cannot be followed though llguidance takes it."""
    if _OPTIONS in schema:
        raise InvalidRequest(f"{field}.{_OPTIONS}", Size("given"), "it is no keyword of JSON schemas; leave it out")
    parts = list(islice(schema_parts(schema), MAX_PARTS + 1))
    if len(parts) > MAX_PARTS:
        limit = f"it must have at most {MAX_PARTS} schemas within it, properties' included"
        raise InvalidRequest(field, Size("a larger schema"), limit)
    check_has_ends(schema, parts, field)
    check_open_ranges(parts, field)
    for part in parts:
        _check_characters(part, field)
        check_exact_numbers(part, field)
        least, required = part.schema.get("minProperties", 0), part.schema.get("required", ())
        if not isinstance(least, (int, float)) or not isinstance(required, (list, tuple)):
            continue  # llguidance says what is wrong
        named = len({key for key in required if isinstance(key, str)})
        if least > named + 1:
            limit = f"it must be at most 1 more than the number of required properties, which is {named}"
            raise InvalidRequest(part.place(field, "minProperties"), least, limit, "unsupported_value")


def _check_characters(part: SchemaPart, field: str) -> None:
    limit = (
        "it has a control character that answers cannot contain; of these, \\b, \\t, \\n, \\f and \\r can be written"
    )
    for keyword in ("const", "enum"):
        for text in leaves(part.schema[keyword]) if keyword in part.schema else ():
            if isinstance(text, str) and _UNWRITABLE.search(text):
                raise InvalidRequest(part.place(field, keyword), text, limit, "unsupported_value")
    for keyword, pattern in _patterns(part.schema):
        if _UNWRITABLE_IN_PATTERN.search(_SETS.sub("", pattern.replace(r"\\", ""))):
            raise InvalidRequest(part.place(field, keyword), pattern, limit, "unsupported_value")


def _patterns(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """With the keyword of each."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield "pattern", pattern
    by_pattern = schema.get("patternProperties")
    for pattern in by_pattern if isinstance(by_pattern, Mapping) else ():
        yield "patternProperties", pattern


def closed_schema(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The schema that a grammar is made of. Raises InvalidRequest as `check_schema` does."""
    check_schema(schema, field)
    return with_closed_objects(schema)


def json_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """Any JSON that follows a schema, in Lark's notation. Without `strict`, keywords that no grammar can follow are
    ignored."""
    return f"%json {json.dumps({**with_closed_objects(schema), _OPTIONS: {**ONE_LINE, 'lenient': not strict}})}"
