"""Loading of a study from a YAML file and overrides; every mistake is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, ValidationError

from rayhive.errors import ConfigError, Problem, nearest
from rayhive.spec.moved import moved_to_space
from rayhive.spec.rules import check_sweep
from rayhive.spec.study import SweepConfig
from rayhive.spec.swarm import WORD
from rayhive.spec.yaml_data import Overrides, apply_overrides, plain, read_mapping

#: Rule that finds problems in a study whose structure is valid.
Check: TypeAlias = Callable[[SweepConfig], Iterable[Problem]]

# Parts of the location of a finding that name a branch of a union, not a key of the file.
_BRANCHES = ("Range", "tuple[any, ...]", "[key]")
# Values of required keys that are missing, so that the rest can be checked.
_PLACEHOLDERS: dict[str, Any] = {"name": "unnamed", "workload": {"name": None}}
# Values of invalid list entries, so that later entries keep their numbers.
_ENTRIES: dict[str, Any] = {"enqueue": {}, "scenarios": "none"}
# Descriptions of the patterns of names and labels.
_NAME_WORDS = "letters, digits, '.', '_' and '-', the first a letter or a digit"
_LABEL_WORDS = "at most 63 letters, digits, '.', '_' and '-', a letter or a digit at both ends"
# Error texts by pydantic's kind of error, where pydantic's own text is unclear.
_WORDS = {
    "too_short": "at least one entry",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "int_parsing_size": "an integer of at most 64 bits",
}


def load_sweep(path: str | Path, overrides: Overrides = ()) -> SweepConfig:
    """Read a study from a YAML file.

    Args:
        path: The file.
        overrides: Values that replace single fields.

    Raises:
        ConfigError: There are mistakes in the file or the overrides; all are reported.
    """
    problems: list[Problem] = []
    data = read_mapping(Path(path), problems)
    apply_overrides(data, overrides, problems)
    return validate_sweep(data, str(path), problems)


def validate_sweep(
    data: Mapping[str, Any],
    source: str | None = None,
    problems: Sequence[Problem] = (),
    checks: Sequence[Check] = (),
) -> SweepConfig:
    """Build a study from plain data, and report every mistake in it at once.

    Args:
        data: Content of a study file.
        source: Name of the file, for the error text.
        problems: Mistakes that are known already.
        checks: Further rules, from layers above this one.

    Raises:
        ConfigError: There are mistakes, ``problems`` included.
    """
    found = list(problems)
    config = _validate(moved_to_space(plain(data, found)), found)
    if config is not None:
        structural = tuple(found)
        for check in (check_sweep, *checks):
            found.extend(item for item in check(config) if not _follows(item, structural))
    if found or config is None:
        raise ConfigError(found, source)
    return config


def _follows(problem: Problem, known: Iterable[Problem]) -> bool:
    """Return whether a problem is a consequence of a known one."""
    return any(item.key == problem.key or item.key.startswith(problem.key + ".") for item in known)


def _validate(data: dict[str, Any], problems: list[Problem]) -> SweepConfig | None:
    """Validate ``data``; record each mistake, remove it from ``data`` and validate again."""
    for _ in range(8):
        try:
            return SweepConfig.model_validate(data)
        except ValidationError as error:
            for item in error.errors():
                problem = as_problem(item)
                if not _follows(problem, problems):
                    problems.append(problem)
                _mend(data, item)
    return None


def _mend(data: Any, item: Any) -> None:
    """Remove the cause of one of pydantic's errors from ``data``, so that the rest is checked."""
    location = item["loc"]
    placeholder = _PLACEHOLDERS.get(location[0])
    if item["type"] == "missing" and len(location) > 1:
        location = location[:-1]
    if len(location) == 1 and placeholder is not None:
        data[location[0]] = placeholder
        return
    holder, last = None, None  # the deepest part of the data that the location names
    for part in location:
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, dict) and part in data):
            holder, last = data, part
            data = data[part]
    if isinstance(holder, list) and isinstance(last, int):
        holder[last] = _ENTRIES.get(location[0])
    elif isinstance(holder, dict):
        del holder[last]


def as_problem(item: Any, model: type[BaseModel] = SweepConfig) -> Problem:
    """Return one of pydantic's errors as a problem.

    Args:
        item: One of ``ValidationError.errors()``.
        model: The validated model; its fields are listed for an unknown key.
    """
    location = [part for part in item["loc"] if part not in _BRANCHES]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        fields = _fields_at(location[:-1], model)
        known = f"; known are {', '.join(fields)}" if fields else ""
        close = nearest(location[-1], fields)
        return Problem(key, item["input"], f"an unknown key{known}", close)
    if item["type"] == "missing":
        return Problem(key, None, "required")
    close = None
    if item["type"] == "literal_error":
        # "'a', 'b' or 'c'": every other piece is between quotes.
        close = nearest(item["input"], item["ctx"]["expected"].split("'")[1::2])
    text = _WORDS.get(item["type"], str(item["msg"]).removeprefix("Input should be "))
    if item["type"] == "string_pattern_mismatch":
        label = WORD in item["ctx"]["pattern"]
        text = _LABEL_WORDS if label else _NAME_WORDS if location == ["name"] else text
    return Problem(key, item["input"], text[:1].lower() + text[1:], close)


def _fields_at(location: Sequence[Any], model: type[BaseModel]) -> list[str]:
    """Return the keys of the model at ``location`` below ``model``."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(_models(field.annotation), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
