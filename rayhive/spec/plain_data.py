"""Check of the data types of a study, before its keys are checked.

A study is stored as JSON, YAML and SQL, and sent to actors. Values that one of these cannot hold
are refused under their key: dates, bytes, integers of more than 64 bits, control characters, and
containers that contain themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from rayhive.errors import Problem

#: Levels of mappings and lists within each other.
DEPTH = 32
#: Values of one study; each use of an alias counts.
VALUES = 100_000
#: Range of a 64-bit integer, the largest that databases and tensors hold.
INTEGERS = range(-(2**63), 2**63)

_WRONG = object()
_KINDS = "text, a number, true, false, null, a list or a mapping"


def plain(value: Any, problems: list[Problem]) -> Any:
    """Return a copy of ``value`` that consists of mappings, lists and JSON's scalars.

    Args:
        value: A mapping, from a file or a caller.
        problems: List to which a problem is added for each value of another type. Such a value is
            left out of its mapping and is None in its list, so that the rest can be checked.
    """
    found = _Copy(problems).of(value, (), ())
    return {} if found is _WRONG else found


@dataclass
class _Copy:
    """Recursive copy of nested data."""

    problems: list[Problem]
    count: int = field(default=0, init=False)

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
