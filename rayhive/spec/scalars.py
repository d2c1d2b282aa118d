"""Scalars as they are written: no number out of a truth value, no truth value out of a word."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

from pydantic_core import PydanticCustomError

EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def exponent(value: Any) -> Any:
    """Read ``1e-3``, which YAML 1.1 takes for text, as the number that is meant."""
    if not isinstance(value, str) or len(value) > 64 or EXPONENT.fullmatch(value) is None:
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def as_written(value: Any, annotation: Any) -> Any:
    """Return a scalar unchanged, and refuse one that pydantic would take for another type.

    Args:
        value: What a field is given.
        annotation: The type of the field.

    Raises:
        PydanticCustomError: A truth value or text stands where a number belongs, or a number or
            text where a truth value does.
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
    """Return the scalar types among the choices of a field, None if anything else may stand."""
    choices = get_args(annotation) or (annotation,)
    known = {bool, int, float, str, type(None)}
    if not all(choice in known for choice in choices):
        return None
    return frozenset(choices) - {type(None)}
