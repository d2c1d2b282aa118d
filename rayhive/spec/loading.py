"""From a YAML file and ``a.b=c`` overrides to a study, with every mistake told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rayhive.errors import ConfigError, Problem, nearest
from rayhive.spec.plain_data import plain
from rayhive.spec.study import WORD, SweepConfig
from rayhive.spec.yaml_text import parse

#: Finds what is wrong with a study whose structure is right.
Check: TypeAlias = Callable[[SweepConfig], Iterable[Problem]]

# Parts of the location of a finding that name a branch of a union, not a key of the file.
_BRANCHES = ("Range", "tuple[any, ...]", "[key]")
# Stand-ins for required keys that are missing, so that the rest can still be looked at.
_PLACEHOLDERS: dict[str, Any] = {"name": "unnamed", "workload": {"name": None}}
# Stand-ins for list entries that are wrong: the ones after them keep their numbers.
_ENTRIES: dict[str, Any] = {"enqueue": {}, "scenarios": "none"}
# What the patterns of names and labels ask for.
_NAME_WORDS = "letters, digits, '.', '_' and '-', the first a letter or a digit"
_LABEL_WORDS = "at most 63 letters, digits, '.', '_' and '-', a letter or a digit at both ends"
# Kinds of findings whose text does not speak of patterns and types.
_WORDS = {
    "too_short": "at least one entry",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "int_parsing_size": "an integer of at most 64 bits",
}


def load_sweep(
    path: str | Path, overrides: Sequence[str] = (), checks: Sequence[Check] = ()
) -> SweepConfig:
    """Read a study from a YAML file.

    Args:
        path: The file.
        overrides: ``a.b=c`` strings that replace single fields; the values are YAML.
        checks: Further rules, of layers that know more than this one.

    Raises:
        ConfigError: With every mistake in the file and the overrides.
    """
    problems: list[Problem] = []
    data = read_mapping(Path(path), problems)
    apply_overrides(data, overrides, problems)
    return validate_sweep(data, str(path), problems, checks)


def validate_sweep(
    data: Mapping[str, Any],
    source: str | None = None,
    problems: Sequence[Problem] = (),
    checks: Sequence[Check] = (),
) -> SweepConfig:
    """Build a study from plain data, reporting every mistake in it at once.

    Args:
        data: What a file would hold.
        source: Where it came from, for the message.
        problems: Mistakes that are known already.
        checks: Further rules, of layers that know more than this one.

    Raises:
        ConfigError: With ``problems`` and all that were found.
    """
    from rayhive.spec.rules import check_sweep

    found = list(problems)
    config = _validate(plain(data, found), found)
    if config is not None:
        structural = tuple(found)
        for check in (check_sweep, *checks):
            found.extend(item for item in check(config) if not _follows(item, structural))
    if found or config is None:
        raise ConfigError(found, source)
    return config


def _follows(problem: Problem, known: Iterable[Problem]) -> bool:
    """Say whether a problem is about what was dropped because of a known one."""
    return any(item.key == problem.key or item.key.startswith(problem.key + ".") for item in known)


def _validate(data: dict[str, Any], problems: list[Problem]) -> SweepConfig | None:
    """Validate; on mistakes note them, drop what is wrong from ``data`` and go on."""
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
    """Change ``data`` so that this finding is gone and the rest can be looked at."""
    location = item["loc"]
    placeholder = _PLACEHOLDERS.get(location[0])
    if item["type"] == "missing" and len(location) > 1:
        location = location[:-1]
    if len(location) == 1 and placeholder is not None:
        data[location[0]] = placeholder
    else:
        _drop(data, location)


def _drop(data: Any, location: Sequence[Any]) -> None:
    """Remove the deepest part of ``data`` that ``location`` names."""
    holder, last = None, None
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
    """Turn one of pydantic's findings into a problem with a key, a value and what is allowed.

    Args:
        item: One of ``ValidationError.errors()``.
        model: What was validated; of an unknown key, it says which are known.
    """
    location = [part for part in item["loc"] if part not in _BRANCHES]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        fields = _fields_at(location[:-1], model)
        return Problem(
            key,
            item["input"],
            f"an unknown key; known are {', '.join(fields)}" if fields else "an unknown key",
            nearest(location[-1], fields),
        )
    if item["type"] == "missing":
        return Problem(key, None, "required")
    close = None
    if item["type"] == "literal_error":
        # "'a', 'b' or 'c'": what stands between quotes is every other piece.
        close = nearest(item["input"], item["ctx"]["expected"].split("'")[1::2])
    text = _WORDS.get(item["type"], str(item["msg"]).removeprefix("Input should be "))
    if item["type"] == "string_pattern_mismatch":
        label = WORD in item["ctx"]["pattern"]
        text = _LABEL_WORDS if label else _NAME_WORDS if location == ["name"] else text
    return Problem(key, item["input"], text[:1].lower() + text[1:], close)


def _fields_at(location: Sequence[Any], model: type[BaseModel]) -> list[str]:
    """Return the keys that the model at ``location`` below ``model`` knows."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is not None:
            leaves = _flatten(field.annotation)
            model = next((leaf for leaf in leaves if _is_model(leaf)), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _flatten(annotation: Any) -> list[Any]:
    arguments = get_args(annotation)
    return [annotation, *(leaf for argument in arguments for leaf in _flatten(argument))]


def read_mapping(file: Path, problems: list[Problem]) -> dict[str, Any]:
    """Read a YAML file that holds keys and values.

    Args:
        file: The file.
        problems: Gets one for each key that stands twice, and each value that no study holds.

    Raises:
        ConfigError: It cannot be read, or holds something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(Problem("FILE", str(file), f"a text file in UTF-8: {error}")) from error
    except (OSError, ValueError) as error:  # a path may hold what no file name does
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            Problem("FILE", str(file), f"a readable YAML file ({reason})", _sibling(file))
        ) from error
    try:
        data = parse(text, problems)
    except yaml.YAMLError as error:
        raise ConfigError(Problem("FILE", str(file), f"valid YAML: {error}")) from error
    if not isinstance(data, dict):
        raise ConfigError(Problem("FILE", str(file), "a mapping of keys to values"))
    found: dict[str, Any] = plain(data, problems)
    return found


def apply_overrides(
    data: dict[str, Any], overrides: Sequence[str], problems: list[Problem]
) -> None:
    """Replace single fields of ``data``, and note overrides that say nothing.

    Args:
        data: What a file holds.
        overrides: ``a.b=c`` strings; the values are YAML.
        problems: Gets one for each that cannot be read.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            problems.append(Problem("--set", override, "KEY=VALUE, for example replicates=2"))
            continue
        try:
            value = parse(text, problems)
        except yaml.YAMLError as error:
            problems.append(Problem(f"--set {key}", text, f"a YAML value: {error}"))
            continue
        *parents, last = key.split(".")
        holder: Any = data
        for parent in parents:
            if holder.get(parent) is None:
                holder[parent] = {}
            holder = holder[parent]
            if not isinstance(holder, dict):
                problems.append(Problem(f"--set {key}", text, f"{parent} holds no keys"))
                break
        else:
            holder[last] = value


def _sibling(file: Path) -> str | None:
    folder = file.parent
    names = [str(folder / item.name) for item in folder.glob("*.y*ml")] if folder.is_dir() else []
    return nearest(str(file), names)
