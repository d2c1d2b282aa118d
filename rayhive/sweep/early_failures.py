"""Detection of failures that every replicate of a study would share.

A bug in the user's code, a missing data set or a node without a package fails each replicate with
the same error. Trying every configuration would take long and show nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayhive.errors import RayhiveError

#: Replicates, of at least two trials, that have to fail with the same error.
ALIKE = 3


class EarlyFailures:
    """Ends a sweep whose first replicates fail with the same error."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._failed: list[tuple[int, Path]] = []
        self._over = False

    @property
    def undecided(self) -> bool:
        """Whether every replicate so far failed alike, but too few of them to end the sweep."""
        return bool(self._failed) and not self._over

    def take(self, trial: int, row: Mapping[str, Any], folder: Path) -> None:
        """Take account of a finished replicate.

        Args:
            trial: Number of its trial.
            row: Its row.
            folder: Its folder.

        Raises:
            RayhiveError: The first replicates failed with the same error.
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
                f"{', '.join(map(str, trials))}) failed alike, and the rest would too: "
                f"{row.get('stop_reason')}\nThe traceback is in {folder / 'logs'}. Remove the "
                "cause and run the same command again."
            )


def _general(reason: str) -> str:
    """Return the first line of a reason without the parts that differ between replicates."""
    first = reason.strip().partition("\n")[0].partition("; its log ends with")[0]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", re.sub(r"peer-[\d.]+", "peer", first))
