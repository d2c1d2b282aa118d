"""Optuna's journal in a file, which goes on after the death of a process that wrote to it."""

from __future__ import annotations

import os
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

#: Time after which the lock of a process that died while it wrote is broken [s].
GRACE_S = 30


def open_journal(file: str) -> JournalStorage:
    """Open the journal in a file; create it if there is none.

    Args:
        file: Its path.
    """
    # Optuna's lock is a link to this path, which is looked up in the folder of the link.
    path = str(Path(file).absolute())
    return JournalStorage(JournalFileBackend(path, lock_obj=_Lock(path)))


class _Lock(JournalFileSymlinkLock):
    """Lock of a journal; whoever acquires it finds whole lines.

    A writer that dies, or whose disk is full, may leave a part of a line. Optuna would append the
    next record to it, and could not read any record after it.

    Args:
        file: Absolute path of the journal.
    """

    def __init__(self, file: str) -> None:
        super().__init__(file, grace_period=GRACE_S)
        self._journal = Path(file)

    def acquire(self) -> bool:
        """Wait for the lock and remove an incomplete last line."""
        acquired = super().acquire()
        with self._journal.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if file.read() not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return acquired
