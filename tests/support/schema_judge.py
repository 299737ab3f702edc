"""What a JSON schema says of a value, by jsonschema, which shares nothing with the code under test."""

from collections.abc import Mapping
from datetime import datetime, time
from fractions import Fraction
from typing import Any
from urllib.parse import urlsplit

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, the independent judge, is not installed")

# Formats for which jsonschema itself wants further packages.
CHECKER = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "regex", "uuid"])
for _name, _check in {"date-time": lambda text: datetime.fromisoformat(text).tzinfo is not None,
                      "time": lambda text: time.fromisoformat(text).tzinfo is not None,
                      "uri": lambda text: urlsplit(text).scheme != "",
                      "hostname": lambda text: all(0 < len(label) < 64 for label in text.split("."))}.items():
    CHECKER.checks(_name, ValueError)(lambda value, check=_check: not isinstance(value, str) or check(value))


def _multiple_of(validator: Any, divisor: Any, value: Any, schema: Any) -> Any:
    """In decimal fractions: jsonschema divides doubles."""
    if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(divisor)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {divisor}")


def errors(schema: Mapping[str, Any], value: Any) -> list[str]:
    """What is wrong with a value."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    strict = jsonschema.validators.extend(kind, {"multipleOf": _multiple_of})
    return [error.message for error in strict(schema, format_checker=CHECKER).iter_errors(value)]
