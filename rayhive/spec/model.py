"""Base of the models of a study, and the limits that their fields share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from rayhive.spec.scalars import as_written

#: Largest number of samples, rounds and the like: a double counts exactly up to here.
MOST = 2**53
#: Longest time [s]: ten years.
LONGEST_S = 3.2e8


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
        return as_written(value, cls.model_fields[str(info.field_name)].annotation)
