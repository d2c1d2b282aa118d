"""Typed arguments of a workload; every mistake is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from rayhive.errors import ConfigError, Problem, nearest, unknown
from rayhive.spec.model import exponent

KEY = "workload.args"


class WorkloadArgs(BaseModel):
    """Base of the arguments of a workload; a subclass declares one field per argument.

    Types are strict: a truth value is not read from a number, nor a number from text. Text such as
    ``1e-3`` is a number, because YAML 1.1 reads it as text. An integer is allowed for a float.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _exponent(cls, value: Any) -> Any:
        return exponent(value)


A = TypeVar("A", bound=WorkloadArgs)


def parse_args(model: type[A], given: Mapping[str, Any]) -> A:
    """Return ``given`` as a ``model``.

    Raises:
        ConfigError: Arguments are unknown, of the wrong type or out of range. The problem of each
            has the key ``workload.args.NAME``.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        problems = [_problem(model, dict(item)) for item in error.errors(include_url=False)]
        raise ConfigError(problems) from None


def _problem(model: type[WorkloadArgs], item: Mapping[str, Any]) -> Problem:
    name = ".".join(str(part) for part in item["loc"])
    key = f"{KEY}.{name}" if name else KEY
    if item["type"] == "extra_forbidden":
        return unknown(key, name, model.model_fields)
    if item["type"] == "literal_error":
        # "'adam' or 'sgd'": the names are between quotes.
        choices = item["ctx"]["expected"].split("'")[1::2]
        close = nearest(item["input"], choices)
        return Problem(key, item["input"], f"one of {', '.join(choices)}", close)
    text = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return Problem(key, item["input"], text)
