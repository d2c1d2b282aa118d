"""Events of a run as a data frame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayhive.errors import DamagedError
from rayhive.metrics.logs import read_timelines

if TYPE_CHECKING:
    from pandas import DataFrame

#: First columns of the frame.
LEADING = ("trial", "replicate", "scenario", "attempt", "t", "kind", "peer")


def event_frame(folder: str | Path) -> DataFrame:
    """Return the events of every attempt at every replicate, one row each.

    Args:
        folder: A run folder, or the folder of one replicate. Damaged logs are left out.

    Returns:
        The events in the order of trials, scenarios, replicates and attempts. After
        :data:`LEADING` each field of an event is a column; fields that an event lacks are empty.
    """
    import pandas as pd

    rows = list(_rows(Path(folder)))
    names = dict.fromkeys((*LEADING, *(name for row in rows for name in row)))
    return pd.DataFrame(rows, columns=list(names))


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    trials = folder / "trials"
    places = [folder]
    if trials.is_dir():
        places = sorted(trials.glob("*/*/"), key=lambda path: (int(path.parent.name), path.name))
    for place in places:
        with suppress(DamagedError):
            for timeline in read_timelines(place):
                spec = timeline.spec
                head = {
                    "trial": spec.trial,
                    "replicate": spec.replicate,
                    "scenario": spec.scenario,
                    "attempt": spec.attempt,
                }
                yield from ({**head, **dict(event)} for event in timeline.events)
