"""Detection of failures that every replicate of a study would share.

A bug in the user's code, a missing data set or a node without a package fails each replicate with
the same error. Trying every configuration would take long and show nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayhive.errors import DamagedError, RayhiveError
from rayhive.files import write_atomically
from rayhive.sweep.attempts import archive, finished_event
from rayhive.timeline import UNKNOWN

#: Replicates, of at least two trials, that have to fail with the same error.
ALIKE = 3


#: File of a run folder whose sweep common failures have ended; it holds the message.
FAILED_ALIKE = "failed-alike.txt"


class EarlyFailures:
    """Ends a sweep whose first replicates fail with the same error.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._reason: str | None = None
        self._failed: list[int] = []
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
        self._failed.append(trial)
        trials = sorted({*self._failed})
        if len(self._failed) >= ALIKE and len(trials) > 1:
            self._over = True
            text = (
                f"the first {len(self._failed)} replicates (of trials "
                f"{', '.join(map(str, trials))}) failed alike, and the rest would too: "
                f"{row.get('stop_reason')}\nThe traceback is in {folder / 'logs'}. Remove the "
                "cause and run the same command again."
            )
            write_atomically(self._run / FAILED_ALIKE, f"{text}\n")
            raise RayhiveError(text)

    @property
    def ended(self) -> bool:
        """Whether common failures have ended the sweep that used the run folder last."""
        return (self._run / FAILED_ALIKE).exists()

    def mend(self, folders: Iterable[Path]) -> None:
        """Make room for new attempts at replicates that failed for a cause that was removed.

        If it was not, they fail alike again.

        Args:
            folders: Folders of replicates; those that did not fail are left alone.
        """
        for folder in folders:
            with suppress(DamagedError):
                finished = finished_event(folder)
                if finished is not None and finished.state == "failed":
                    archive(folder, "mended")
        (self._run / FAILED_ALIKE).unlink(missing_ok=True)

    def resume(self, folders: Iterable[Path]) -> None:
        """Rule common failures out if a replicate of an earlier sweep did not fail.

        A study that has grown has another order of replicates, which may begin with failed ones.

        Args:
            folders: Folders of the replicates of all trials.
        """
        self._over = any(map(_did_not_fail, folders))


def _did_not_fail(folder: Path) -> bool:
    with suppress(DamagedError):
        end = finished_event(folder)
        return end is not None and end.state != "failed" and end.state not in UNKNOWN
    return False


def _general(reason: str) -> str:
    """Return the first line of a reason without the parts that differ between replicates."""
    first = reason.strip().partition("\n")[0].partition("; its log ends with")[0]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", re.sub(r"peer-[\d.]+", "peer", first))
