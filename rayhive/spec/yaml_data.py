"""Reading of YAML into plain data: mappings, lists and JSON's scalars.

A study is stored as JSON, YAML and SQL, and sent to actors. Values that one of these cannot hold
are refused under their key: dates, bytes, integers of more than 64 bits, control characters, and
containers that contain themselves. Repeated keys and unbounded nesting are refused as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel
from yaml.composer import ComposerError

from rayhive.errors import ConfigError, Problem, nearest

#: Levels of mappings and lists within each other.
DEPTH = 32
#: Values of one study; each use of an alias counts.
VALUES = 100_000
#: Range of a 64-bit integer, the largest that databases and tensors hold.
INTEGERS = range(-(2**63), 2**63)

_WRONG = object()
_KINDS = "text, a number, true, false, null, a list or a mapping"


def read_mapping(file: Path, problems: list[Problem]) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Args:
        file: The file.
        problems: List to which a problem is added for each repeated key and each value that a
            study cannot hold.

    Raises:
        ConfigError: The file cannot be read, or holds no mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(Problem("FILE", str(file), f"a text file in UTF-8: {error}")) from error
    except (OSError, ValueError) as error:  # a path may hold characters that no file name has
        reason = getattr(error, "strerror", None) or error
        allowed = f"a readable YAML file ({reason})"
        raise ConfigError(Problem("FILE", str(file), allowed, _sibling(file))) from error
    try:
        data = parse(text, problems)
    except yaml.YAMLError as error:
        raise ConfigError(Problem("FILE", str(file), f"valid YAML: {error}")) from error
    if not isinstance(data, dict):
        raise ConfigError(Problem("FILE", str(file), "a mapping of keys to values"))
    found: dict[str, Any] = plain(data, problems)
    return found


#: Values of single fields: ``{"a.b": 3}``, or ``["a.b=3"]`` with YAML values.
Overrides: TypeAlias = Mapping[str, Any] | Sequence[str] | None


def apply_overrides(data: dict[str, Any], overrides: Overrides, problems: list[Problem]) -> None:
    """Replace single fields of ``data``.

    Args:
        data: Content of a study file, changed in place.
        overrides: The fields and their values.
        problems: List to which a problem is added for each override that cannot be applied.
    """
    if isinstance(overrides, str):
        allowed = "a mapping, or a list of KEY=VALUE strings"
        problems.append(Problem("set", overrides, allowed))
    elif isinstance(overrides, Mapping):
        for key, value in overrides.items():
            wrong: list[Problem] = []
            copy = plain(value, wrong)
            if wrong:
                problems.append(Problem(f"set {key}", value, "a value that a YAML file can hold"))
            else:
                _set(data, key, copy, value, problems)
    else:
        for override in overrides or ():
            key, equals, text = override.partition("=")
            if not equals or not key:
                problems.append(Problem("--set", override, "KEY=VALUE, for example replicates=2"))
                continue
            try:
                _set(data, key, parse(text, problems), text, problems)
            except yaml.YAMLError as error:
                problems.append(Problem(f"--set {key}", text, f"a YAML value: {error}"))


def _set(
    data: dict[str, Any], key: str, value: Any, given: object, problems: list[Problem]
) -> None:
    """Set the value at a dotted key, or add a problem with the value as it was given."""
    *parents, last = key.split(".")
    for parent in parents:
        if data.get(parent) is None:
            data[parent] = {}
        data = data[parent]
        if not isinstance(data, dict):
            problems.append(Problem(f"--set {key}", given, f"{parent} holds no keys"))
            return
    data[last] = value


def _sibling(file: Path) -> str | None:
    folder = file.parent
    names = {item.stem: str(item) for item in folder.glob("*.y*ml")} if folder.is_dir() else {}
    close = nearest(file.stem, list(names))
    return None if close is None else names[close]


def parse(text: str, problems: list[Problem]) -> Any:
    """Return the value of a YAML document.

    Args:
        text: The document.
        problems: List to which a problem is added for each repeated key.

    Raises:
        yaml.YAMLError: The text is not YAML, or its nesting or its aliases exceed the limits.
    """
    loader = _Loader(text)
    loader.repeated = problems
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with limits, which records repeated keys."""

    repeated: list[Problem]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}
        self._anchored: list[Any] = []
        self._total = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node as the base class does, within the limits of nesting and aliases."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            node: Any = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                text = f"the alias {event.anchor!r} is part of what it stands for"
                raise ComposerError(None, None, text, event.start_mark)
            self._grow(self._sizes[id(node)], event)
            return node
        if self._depth > DEPTH:
            mark: Any = event.start_mark
            raise ComposerError(None, None, f"more than {DEPTH} levels", mark)
        before = self._total
        self._depth += 1
        self._grow(1, event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._sizes[id(node)] = self._total - before
            self._anchored.append(node)  # an id is unique only while its object lives
        return node

    def _grow(self, size: int, event: Any) -> None:
        self._total += size
        if self._total > 2 * VALUES:  # keys are nodes, too
            text = f"more than {VALUES:,} values, aliases counted"
            raise ComposerError(None, None, text, event.start_mark)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Build a value; a scalar that resembles a number or a date but is none is text."""
        if node.tag == "tag:yaml.org,2002:value":  # a single equals sign, in YAML 1.1
            node.tag = "tag:yaml.org,2002:str"
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, OverflowError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            # `node` is still marked as being built; a second call would report a loop.
            self.recursive_objects.pop(node, None)
            resolve: Any = self.resolve
            tag = resolve(yaml.ScalarNode, node.value, (True, False))
            if tag == node.tag:
                return self.constructed_objects.setdefault(node, node.value)
            text = f"{node.value[:40]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping as the base class does, and record repeated keys."""
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                text = "a key is a single word, not a list or a mapping"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                self.repeated.append(Problem(key.value, f"line {line}", "given once"))
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def dotted(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their dotted keys; an empty mapping is None."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if value == {} else value


def plain(value: Any, problems: list[Problem]) -> Any:
    """Return a copy of ``value`` that consists of mappings, lists and JSON's scalars.

    Args:
        value: A mapping, from a file or a caller.
        problems: List to which a problem is added for each value of another type. Such a value is
            left out of its mapping and is None in its list, so that the rest can be checked.
    """
    found = _Copy(problems).of(value, (), ())
    return {} if found is _WRONG else found


class _Copy:
    """Recursive copy of nested data."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.count = 0

    def of(self, value: Any, key: tuple[str, ...], holders: tuple[int, ...]) -> Any:
        """Return a copy of a value.

        Args:
            value: The value.
            key: Path of the value.
            holders: Ids of the containers around the value.
        """
        self.count += 1
        if self.count == VALUES + 1:
            return self._wrong(key, value, f"at most {VALUES:,} values, aliases counted")
        if self.count > VALUES:
            return _WRONG
        if isinstance(value, BaseModel):
            return value
        if isinstance(value, Mapping) or (
            isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
        ):
            if id(value) in holders:
                return self._wrong(key, "...", "a value that does not contain itself")
            if len(holders) == DEPTH:
                return self._wrong(key, "...", f"at most {DEPTH} levels")
            inner = (*holders, id(value))
            if isinstance(value, Mapping):
                return self._mapping(value, key, inner)
            items = [self.of(item, (*key, str(i)), inner) for i, item in enumerate(value)]
            return [None if item is _WRONG else item for item in items]
        return self._scalar(value, key)

    def _mapping(self, value: Mapping[Any, Any], key: tuple[str, ...], inner: Any) -> Any:
        found = {}
        for name, item in value.items():
            if not isinstance(name, str):
                self._wrong((*key, str(name)[:40]), name, "a key that is a string: in quotes")
            elif not name.isprintable():
                self._wrong((*key, repr(name[:40])), name, "a key of printable characters")
            else:
                copied = self.of(item, (*key, name), inner)
                if copied is not _WRONG:
                    found[name] = copied
        return found

    def _scalar(self, value: Any, key: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, int):
            return value if value in INTEGERS else self._wrong(key, value, "at most 64 bits")
        if not isinstance(value, str):
            kind = type(value).__name__
            return self._wrong(key, value, f"{_KINDS}, not {kind}: in quotes it is text")
        if all(map(_is_text, value)):
            return value
        return self._wrong(key, value, "text without control characters")

    def _wrong(self, key: tuple[str, ...], value: Any, allowed: str) -> Any:
        self.problems.append(Problem(".".join(key) or "FILE", value, allowed))
        return _WRONG


def _is_text(character: str) -> bool:
    """Return whether a character is neither a control character nor half a surrogate pair."""
    if character in "\t\n\r" or " " <= character <= "~":
        return True
    return ord(character) >= 0xA0 and not 0xD800 <= ord(character) <= 0xDFFF
