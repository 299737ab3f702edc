"""JSON schemas as libraries write them, turned into what llguidance compiles to the same texts.

Definitions are gathered in one `$defs`, whatever the references to them look like; keywords that are only notes are
left out; some that llguidance lacks are said by others. What is left cannot be met exactly: it is refused by its key
and place, or dropped in the parts of a schema that need not be met exactly.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.core.limits import Limits, check_at_most
from jaxpaged.core.sampling_params import SchemaPart
from jaxpaged.text.disjoint_schemas import Disjointness
from jaxpaged.text.regex_constructs import translate_regex
from jaxpaged.text.schema_formats import COMPILED_FORMATS, FORMAT_PATTERNS, INTEGER_FORMATS
from jaxpaged.text.schema_nodes import APPLICATORS, BOUNDS, REFERENCES, SchemaNode, schema_error, subschemas
from jaxpaged.text.schema_numbers import bound, divisor, exact_number, have_common_multiple, num_remainders
from jaxpaged.text.schema_passes import avoid_exclusive, check_cycles, check_names, joins_numbers, resolve_one_of
from jaxpaged.text.schema_recursion import depth, endless_definitions
from jaxpaged.text.schema_refs import Document, Located, RefError

_MAX_COUNT = 2**24  # more characters or items than any text has
_MAX_STEPS = 8  # references followed from one to the next
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords that no grammar here can say, save for some values. All others that are not handled here are notes.
_UNSUPPORTED = ("contains", "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
                "if", "not", "unevaluatedItems", "unevaluatedProperties")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # those that JSON can only write as \u and four digits


@dataclass
class PreparedSchema:
    """A schema for the compiler.

    Attributes:
        root: the schema, with all definitions in `$defs`.
        dropped: keywords dropped so far.
        needs_escapes: a constant holds a control character that JSON writes as an escape.
    """

    root: SchemaNode = field(default_factory=lambda: SchemaNode("#", False))
    dropped: list[str] = field(default_factory=list)
    needs_escapes: bool = False


def prepare_schema(schema: Mapping[str, Any], limits: Limits, *, parts: Sequence[SchemaPart] = (),
                   disable_additional_properties: bool = False) -> PreparedSchema:
    """Prepare a schema for the compiler.

    Args:
        schema: a JSON schema of any draft.
        parts: schemas inside it that are documents of their own.
        disable_additional_properties: objects that name properties, and say nothing of others, have no others.

    Raises:
        RequestError: it cannot be met exactly; the text names the key and its place.
    """
    if "x-guidance" in schema:
        raise schema_error("x-guidance", "#", "is not supported; leave it out")
    return _Translator(limits, {part.pointer: part for part in parts}, disable_additional_properties).run(schema)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The document that a schema belongs to, how errors call it, and whether it must be met exactly."""

    document: Document
    name: str = ""
    strict: bool = True


class _Schema:
    """One schema while it is translated: where it was, what it was, and what becomes of it."""

    def __init__(self, scope: _Scope, found: Located) -> None:
        self.scope, self.found = scope, found
        self.node: Mapping[str, Any] = found.node
        if not scope.strict:  # null in place of a keyword that is absent, as some languages write structures
            self.node = {key: value for key, value in found.node.items() if value is not None or key == "const"}
        self.place = f"{scope.name}#{found.place}"
        self.out = SchemaNode(self.place, not scope.strict)

    def join(self, keywords: dict[str, Any]) -> None:
        """Add keywords that hold beside those already there."""
        if self.out.keys().isdisjoint(keywords):
            self.out.update(keywords)
        else:
            self.out["allOf"] = [*self.out.get("allOf", ()), SchemaNode(self.place, self.out.lenient, keywords)]


class _Translator:
    def __init__(self, limits: Limits, parts: Mapping[str, SchemaPart], close: bool) -> None:
        self._limits, self._parts, self._close = limits, parts, close
        self._names: dict[tuple[str, str], str] = {}
        self._waiting: list[tuple[str, Located, _Scope]] = []
        self._divisors: dict[int | float, str] = {}
        self._result = PreparedSchema()

    def run(self, schema: Mapping[str, Any]) -> PreparedSchema:
        document = Document(schema)
        root = self._translate(document.root, _Scope(document))
        definitions: dict[str, Any] = {}
        while self._waiting:
            name, found, scope = self._waiting.pop()
            definitions[name] = self._translate(found, scope)
        check_cycles(definitions)
        for name in endless_definitions(definitions):
            raise schema_error("a schema", definitions[name].place, "has only values without end: it requires itself")
        if not isinstance(root, SchemaNode):
            root = SchemaNode("#", False, {"anyOf": [root]})
        check_at_most("structured_outputs", "levels of a JSON schema with its references followed",
                      depth(root, definitions), self._limits.max_schema_levels)
        root["$defs"] = definitions
        self._result.root = root
        self._result.dropped += resolve_one_of(root, Disjointness(definitions))
        joined = joins_numbers(root)
        if joined and not have_common_multiple(list(self._divisors)):
            raise schema_error("multipleOf", list(self._divisors.values())[-1],
                               "has no common multiple with another multipleOf that is small enough")
        for node in list(subschemas(root)):
            avoid_exclusive(node, joined)
        if self._result.needs_escapes:
            check_names(root)
        return self._result

    def _translate(self, found: Located, scope: _Scope) -> Any:
        part = self._parts.get(found.place) if not scope.name else None
        if part is not None:
            document = Document(found.node)
            found, scope = document.root, _Scope(document, part.name, part.strict)
        node = found.node
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise schema_error("a schema", f"{scope.name}#{found.place}", "must be an object, true or false")
        if "not" in node and _is_anything(node["not"]):
            return False
        schema = _Schema(scope, found)
        for key, value in schema.node.items():
            self._keyword(schema, key, value)
        self._finish(schema)
        return schema.out

    def _keyword(self, schema: _Schema, key: str, value: Any) -> None:
        out = schema.out
        if key in REFERENCES:
            self._reference(schema, key)
        elif key == "type":
            out[key] = self._type(schema, value)
        elif key in ("const", "enum"):
            self._constants(schema, key, value)
        elif key in ("allOf", "anyOf", "oneOf"):
            schema.join({key: self._list(schema, key, value)})
        elif key in ("prefixItems", "items") and isinstance(value, list):
            out["prefixItems"] = self._list(schema, key, value) if value else []
        elif key in ("items", "additionalProperties"):
            out[key] = self._child(schema, key)
        elif key == "additionalItems" and isinstance(schema.node.get("items"), list):
            out["items"] = self._child(schema, key)
        elif key in ("properties", "patternProperties"):
            self._properties(schema, key, value)
        elif key == "required":
            self._required(schema, value)
        elif key in _COUNTS:
            self._count(schema, key, value)
        elif key in BOUNDS:
            self._bound(schema, key, value)
        elif key == "multipleOf":
            self._multiple_of(schema, value)
        elif key == "pattern":
            pattern = self._regex(schema, key, value)
            if pattern is not None:
                schema.join({key: pattern})
        elif key == "format":
            self._format(schema, value)
        elif key in ("$defs", "definitions") and not isinstance(value, Mapping):
            raise schema_error(key, schema.place, "must be an object")
        elif key in _UNSUPPORTED and not self._rewrite(schema, key, value):
            self._refuse(schema, key, "cannot be met exactly")

    def _refuse(self, schema: _Schema, key: str, why: str) -> None:
        """Drop a keyword where that is allowed."""
        if schema.scope.strict:
            raise schema_error(key, schema.place, f"{why}; leave it out")
        self._result.dropped.append(key)

    def _child(self, schema: _Schema, *steps: str | int) -> Any:
        return self._translate(schema.found.child(*steps), schema.scope)

    def _list(self, schema: _Schema, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise schema_error(key, schema.place, "must be a list of schemas")
        return [self._child(schema, key, index) for index in range(len(value))]

    def _reference(self, schema: _Schema, key: str) -> None:
        target = self._resolve(schema, schema.found, key)
        known = (schema.scope.name, target.place)
        if known not in self._names:
            self._names[known] = str(len(self._names))
            self._waiting.append((self._names[known], target, schema.scope))
        schema.join({"$ref": f"#/$defs/{self._names[known]}"})
        if isinstance(target.node, Mapping) and target.node.get("type") == schema.node.get("type"):
            schema.out["type"] = None  # said again; the compiler can join nothing with a circular reference

    def _type(self, schema: _Schema, value: Any) -> Any:
        kinds = value if isinstance(value, list) else [value]
        if not kinds or not all(kind in _TYPES for kind in kinds):
            raise schema_error("type", schema.place, f"must be one or a list of {', '.join(_TYPES)}")
        return schema.out.get("type", value)

    def _constants(self, schema: _Schema, key: str, value: Any) -> None:
        if key == "enum" and (not isinstance(value, list) or not value):
            raise schema_error(key, schema.place, "must be a list of values")
        try:
            schema.out[key] = self._constant(value)
        except _InexactError:
            self._refuse(schema, key, "holds a number that cannot be written exactly")

    def _constant(self, value: Any) -> Any:
        """A value of JSON, with numbers as the compiler has to read them."""
        if isinstance(value, Mapping):
            return {name: self._constant(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._constant(item) for item in value]
        if isinstance(value, str) and _CONTROL.search(value):
            self._result.needs_escapes = True
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            exact = exact_number(value)
            if exact is None:
                raise _InexactError
            return exact
        return value

    def _properties(self, schema: _Schema, key: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise schema_error(key, schema.place, "must be an object")
        names = {name: name for name in value}
        if key == "patternProperties":
            translated = {name: self._regex(schema, key, name) for name in value}
            names = {name: pattern for name, pattern in translated.items() if pattern is not None}
        schema.out[key] = {new: self._child(schema, key, name) for name, new in names.items()}

    def _required(self, schema: _Schema, value: Any) -> None:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            schema.out["required"] = list(dict.fromkeys(value))
        else:
            self._refuse(schema, "required", "must be a list of names")

    def _count(self, schema: _Schema, key: str, value: Any) -> None:
        whole = not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
        if not whole or value < 0:
            raise schema_error(key, schema.place, "must be an integer of at least 0")
        if value < _MAX_COUNT:
            schema.out[key] = int(value)
        elif key.startswith("min"):
            self._refuse(schema, key, f"must be below {_MAX_COUNT}")

    def _bound(self, schema: _Schema, key: str, value: Any) -> None:
        lower = key in ("minimum", "exclusiveMinimum")
        if isinstance(value, bool) and key.startswith("exclusive"):  # of draft 4
            inclusive = "minimum" if lower else "maximum"
            if value and inclusive in schema.node:
                self._bound(schema, key, schema.node[inclusive])
            return
        self._check_number(schema, key, value)
        found = bound(value, lower=lower)
        if found is None:
            self._refuse(schema, key, "is a bound too far from 0")
        else:
            schema.join({key: found})

    def _multiple_of(self, schema: _Schema, value: Any) -> None:
        self._check_number(schema, "multipleOf", value)
        if value <= 0:
            raise schema_error("multipleOf", schema.place, "must be above 0")
        found = divisor(value)
        if found is None:
            self._refuse(schema, "multipleOf", "is a number with too many digits")
        elif num_remainders(value) > self._limits.max_multiple_of:
            raise schema_error("multipleOf", schema.place,
                               f"is too large: it may have at most {self._limits.max_multiple_of} remainders")
        else:
            schema.out["multipleOf"] = found
            self._divisors.setdefault(value, schema.place)

    @staticmethod
    def _check_number(schema: _Schema, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise schema_error(key, schema.place, "must be a number")

    def _regex(self, schema: _Schema, key: str, pattern: Any) -> str | None:
        """A pattern for the compiler; None where it is dropped."""
        if not isinstance(pattern, str):
            raise schema_error(key, schema.place, "must be a regular expression")
        translated, construct = translate_regex(pattern, of_schema=True)
        if construct is None:
            return translated
        self._refuse(schema, key, f"is {pattern[:60]!r} and has {construct}, which is not supported")
        return None

    def _format(self, schema: _Schema, value: Any) -> None:
        kinds = schema.node.get("type", "string")
        if not isinstance(value, str):
            raise schema_error("format", schema.place, "must be a string")
        if kinds != "string" and "string" not in kinds:
            if value in INTEGER_FORMATS and ("integer" in kinds):
                low, high = INTEGER_FORMATS[value]
                schema.join({"minimum": bound(low, lower=True), "maximum": bound(high, lower=False)})
        elif value in FORMAT_PATTERNS:
            schema.join({"pattern": FORMAT_PATTERNS[value]})
        elif value in COMPILED_FORMATS:
            schema.out["format"] = value
        else:
            self._refuse(schema, "format", f"is {value[:30]!r}, which cannot be enforced")

    def _rewrite(self, schema: _Schema, key: str, value: Any) -> bool:
        """Whether a keyword that the compiler lacks asks for nothing, or could be said by others."""
        node = schema.node
        if key == "uniqueItems":
            return value is False or node.get("maxItems") in (0, 1)
        if key == "contains":
            return node.get("minContains") == 0 and "maxContains" not in node
        if key == "if":
            return "then" not in node and "else" not in node
        if key == "not":
            return value is False
        if key == "propertyNames":
            return self._property_names(schema)
        if key == "unevaluatedItems":
            return _is_anything(value) or "items" in node
        if key == "unevaluatedProperties":
            if value is False and node.keys().isdisjoint((*APPLICATORS, "additionalProperties")):
                schema.out["additionalProperties"] = False
                return True
            return _is_anything(value) or "additionalProperties" in node
        return value == {}

    def _property_names(self, schema: _Schema) -> bool:
        names, node, out = self._names_schema(schema), schema.node, schema.out
        if isinstance(names, bool):
            if not names:
                out["maxProperties"] = 0
            return True
        if not names.keys() - {"type"}:
            return "string" in names.get("type", "string")
        if not node.keys().isdisjoint(("properties", "patternProperties")):
            return False
        rest = self._child(schema, "additionalProperties") if "additionalProperties" in node else True
        said = names.keys() - {"type"}
        if said == {"enum"} or said == {"const"}:
            wanted = names["enum"] if "enum" in said else [names["const"]]
            out["properties"] = {name: rest for name in wanted if isinstance(name, str)}
        elif said == {"pattern"}:
            out["patternProperties"] = {names["pattern"]: rest}
        elif said <= {"minLength", "maxLength"}:
            length = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            out["patternProperties"] = {length: rest}
        else:
            return False
        out["additionalProperties"] = False
        return True

    def _names_schema(self, schema: _Schema) -> Any:
        """The schema of names, behind a reference that is all there is."""
        found = schema.found.child("propertyNames")
        for _ in range(_MAX_STEPS):
            if not isinstance(found.node, Mapping) or found.node.keys() != {"$ref"}:
                break
            found = self._resolve(schema, found, "$ref")
        return self._translate(found, schema.scope)

    def _resolve(self, schema: _Schema, found: Located, key: str) -> Located:
        try:
            return schema.scope.document.resolve(found.node[key], found.base, dynamic=key != "$ref")
        except RefError as error:
            raise schema_error(key, schema.place, str(error)) from None

    def _finish(self, schema: _Schema) -> None:
        """What depends on several keywords."""
        out = schema.out
        if out.get("type", "") is None:
            del out["type"]
        if "properties" not in schema.node and "propertyNames" in schema.node and (
                "properties" in out or "patternProperties" in out):
            out["additionalProperties"] = False  # which `_property_names` has moved
        if self._close and ("properties" in out or "patternProperties" in out):
            out.setdefault("additionalProperties", False)
        missing = out.get("minProperties", 0) - len(out.get("required", ()))
        if missing <= 0:
            out.pop("minProperties", None)
        elif missing > 1 and (out.get("additionalProperties") is not False or "patternProperties" in out):
            del out["minProperties"]  # a name may be written twice, which no grammar here can see
            self._refuse(schema, "minProperties", "cannot be met exactly")


class _InexactError(Exception):
    """A number that the compiler cannot write."""


def _is_anything(schema: Any) -> bool:
    return schema is True or schema == {}
