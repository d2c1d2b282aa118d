"""Changes of one node's link by faults, in a file that all agents of the node share."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rayhive.cluster.testbed.state import NodeState, TestbedState, write_private
from rayhive.cluster.testbed.veth import Veth
from rayhive.spec import Link

#: Changed quantities by the name of the change, oldest change first.
_Changes: TypeAlias = dict[str, dict[str, float]]


class LinkChanges:
    """The changes of a link; of each quantity, the newest change counts.

    Args:
        state: The testbed.
        node: The node.
    """

    def __init__(self, state: TestbedState, node: NodeState) -> None:
        self._veth, self._made = Veth(state, node), node.link
        self._path = state.folder / f"changes-{node.index}.json"

    def add(self, name: str, change: dict[str, float]) -> Link:
        """Change the link; return the setting before.

        Raises:
            ClusterError: The kernel refused the setting.
        """
        with self._locked():
            changes = self._load()
            earlier = changes.get(name, {})
            others = {key: each for key, each in changes.items() if key != name}
            # before the link changes: this process may be killed meanwhile
            self._save({**others, name: {**earlier, **change}})
            try:
                return self._veth.update(**change)[0]
            except BaseException:
                self._save(changes)
                raise

    def remove(self, name: str) -> Link:
        """Undo a change, if there is one of this name; return the setting afterwards.

        Raises:
            ClusterError: The kernel refused the setting.
        """
        with self._locked():
            changes = self._load()
            removed = changes.pop(name, None)
            if removed is None:
                return self._veth.now
            left = self._setting(changes)
            now = self._veth.update(**{key: left[key] for key in removed})[1]
            self._save(changes)  # only now: a removal that failed is repeated
            return now

    def restore(self, stays: Callable[[str], bool]) -> Link:
        """Undo all changes but some, and every other deviation from the configured link.

        Args:
            stays: Whether the change of this name stays.

        Returns:
            The setting afterwards.

        Raises:
            ClusterError: The kernel refused the setting.
        """
        with self._locked():
            changes = self._load()
            left = {name: change for name, change in changes.items() if stays(name)}
            wanted = self._setting(left)
            # the maker of a change may have died before it wrote the new setting
            if left != changes or self._veth.now.model_dump() != wanted:
                self._veth.update(**wanted)
                self._save(left)
            return self._veth.now

    def _setting(self, changes: _Changes) -> dict[str, float | None]:
        """Return the setting of the link with these changes."""
        values: dict[str, float | None] = self._made.model_dump()
        for change in changes.values():
            values |= change
        return values

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the changes against other processes and threads."""
        with self._path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _load(self) -> _Changes:
        try:
            changes: _Changes = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return changes

    def _save(self, changes: _Changes) -> None:
        write_private(self._path, json.dumps(changes))
