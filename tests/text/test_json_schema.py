"""Every keyword of JSON Schema, in the shapes of its public test suite: what fits is allowed, what does not is not.

jsonschema judges the tables themselves, too, and texts that a random model writes.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import SchemaPart, StructuredOutputsParams
from jaxpaged.text.structured_outputs import GrammarCompiler
from tests.support.random_walk import RandomModel, accepts, random_model
from tests.support.schema_judge import errors
from tests.support.tiny_tokenizers import byte_level_metadata, wrap

COMPILER = GrammarCompiler()
CLOSED: dict[str, Any] = {"additionalProperties": False}
D4, D7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"


def shape(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], **more}


# Name: schema, texts that fit, texts that do not.
TABLE: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "nothing": ({}, ["1", '"a"', "[{}]", "null"], ["nil"]),
    "one type": ({"type": "integer"}, ["-3", "0"], ["1.5", '"1"', "null", "01"]),
    "several types": ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "[]"]),
    "const of an object": ({"const": {"a": [1, None], "b": False}}, ['{"a": [1, null], "b": false}'], ['{"a": [1]}']),
    "const null": ({"const": None}, ["null"], ["0", "false"]),
    "enum of all types": ({"enum": [6, "foo", [], True, {"foo": 12}]}, ["6", '"foo"', "[]", '{"foo": 12}'], ["5",
        "{}"]),
    "enum with a type": ({"type": "string", "enum": ["a", None]}, ['"a"'], ["null"]),
    "enum of numbers": ({"enum": [0.5, -2, 1e3]}, ["0.5", "-2", "1000"], ["1", "0.05"]),
    "enum with escapes": ({"enum": ["a\nb", 'c"d', "e\\f", "ü/\u2028", "\u0001\u007f"]},
                          [r'"a\nb"', r'"c\"d"', r'"e\\f"', '"ü/\u2028"', r'"\u0001\u007f"'], ['"ab"']),
    "minimum": ({"type": "number", "minimum": 1.1}, ["1.1", "2.6"], ["0.6", "1.09"]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 1.1}, ["1.2"], ["1.1", "1.10"]),
    "maximum below 0": ({"type": "integer", "maximum": -2}, ["-2", "-13"], ["-1", "0"]),
    "both bounds": ({"type": "integer", "minimum": -20, "exclusiveMaximum": 7}, ["-20", "6", "0"], ["7", "-21"]),
    "bounds of draft 4": ({"$schema": D4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    "bounds of 64 bits": ({"type": "integer", "minimum": -2**63, "maximum": 2**63 - 1}, ["0", "-9223372036854774784"],
                          ["9223372036854775808", "-9223372036854775809"]),
    "a bound that no double is": ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53)], [str(2**53 + 2)]),
    "a bound of very many digits": ({"type": "integer", "maximum": 10**300}, ["5", "-5"], ["0.5"]),
    "numbers of many digits": ({"enum": [3.141592653589793, -3.589502809601739e-13]},
                               ["3.141592653589793", "-0.0000000000003589502809601739"],
                               ["3.1415926535897", "-0.00000000000035895028096017383"]),
    "exclusive integers": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1", "0.49"],
                           ["0", "0.5", "-0"]),
    "exclusive integers, negative": ({"type": "number", "exclusiveMinimum": -9.5, "allOf": [{"exclusiveMaximum": -9}]},
                                     ["-9.1", "-9.49"], ["-9", "-9.5", "-9.0"]),
    "tiny bounds": ({"type": "number", "exclusiveMinimum": 5e-324, "maximum": 1}, ["0.5", "1"], ["0", "-1"]),
    "int32": ({"type": "integer", "format": "int32", "minimum": 0}, ["2147483647"], ["-1"]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["0", "49", "-14"], ["48", "1"]),
    "multipleOf with decimals": ({"type": "number", "multipleOf": 0.07, "minimum": -9, "maximum": 9}, ["0.14", "7",
        "0.70"], ["0.15", "0.01"]),
    "multipleOf very small": ({"type": "number", "multipleOf": 0.0001, "minimum": 0, "maximum": 1}, ["0.0075"],
        ["0.00751"]),
    "two multipleOf": ({"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, ["12", "24"], ["4", "6"]),
    "lengths": ({"type": "string", "minLength": 2.0, "maxLength": 3}, ['"ab"', '"日本語"', r'"a\n"'],
                ['"a"', '"abcd"']),
    "pattern is searched": ({"type": "string", "pattern": "a+"}, ['"xaay"'], ['"xy"', '""']),
    "pattern with anchors": ({"type": "string", "pattern": "^a*$"}, ['""', '"aa"'], ['"ab"']),
    "pattern, dialect": ({"type": "string", "pattern": r"^[\w.\-]+\/{\<\d{2}\Z"}, ['"a-b/{<12"'], ['"x/<00"', '"a/b"']),
    "pattern, what ECMA and Python agree on": (
        {"type": "string", "pattern": r"^.\s\S[\s][^\s][\S][^\S]$"}, ['"a b cd "', '"a\u00a0b\u2003cd\u3000"'],
        [r'"\r b cd "', '"\u2028 b cd "', '"a\x85b cd "', '"a \ufeff cd "', '"a b\x85cd "', '"a b \x85d "',
         '"a b c\ufeff "', '"a b cd\x85"']),
    "pattern in which a dot is all": ({"type": "string", "pattern": "(?s)^.$"}, [r'"\n"', '"\u2028"'], ['""']),
    "pattern and format": ({"type": "string", "format": "date", "pattern": "^202"}, ['"2024-02-29"'],
                           ['"1999-01-01"', '"2023-02-29"']),
    "date-time": ({"type": "string", "format": "date-time"}, ['"2024-12-31T23:59:59.5+01:00"'],
                  ['"2024-12-31T23:59:60Z"', '"0000-01-01T00:00:00Z"', '"2024-12-31"', '"2100-02-29T00:00:00Z"']),
    "ipv4 and uuid": ({"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "uuid"}]},
                      ['"127.0.0.1"', '"2eb8aa08-aa98-11ea-b4aa-73b441d16380"'], ['"256.0.0.1"', '"x"']),
    "format of no text": ({"type": "number", "format": "double"}, ["1.5"], ['"a"']),
    "items": ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['[1, "x"]', "{}"]),
    "items false": ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
                    ["[]", "[1]", '[1, "a"]'], ['["a"]', '[1, "a", 2]']),
    "items as a list": ({"$schema": D7, "type": "array", "items": [{"type": "integer"}], "additionalItems": {
        "type": "null"}}, ["[1, null]", "[1]"], ["[1, 2]"]),
    "number of items": ({"type": "array", "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
    "required": (shape({"a": {}, "b": {"type": "null"}}, "b"), ['{"b": null}', '{"a": 1, "b": null}'], ["{}",
        '{"a": 1}']),
    "required without properties": ({"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
                                    ['{"a": 1}'], ["{}", '{"a": "x"}']),
    "additionalProperties false": (shape({"a": {}}, **CLOSED), ["{}", '{"a": 1}'], ['{"b": 1}']),
    "additionalProperties of a schema": (shape({"a": {"type": "integer"}}, additionalProperties={"type": "boolean"}),
                                         ['{"a": 1, "b": true}'], ['{"b": 1}', '{"a": true}', r'{"\u0061": true}']),
    "patternProperties": ({"type": "object", "patternProperties": {"^f.?o$": {"type": "integer"}}, **CLOSED},
                          ['{"foo": 1}', "{}"], ['{"foo": "x"}', '{"fooo": 1}']),
    "names with everything": (shape({"a b": {}, "c\td": {}, "é\"": {}, "$ref": {"type": "null"}, "const": {}}, "$ref",
                                    **CLOSED), [r'{"a b": 1, "c\td": 1, "é\"": 1, "$ref": null}'], ['{"a b": 1}']),
    "number of properties": ({"type": "object", "minProperties": 1, "maxProperties": 2}, ['{"a": 1}'], ["{}"]),
    "propertyNames of an enum": ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": {
        "type": "integer"}, "$defs": {"n": {"enum": ["a", "b"]}}}, ['{"a": 1}', "{}"], ['{"c": 1}', '{"a": "x"}']),
    "propertyNames of a pattern": ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, ['{"aa": 1}'],
        ['{"b": 1}']),
    "propertyNames of a length": ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"aa": 1}'], ['{"aaa": 1}']),
    "propertyNames false": ({"type": "object", "propertyNames": False}, ["{}"], ['{"a": 1}']),
    "unevaluatedProperties": (shape({"a": {}}, unevaluatedProperties=False), ['{"a": 1}'], ['{"b": 1}']),
    "keywords that ask for nothing": ({"type": "array", "uniqueItems": False, "minContains": 0,
        "contains": {"const": 1},
                                       "not": False, "if": {}, "dependentRequired": {}}, ["[]", "[2, 2]"], ["{}"]),
    "one item is unique": ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1, 1]"]),
    "notes": ({"type": "string", "title": "T", "description": "d", "default": 3, "examples": [1], "deprecated": True,
               "readOnly": True, "$comment": "c", "contentEncoding": "base64", "contentMediaType": "x/y", "x-mine": {},
               "nullable": True, "contentSchema": {"type": "wizard"}, "then": {}, "enumNames": []}, ['"a"'], ["null"]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, ["1", "2.5"], ["1.5"]),
    "anyOf beside others": ({"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]}, ['"ab"', '"abcd"'],
                            ['"abc"', "1"]),
    "allOf": ({"allOf": [shape({"a": {"type": "integer"}}, "a"), shape({"b": {"type": "string"}}, "b")]},
              ['{"a": 1, "b": "x"}'], ['{"a": 1}', '{"b": "x"}']),
    "allOf of bounds": ({"type": "integer", "allOf": [{"maximum": 30}, {"minimum": 20}]}, ["25"], ["35", "19"]),
    "oneOf of types": ({"oneOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}, ["1", '"ab"'], ['"a"']),
    "oneOf of constants": ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, ['"a"', '"b"'], ['"c"']),
    "oneOf by a property": ({"oneOf": [shape({"k": {"const": 1}}, "k"), shape({"k": {"enum": [2, 3]}}, "k")]},
                            ['{"k": 1}', '{"k": 3}'], ['{"k": 4}', "{}"]),
    "oneOf by what is required": ({"oneOf": [shape({"a": {}}, "a", **CLOSED), shape({"b": {}}, "b", **CLOSED)]},
                                  ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', "{}"]),
    "oneOf of very many": ({"oneOf": [shape({"k": {"const": number}}, "k", **CLOSED) for number in range(500)]},
                           ['{"k": 7}', '{"k": 499}'], ['{"k": 500}', "{}"]),
    "oneOf beside anyOf": ({"anyOf": [{"type": "integer"}, {"type": "string"}], "oneOf": [{"type": "string"}, {
        "type": "null"}]}, ['"a"'], ["1", "null"]),
    "never": ({"type": "array", "items": {"anyOf": [{"not": {}}, {"type": "null"}, False]}}, ["[null]", "[]"], ["[1]"]),
    "refs to the root": (shape({"foo": {"$ref": "#"}}, **CLOSED), ['{"foo": {"foo": {}}}'], ['{"bar": {}}']),
    "refs by place": (shape({"foo": {"type": "integer"}, "bar": {"$ref": "#/properties/foo"}}), ['{"bar": 3}'],
                      ['{"bar": true}']),
    "refs by index": ({"type": "array", "prefixItems": [{"type": "integer"}, {"$ref": "#/prefixItems/0"}]}, ["[1, 2]"],
                      ['[1, "a"]']),
    "refs with escapes": ({"$defs": {"a~b": {"type": "integer"}, "c/d": {"type": "null"}, "e%f": {"const": "e"},
        "g h": {
        "const": "g"}, "": {"const": ""}}, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in (
            "a~0b", "c~1d", "e%25f", "g%20h", "")]}, ["1", "null", '"e"', '"g"', '""'], ['"f"']),
    "refs to refs": ({"$defs": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/a"}, "c": {"$ref": "#/$defs/b"}},
                      "$ref": "#/$defs/c"}, ["5"], ['"a"']),
    "refs beside others": ({"$defs": {"a": {"type": "array"}}, **shape({"foo": {"$ref": "#/$defs/a", "maxItems": 1}})},
                           ['{"foo": [1]}'], ['{"foo": [1, 2]}', '{"foo": "a"}']),
    "a recursive ref said again": (shape({"child": {"$ref": "#", "type": "object", "description": "again"}}, **CLOSED),
                                   ['{"child": {}}'], ['{"child": 1}']),
    "refs to anchors": ({"$ref": "#foo", "$defs": {"A": {"$anchor": "foo", "type": "integer"}}}, ["1"], ['"a"']),
    "refs to anchors of draft 7": ({"$schema": D7, "allOf": [{"$ref": "#foo"}], "definitions": {"A": {
        "$id": "#foo", "type": "integer"}}}, ["1"], ['"a"']),
    "refs to ids": ({"$id": "https://example.com/root/", "$defs": {
        "A": {"$id": "nested.json", "$defs": {"B": {"type": "integer"}, "C": {"$anchor": "c", "type": "null"}}},
        "U": {"$id": "urn:uuid:deadbeef", "$defs": {"V": {"const": 7}}, "$ref": "#/$defs/V"}},
        "anyOf": [{"$ref": "nested.json#/$defs/B"}, {"$ref": "/root/nested.json#c"}, {"$ref": "urn:uuid:deadbeef"}]},
        ["1", "null", "7"], ['"a"']),
    "ids are scopes": ({"$defs": {"x": {"type": "string"}, "in": {"$id": "in.json", "$defs": {"x": {"type": "null"}},
                                                                   "$ref": "#/$defs/x"}}, "$ref": "#/$defs/in"},
                       ["null"], ['"a"']),
    "ids and refs in data": ({"const": {"$ref": "#/nowhere", "$id": "x"}}, ['{"$ref": "#/nowhere", "$id": "x"}'],
        ["{}"]),
    "dynamic refs": ({"$dynamicAnchor": "node", **shape({"next": {"$dynamicRef": "#node"}}, **CLOSED)},
                     ['{"next": {"next": {}}}'], ['{"next": 1}']),
    "recursion that may end": (shape({"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "a", **CLOSED),
                               ['{"a": {"a": null}}'], ['{"a": {}}']),
    "mutual recursion": ({"$ref": "#/$defs/tree", "$defs": {
        "tree": shape({"nodes": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "nodes", **CLOSED),
        "node": shape({"value": {"type": "number"}, "sub": {"$ref": "#/$defs/tree"}}, "value", **CLOSED)}},
        ['{"nodes": [{"value": 1, "sub": {"nodes": []}}]}'], ['{"nodes": [{}]}']),
}
# Name: schema, and how the error starts.
REFUSED: dict[str, tuple[dict[str, Any] | str, str]] = {
    "uniqueItems": (shape({"a/b": {"type": "array", "uniqueItems": True}}), "uniqueItems at #/properties/a~1b "),
    "contains": ({"items": {"contains": {}}}, "contains at #/items "), "not": ({"not": {"type": "null"}}, "not at # "),
    "if": ({"if": {}, "else": {}}, "if at # "),
    "dependentSchemas": ({"dependentSchemas": {"a": {}}}, "dependentSchemas at # "),
    "dependencies": ({"allOf": [{}, {"dependencies": {"a": ["b"]}}]}, "dependencies at #/allOf/1 "),
    "propertyNames": ({"propertyNames": {"format": "email"}}, "propertyNames at # "),
    "propertyNames, properties": (shape({"a": {}}, propertyNames={"maxLength": 3}), "propertyNames at # "),
    "unevaluatedProperties": ({"allOf": [shape({"a": {}})], "unevaluatedProperties": False},
        "unevaluatedProperties at # "),
    "unevaluatedItems": ({"prefixItems": [{}], "unevaluatedItems": False}, "unevaluatedItems at # "),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf at # "),
    "minProperties": ({"type": "object", "minProperties": 2}, "minProperties at # "),
    "minProperties, optional": (shape({"a": {}, "b": {}}, minProperties=1, **CLOSED, maxProperties=5),
                                "maxProperties at # "),
    "overlapping patterns": ({"patternProperties": {"^a": {"type": "null"}, "a$": {}}}, "patternProperties at # "),
    **{f"format {name}": ({"$defs": {"f": {"type": "string", "format": name}}, "$ref": "#/$defs/f"},
                          f"format at #/$defs/f in the JSON schema is '{name}'")
       for name in ("password", "path", "binary", "byte", "int32", "uri-reference", "json-pointer", "regex", "uuid4",
           "?")},
    "look-ahead": ({"type": "string", "pattern": "^(?!x)y"},
        "pattern at # in the JSON schema is '^(?!x)y' and has a look-ahead, (?!,"),
    "look-behind": ({"patternProperties": {"(?<=a)b": {}}},
        "patternProperties at # in the JSON schema is '(?<=a)b' and has a look-behind"),
    "back reference": ({"type": "string", "pattern": r"(a)\1"},
        "pattern at # in the JSON schema is '(a)\\\\1' and has a back reference"),
    "word boundary": ({"type": "string", "pattern": r"\ba"}, "pattern at # "),
    "inner anchor": ({"items": {"type": "string", "pattern": "a^b"}},
        "pattern at #/items in the JSON schema has an assertion"),
    "broken pattern": ({"items": {"type": "string", "pattern": "(("}}, "pattern at #/items "),
    "a number beyond doubles": ('{"maximum": 1e400}', "maximum at # "),
    "digits beyond doubles": ('{"const": %s}' % ("9" * 5000), "const at # "),
    "a constant that no double is": ({"items": {"const": 2**53 + 1}}, "const at #/items "),
    "an enum that no double is": ({"enum": [0, [2**64 - 1]]}, "enum at # "),
    "a constant of too many digits": ({"const": 1000000000000000.5}, "const at # "),
    "the lowest of 64 bits": ({"const": -2**63}, "const at # "),
    "minimum too high": ({"type": "integer", "minimum": 2**63}, "minimum at # "),
    "multipleOf of many digits": ({"multipleOf": 0.12345678912}, "multipleOf at # "),
    "multipleOf overflow": ({"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]}, "multipleOf at #/allOf/1 "),
    "multipleOf 0": ({"multipleOf": 0}, "multipleOf at # "),
    "remote reference": (shape({"a": {"$ref": "https://example.com/a.json"}}),
        "$ref at #/properties/a in the JSON schema points outside"),
    "metaschema": ({"$ref": "https://json-schema.org/draft/2020-12/schema"},
        "$ref at # in the JSON schema points outside"),
    "dangling": ({"$ref": "#/$defs/a", "$defs": {}}, "$ref at # in the JSON schema points to nothing"),
    "dangling anchor": ({"anyOf": [{"$ref": "#a"}]}, "$ref at #/anyOf/0 in the JSON schema points to nothing"),
    "in a circle": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
                    "$ref at #/$defs/"),
    "an ambiguous id": ({"$ref": "a", "$defs": {"x": {"$id": "a"}, "y": {"$id": "a"}}},
        "$ref at # in the JSON schema names an $id"),
    "dynamic targets": ({"$dynamicRef": "#x", "$defs": {"a": {"$id": "a", "$dynamicAnchor": "x"}, "b": {
        "$dynamicAnchor": "x"}}}, "$dynamicRef at # "),
    "a circle beside others": (shape({"a": {"$ref": "#", "required": ["a"]}}), "$ref at #/properties/a "),
    "endless objects": (shape({"a": {"$ref": "#"}}, "a"),
        "a schema at # in the JSON schema has only values without end"),
    "endless lists": ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {
        "type": "array", "minItems": 1, "items": {"allOf": [{"$ref": "#/$defs/a"}]}}}}, "a schema at #/$defs/a "),
    "control characters beside open names": (shape({"a": {"const": "\0"}}), "additionalProperties at # "),
    "unknown type": ({"items": {"type": "wizard"}}, "type at #/items "), "no schema": ({"items": 3},
        "a schema at #/items "),
    "negative length": ({"minLength": -1}, "minLength at # "), "length of half": ({"maxItems": 1.5}, "maxItems at # "),
    "required of draft 3": (shape({"a": {"required": True}}), "required at #/properties/a "),
    "empty": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum at # in the JSON schema leaves no value"),
    "empty enum": ({"enum": []}, "enum at # "), "x-guidance": ({"x-guidance": {"lenient": True}}, "x-guidance at # "),
    "a bound that is text": ({"minimum": "1"}, "minimum at # "), "properties as a list": ({"properties": []},
        "properties at # "),
}


@pytest.fixture(scope="module")
def model() -> Iterator[RandomModel]:
    with random_model(wrap(byte_level_metadata("gpt-2"))) as found:
        yield found


@pytest.mark.parametrize("name", TABLE)
def test_what_fits_is_allowed_and_nothing_else(name: str, model: RandomModel) -> None:
    schema, good, bad = TABLE[name]
    grammar = COMPILER.grammar(StructuredOutputsParams(json=schema))
    assert not grammar.dropped
    for text in good:
        assert not errors(schema, json.loads(text)), f"the table is wrong about {text}"
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text
    for seed in range(4):
        text = model.write(grammar, seed)
        assert not errors(schema, json.loads(text)), text


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_met_is_refused_by_key_and_place(name: str) -> None:
    schema, start = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        COMPILER.grammar(StructuredOutputsParams(json=schema))
    assert caught.value.message.startswith(start) and caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 250


def test_a_part_names_itself_and_stands_alone() -> None:
    """References in it start at it; a strict one beside one that is not strict stays strict."""
    unique = {"type": "array", "uniqueItems": True}
    schema = {"prefixItems": [{"$ref": "#/$defs/a", "$defs": {"a": unique}}, {"properties": {"b": unique}}]}
    parts = (SchemaPart("/prefixItems/0", "first", strict=False), SchemaPart("/prefixItems/1", "second"))
    with pytest.raises(RequestError, match=r"^uniqueItems at second#/properties/b "):
        COMPILER.grammar(StructuredOutputsParams(json=schema, schema_parts=parts))
    grammar = COMPILER.grammar(StructuredOutputsParams(json=schema, schema_parts=(parts[0], SchemaPart(
        "/prefixItems/1", "second", strict=False))))
    assert grammar.dropped == ("uniqueItems",) and accepts(grammar, '[[1, 1], {"b": [2, 2]}]')


@pytest.mark.parametrize("schema", [
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, shape({"a": {}, "b": {}}, minProperties=1, maxProperties=5),
    {"type": "string", "pattern": "a^b"}, {"type": "string", "pattern": r"\bx", "format": "nope"},
    {"patternProperties": {"^a": {"type": "null"}, "a$": {}}}, {"const": 2**53 + 1}, {"enum": [1], "if": {},
        "then": {}},
], ids=str)
def test_what_is_not_strict_loses_what_cannot_be_met(schema: dict[str, Any], model: RandomModel) -> None:
    """And nothing else: without those keywords jsonschema finds nothing wrong."""
    grammar = COMPILER.grammar(StructuredOutputsParams(json=schema, schema_parts=(SchemaPart("", "tool", False),)))
    assert grammar.dropped and set(grammar.dropped) <= schema.keys()
    rest = {key: value for key, value in schema.items() if key not in grammar.dropped}
    for seed in range(3):
        assert not errors(rest, json.loads(model.write(grammar, seed)))


def test_nulls_of_what_is_not_strict_are_absent_keywords() -> None:
    null: dict[str, Any] = dict.fromkeys(("items", "enum", "format", "pattern", "$ref", "anyOf", "minLength", "minimum",
                                          "not", "description", "properties", "required", "$defs"))
    schema = {**null, "type": "object", "properties": {"a": {**null, "type": "string"}, "b": {"const": None}}}
    grammar = COMPILER.grammar(StructuredOutputsParams(json=schema, schema_parts=(SchemaPart("", "tool", False),)))
    assert not grammar.dropped and accepts(grammar, '{"a": "x", "b": null}') and not accepts(grammar, '{"b": 1}')
    with pytest.raises(RequestError):
        COMPILER.grammar(StructuredOutputsParams(json=schema))


OPEN = shape({"a": {"type": "null"}, "b": shape({})})


@pytest.mark.parametrize(("options", "good", "bad"), [
    ({}, ['{ "a" : null }', '{"c": 1}'], ["{" + " " * 30 + "}"]),
    ({"disable_any_whitespace": True}, ['{"a":null}'], ['{"a": null}', "{ }"]),
    ({"whitespace_pattern": " ?"}, ['{"a": null}', "{}"], ["{  }", "{\t}"]),
    ({"whitespace_pattern": r"[\s]{0,2}"}, ["{ \n}"], ["{   }"]), ({"whitespace_pattern": r"\s*"}, ["{ \t }"],
        ["{\v}"]),
    ({"whitespace_pattern": ""}, ["{}"], ["{ }"]),
    ({"disable_additional_properties": True}, ['{"a": null, "b": {}}'], ['{"c": 1}', '{"b": {"c": 1}}']),
], ids=str)
def test_options_of_json(options: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = COMPILER.grammar(StructuredOutputsParams(json=OPEN, **options))
    assert [accepts(grammar, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("pattern", ["[a ]*", "x", "(", "[ ", " " * 300, ".*", "\\S", "[^a]"])
def test_white_space_is_nothing_else(pattern: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.grammar(StructuredOutputsParams(json_object=True, whitespace_pattern=pattern))
    assert caught.value.param == "structured_outputs"
