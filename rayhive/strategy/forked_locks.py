"""Locks that modules create at import, renewed in a process that was forked after it.

hivemind keeps locks between processes in attributes of its modules and classes. They are meant for
the processes of one peer. Peers that are forked from the same process must not share them.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.synchronize import Lock, RLock, SemLock
from typing import Any

#: Packages whose modules are searched.
PACKAGES = ("hivemind", "rayhive")


def held_locks() -> Iterator[tuple[Any, str, SemLock]]:
    """Yield the locks between processes in the imported modules: holder, attribute, lock."""
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in PACKAGES:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, SemLock):
                yield module, attribute, value
            elif isinstance(value, type) and value.__module__ == name:
                for inner, held in list(vars(value).items()):
                    if isinstance(held, SemLock):
                        yield value, inner, held


def renew_locks() -> None:
    """Replace every such lock by a new one, which this process and its forks share.

    Raises:
        TypeError: A kind of lock that has a state besides being held.
    """
    context = multiprocessing.get_context("fork")
    for holder, attribute, lock in list(held_locks()):
        if isinstance(lock, Lock):
            new: SemLock = context.Lock()
        elif isinstance(lock, RLock):
            new = context.RLock()
        else:
            raise TypeError(f"{holder.__name__}.{attribute} is a {type(lock).__name__}")
        setattr(holder, attribute, new)
