"""YAML parser that reports repeated keys, bad scalars and unbounded nesting as errors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.composer import ComposerError

from rayhive.errors import Problem
from rayhive.spec.plain_data import DEPTH, VALUES


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
