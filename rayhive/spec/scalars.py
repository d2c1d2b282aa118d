"""Strict scalars: a number is not read from a truth value, nor a truth value from text."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

from pydantic_core import PydanticCustomError

EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def exponent(value: Any) -> Any:
    """Return the number that text like ``1e-3`` means; YAML 1.1 reads it as text."""
    if not isinstance(value, str) or len(value) > 64 or EXPONENT.fullmatch(value) is None:
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def as_written(value: Any, annotation: Any) -> Any:
    """Return a scalar unchanged, and refuse one that pydantic would convert to another type.

    Args:
        value: Value that is given for a field.
        annotation: Type of the field.

    Raises:
        PydanticCustomError: A truth value or text is given for a number, or a number or text for a
            truth value.
    """
    kinds = _scalars(annotation)
    if kinds is None or not isinstance(value, (bool, int, float, str)):
        return value
    if kinds == {bool} and not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "true or false")
    if not kinds & {int, float} or (bool in kinds and isinstance(value, bool)):
        return value
    found = value if str in kinds else exponent(value)
    if isinstance(found, bool) or (isinstance(found, str) and str not in kinds):
        what = "a number" if float in kinds else "an integer"
        raise PydanticCustomError("number_type", "{what}", {"what": what})
    return found


@cache
def _scalars(annotation: Any) -> frozenset[type] | None:
    """Return the scalar types that a field allows, or None if it allows other types."""
    choices = get_args(annotation) or (annotation,)
    known = {bool, int, float, str, type(None)}
    if not all(choice in known for choice in choices):
        return None
    return frozenset(choices) - {type(None)}
