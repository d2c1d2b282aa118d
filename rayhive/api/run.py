"""A run folder as data frames and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rayhive.api.story import Story, replicate_story
from rayhive.errors import ConfigError
from rayhive.remote import local_folder
from rayhive.report.differences import FIRST, all_differences, versus_problems
from rayhive.report.notice_grid import SCENARIO, GridPoint, notice_grid
from rayhive.report.render import results_text
from rayhive.report.results import Results, event_frame, load_results, replicate_place

if TYPE_CHECKING:
    from pandas import DataFrame

    from rayhive.sweep.driver import Done


@dataclass(frozen=True, repr=False)
class Run:
    """Results of a run.

    Attributes:
        folder: The run folder, or the folder of one replicate.
        results: Rows of the replicates, from which the tables are computed.
        done: Outcome of the sweep that this process ran; None for a loaded run.
    """

    folder: Path
    results: Results
    done: Done | None = None

    @property
    def configurations(self) -> DataFrame:
        """One row per configuration and scenario, as in ``configurations.parquet``."""
        return self.results.configurations

    @property
    def replicates(self) -> DataFrame:
        """One row per replicate, as in ``trials.parquet``."""
        return self.results.replicates

    @cached_property
    def events(self) -> DataFrame:
        """One row per event of every attempt, with a column for each field of the events.

        ``t`` is the time in Unix seconds. Fields that an event lacks are empty.
        """
        return event_frame(self.folder)

    def differences(self, versus: str = FIRST, columns: Sequence[str] = ()) -> DataFrame:
        """Return the paired differences to a baseline row, one row per row and column compared.

        Args:
            versus: Configuration of the baseline; ``first`` for the first row of each scenario.
            columns: Columns to compare; by default the objectives.

        Raises:
            ConfigError: The baseline or a column is unknown.
        """
        import pandas as pd

        problems = list(versus_problems(self.results, versus, columns))
        if problems:
            raise ConfigError(problems)
        return pd.DataFrame(
            each.record() for each in all_differences(self.results, versus, columns)
        )

    def table(
        self,
        format: str = "table",
        by: Sequence[str] = (),
        sort: str | None = None,
        columns: Sequence[str] = (),
        wide: bool = False,
        versus: str | None = None,
    ) -> str:
        """Return the results table, as ``rayhive results`` prints it.

        Args:
            format: ``table``, ``md``, ``csv``, ``json`` or ``latex``.
            by: Configuration columns; replicates that agree in them make one row.
            sort: Column to sort by, with ``-`` in front for descending.
            columns: Columns to show; by default the objectives and their certainty.
            wide: Whether every column is shown that has a value.
            versus: Configuration of a baseline row, or ``first``: paired differences to it.

        Raises:
            ConfigError: A format, column or configuration is unknown.
        """
        return results_text(
            self.results, format, by, sort, columns=columns, wide=wide, versus=versus
        )

    def stories(self, always: bool = False) -> list[Story]:
        """Return the stories of the replicates: faults, their effects, recoveries, invariants.

        Args:
            always: Whether replicates without planned faults and without problems are included.

        Raises:
            DamagedError: A replicate was damaged since the results were computed.
        """
        stories = (
            replicate_story(replicate_place(self.folder, row), row, always)
            for row in self.results.rows
        )
        return [story for story in stories if story is not None]

    def notice_grid(self) -> list[GridPoint]:
        """Return the goodput for each length of the notice before a preemption.

        Empty unless the run has several scenarios ``preempt-notice-SECONDS``.

        Raises:
            RayhiveError: No replicate of these scenarios finished.
        """
        names = {str(row["scenario"]) for row in self.results.rows}
        several = sum(SCENARIO.fullmatch(name) is not None for name in names) > 1
        return notice_grid(self.folder) if several else []

    def __repr__(self) -> str:
        rows = self.results
        return f"Run({str(self.folder)!r}: {len(rows.folded)} rows of {len(rows.rows)} replicates)"


def load(folder: str | Path) -> Run:
    """Load the results of a run from its events.

    Args:
        folder: The run folder or its URL, or the folder of one replicate.

    Raises:
        ConfigError: ``folder`` is neither.
        DamagedError: Its study cannot be read. Damaged replicates are left out and named in
            ``results.damaged``.
    """
    place = local_folder(folder)
    return Run(place, load_results(place))
