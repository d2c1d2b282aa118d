"""Failures that every replicate would have: a sweep ends at the first few of them.

A mistake in the user's code, a data set that is not there or a node that lacks a package fails each
replicate in the same way. To try every configuration would take long and tell nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayhive.errors import RayhiveError

#: So many replicates, of at least two trials, have to fail alike.
ALIKE = 3


class EarlyFailures:
    """Watches the first replicates of a sweep."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._failed: list[tuple[int, Path]] = []
        self._over = False

    @property
    def undecided(self) -> bool:
        """Whether every replicate so far failed alike, and they are too few to end the sweep."""
        return bool(self._failed) and not self._over

    def take(self, trial: int, row: Mapping[str, Any], folder: Path) -> None:
        """Take account of a replicate.

        Args:
            trial: Number of its trial.
            row: Its row.
            folder: Its folder.

        Raises:
            RayhiveError: The first replicates failed alike, and so would the others.
        """
        if self._over:
            return
        reason = _general(str(row.get("stop_reason")))
        if row["state"] != "failed" or self._reason not in (None, reason):
            self._over = True
            return
        self._reason = reason
        self._failed.append((trial, folder))
        trials = sorted({number for number, _ in self._failed})
        if len(self._failed) >= ALIKE and len(trials) > 1:
            self._over = True
            raise RayhiveError(
                f"the first {len(self._failed)} replicates (of trials "
                f"{', '.join(map(str, trials))}) failed alike, as the others would: "
                f"{row.get('stop_reason')}\nThe traceback is in {folder / 'logs'}. Run the same "
                "command again when it is mended."
            )


def _general(reason: str) -> str:
    """Return the first line of a reason without what differs from one replicate to the next."""
    first = reason.strip().partition("\n")[0].partition("; its log ends with")[0]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", re.sub(r"peer-[\d.]+", "peer", first))
