"""What is closed, what stays open, and that nothing else follows a closed schema."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.constraints.closed_objects import with_closed_objects

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = {**CITY, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (CITY, CLOSED),
        (CLOSED, CLOSED),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/c", "$defs": {"c": CITY}}, {"$ref": "#/$defs/c", "$defs": {"c": CLOSED}}),
        ({"allOf": [CITY]}, {"allOf": [CLOSED]}),
        (
            {"properties": {"properties": CITY, "oneOf": {"enum": [CITY]}}},
            {"properties": {"properties": CLOSED, "oneOf": {"enum": [CITY]}}, "additionalProperties": False},
        ),
    ],
)
def test_objects_with_properties_are_closed(schema, closed):
    before = json.dumps(schema)
    assert with_closed_objects(schema) == closed
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {}},
        {**CITY, "additionalProperties": True},
        {**CITY, "additionalProperties": {"type": "integer"}},
        {"properties": {"c": CITY}, "patternProperties": {"^c": {"properties": {"days": {}}, "required": ["days"]}}},
        {"properties": {"c": CITY}, "dependencies": {"c": CITY}},
        {**CITY, "minProperties": 2},
        {**CITY, "dependentRequired": {"city": ["days"]}},
        {**CITY, "required": ["city", "days"]},
        {"allOf": [CITY, {"properties": {"days": {"type": "integer"}}}]},
        {"oneOf": [CITY, {"properties": {"days": {"type": "integer"}}}]},
        {"not": CITY},
        {"if": CITY, "then": {"required": ["days"]}},
        {"$defs": {"c": CITY}, "$ref": "#/$defs/c", "properties": {"days": {}}},
        {"anyOf": [CITY, {"type": "null"}], "$ref": "#/$defs/c", "$defs": {"c": CITY}},
        {"type": "array", "contains": CITY},
    ],
)
def test_what_says_otherwise_or_is_combined_stays_open(schema):
    assert with_closed_objects(schema) == schema


_schemas = st.recursive(
    st.sampled_from([{"type": "integer"}, {"enum": [1, "a"]}, {}]),
    lambda inner: st.one_of(
        st.builds(
            lambda properties, required: {"type": "object", "properties": properties, "required": required},
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            st.lists(st.sampled_from("abc"), max_size=2, unique=True),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda one, other: {"allOf": [one, other]}, inner, inner),
        st.builds(lambda one: {"not": one}, inner),
    ),
    max_leaves=5,
)
_values = st.recursive(
    st.sampled_from([1, "a", None]),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)


@given(_schemas, _values)
def test_what_follows_the_closed_schema_follows_the_open_one(schema, value):
    closed = jsonschema.Draft202012Validator(with_closed_objects(schema))
    if closed.is_valid(value):
        jsonschema.validate(value, schema)
