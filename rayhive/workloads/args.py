"""The arguments of a workload: typed, checked, and all mistakes told at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from rayhive.errors import ConfigError, Problem, nearest, unknown
from rayhive.spec.scalars import exponent

KEY = "workload.args"


class WorkloadArgs(BaseModel):
    """Base of the arguments of a workload; a subclass declares one field an argument.

    Values are taken as they are written: no flag is read out of a number, no number out of a
    string (but for ``1e-3`` and the like); an integer may stand where a float is meant.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _exponent(cls, value: Any) -> Any:
        return exponent(value)


A = TypeVar("A", bound=WorkloadArgs)


def parse_args(model: type[A], given: Mapping[str, Any]) -> A:
    """Return ``given`` as ``model``.

    Raises:
        ConfigError: Names the key ``workload.args.X`` of every argument that is unknown (with the
            nearest known one), of the wrong type or out of range.
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
        # "'adam' or 'sgd'": the names stand between quotes.
        choices = item["ctx"]["expected"].split("'")[1::2]
        close = nearest(item["input"], choices)
        return Problem(key, item["input"], f"one of {', '.join(choices)}", close)
    text = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return Problem(key, item["input"], text)
