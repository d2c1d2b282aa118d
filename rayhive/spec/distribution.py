"""Values that an axis of a study may take: a constant, a list of choices, or a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from rayhive.spec.model import Model


class Range(Model):
    """Numbers between two ends.

    Attributes:
        low: Least value, included.
        high: Greatest value, included.
        log: Sample uniformly in the logarithm.
    """

    low: float
    high: float
    log: bool = False


def _read(value: object) -> object:
    """Read a constant as a list of one value; leave lists and ranges alone."""
    if isinstance(value, Range):
        return value
    if isinstance(value, Mapping):
        return Range.model_validate(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (value,)


Distribution = Annotated[Range | tuple[Any, ...], BeforeValidator(_read)]


def ends(distribution: Range | tuple[Any, ...]) -> tuple[Any, ...]:
    """Return both ends of a range, or every value of a list."""
    if isinstance(distribution, Range):
        return (distribution.low, distribution.high)
    return tuple(distribution)


def choices(distribution: Range | tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return every value of a distribution, or None if it is a range of several values."""
    if not isinstance(distribution, Range):
        return tuple(distribution)
    return (distribution.low,) if distribution.low >= distribution.high else None


def shown(distribution: Range | tuple[Any, ...]) -> object:
    """Return a distribution as a study writes it."""
    if isinstance(distribution, Range):
        return distribution.model_dump()
    return distribution[0] if len(distribution) == 1 else list(distribution)
