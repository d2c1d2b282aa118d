"""Base of the models of a study, and the limits that their fields share."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

#: Largest number of samples, rounds and the like: a double counts exactly up to here.
MOST = 2**53
#: Longest time [s]: ten years.
LONGEST_S = 3.2e8

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class Model(BaseModel):
    """Base of every model that crosses a boundary: frozen, and strict about keys and types.

    A number is not read from a truth value (``peers: yes``) or from text. The exception is text
    such as ``1e-3``: YAML 1.1 reads it as text, although a number is meant.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Return a scalar unchanged, and refuse one that pydantic would convert.

        Raises:
            PydanticCustomError: A truth value or text is given for a number, or a number or text
                for a truth value.
        """
        annotation: Any = cls.model_fields[str(info.field_name)].annotation
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


def exponent(value: Any) -> Any:
    """Return the number that text like ``1e-3`` means; YAML 1.1 reads it as text."""
    if not isinstance(value, str) or len(value) > 64 or _EXPONENT.fullmatch(value) is None:
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


@cache
def _scalars(annotation: Any) -> frozenset[type] | None:
    """Return the scalar types that a field allows, or None if it allows other types."""
    allowed = frozenset(get_args(annotation) or (annotation,)) - {type(None)}
    return allowed if allowed <= {bool, int, float, str} else None
