"""The driver: asks for trials, runs their replicates to the end, tells what they measured.

It may die at any instant. What it needs to go on is in the storage and in the run folder: a trial
says what it tries before its first replicate starts, and a replicate is finished when its log
says so. A driver that starts over walks through the trials from the first one on and does
whatever is missing; what is there it keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayhive.errors import ClusterError, DamagedError
from rayhive.faults.library import label
from rayhive.metrics.rows import last_attempt, replicate_row
from rayhive.metrics.timeline import LOST
from rayhive.metrics.twins import rows_with_twins
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.aside import archive
from rayhive.sweep.code_fingerprint import CodeFingerprints
from rayhive.sweep.early_failures import EarlyFailures
from rayhive.sweep.objectives import Charges, NoValue, failure, objective_values
from rayhive.sweep.order import batch_end, run_order
from rayhive.sweep.provenance import code_revision
from rayhive.sweep.replicate_runner import (
    POLL_S,
    ReplicateRunner,
    Swarms,
    Watcher,
    finished_event,
    replicate_seed,
)
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.scenarios import replicate_plan
from rayhive.sweep.signals import Interruption
from rayhive.sweep.study import Study
from rayhive.sweep.trial_book import TrialBook, TrialRecord

Row = Mapping[str, Any]

#: Replicates in a row, each lost in all of its attempts, after which a sweep ends.
LOSSES = 3


class Progress(Watcher, Protocol):
    """Whoever wants to see a sweep run."""

    def began(self, trials: int, replicates: int) -> None:
        """So many trials, of so many replicates each, are to be done."""

    def replicate_finished(self, spec: ReplicateSpec, row: Row, kept: bool) -> None:
        """It is finished on disk; ``kept`` says that an earlier driver ran it."""

    def trial_finished(
        self, record: TrialRecord, values: Sequence[float] | None, reason: str | None
    ) -> None:
        """A trial has its values, or failed for a reason."""


@dataclass(frozen=True)
class Done:
    """What a sweep came to.

    Attributes:
        trials: Distinct configurations that were told.
        failed: How many of them failed.
        duplicates: Suggestions that were no new configuration.
        exhausted: Whether the space ended before the budget did.
    """

    trials: int
    failed: int
    duplicates: int
    exhausted: bool


class Driver:
    """Runs a study to its end.

    Args:
        study: The study.
        folder: Its run folder, held by this process.
        book: Its trials.
        swarms: The cluster.
        progress: Whoever wants to see.
        interruption: Ends it.
        measure: Makes a row of a finished replicate's folder.
        code: Notices when the user's code or data change.
        poll_s: Seconds between two looks at a running replicate.
        again: Whether replicates that were lost in every attempt get as many once more.
    """

    def __init__(
        self,
        study: Study,
        folder: RunFolder,
        book: TrialBook,
        swarms: Swarms,
        progress: Progress,
        interruption: Interruption,
        measure: Callable[[Path], Row] = replicate_row,
        poll_s: float = POLL_S,
        code: CodeFingerprints | None = None,
        again: bool = False,
    ) -> None:
        self._config = study.config
        self._folder = folder
        self._book = book
        self._progress = progress
        self._interruption = interruption
        self._measure = measure
        self._charges = Charges(study.config)
        self._size = book.size
        self._code = code
        self._early = EarlyFailures()
        self._again = again
        self._lost_in_a_row = 0
        self._runner = ReplicateRunner(swarms, progress, interruption, poll_s, study.config.retries)

    def run(self) -> Done:
        """Bring every trial of the budget to its end.

        Raises:
            Interrupted: It was told to end; run again, it goes on.
            RayhiveError: The first replicates failed alike.
            ClusterError: The infrastructure loses one replicate after the other.
        """
        config = self._config
        self._progress.began(config.budget.trials, len(config.scenarios) * config.replicates)
        self._mend()
        start, exhausted = 0, False
        while not exhausted and start < max(config.budget.trials, len(self._book.records)):
            batch, exhausted = self._batch(start)
            self._run_batch(start, batch)
            start += len(batch)
        if exhausted:
            self._progress.note(
                f"the space has no further configuration: {len(self._book.records)} "
                f"instead of {config.budget.trials} trials"
            )
        records = self._book.records
        failed = sum(self._book.failed(record) is not None for record in records)
        return Done(len(records), failed, self._book.duplicates, exhausted)

    def _batch(self, start: int) -> tuple[Sequence[TrialRecord], bool]:
        """Return the trials that are run together from position ``start`` on.

        Returns:
            The trials, and whether the space has no further configuration.
        """
        end = batch_end(self._config, start, self._size)
        wanted = min(end, max(self._config.budget.trials, len(self._book.records)))
        while len(self._book.records) < wanted:
            self._interruption.check()
            if self._book.next() is None:
                break
        batch = self._book.records[start:end]
        exhausted = len(self._book.records) < wanted
        return batch, exhausted

    def _mend(self) -> None:
        """Let failed replicates of open trials run again, if nothing has been measured yet.

        The sweep may have ended at early failures, whose cause is mended by now.
        """
        if self._folder.has_measured:
            return
        for record in self._book.records:
            for folder in [] if record.told else self._folder.replicates(record.number):
                with suppress(DamagedError):
                    finished = finished_event(folder)
                    if finished is not None and finished["state"] == "failed":
                        archive(folder)

    def _run_batch(self, start: int, batch: Sequence[TrialRecord]) -> None:
        """Finish what is missing of some trials; each is told when its last replicate is there.

        A trial that was told gets only replicates that were added.
        """
        rows: dict[int, list[Row]] = {record.number: [] for record in batch}
        each = len(self._config.scenarios) * self._config.replicates
        whole: list[TrialRecord] = []
        for record, scenario, number in run_order(self._config, start, batch):
            self._interruption.check()
            done = rows[record.number]
            done.append(self._replicate(record, scenario, number))
            folder = self._folder.replicate(record.number, number, label(scenario))
            if done[-1]["state"] != LOST:
                self._early.take(record.number, done[-1], folder)
            if len(done) == each:
                whole.append(record)
            while whole and not self._early.undecided:
                first = whole.pop(0)
                self._tell(first, rows[first.number])
        for record in whole:
            self._tell(record, rows[record.number])

    def _tell(self, record: TrialRecord, rows: list[Row]) -> None:
        rows = list(self._with_twins(record, rows))
        if record.told and not self._book.lost(record):
            self._charges.learn(rows)
        else:
            reason = failure(rows)
            try:
                values = objective_values(self._config, rows, self._charges)
                self._book.tell(record, values, reason)
            except NoValue as error:
                lost = any(row["state"] == LOST for row in rows)
                if not record.told:
                    self._book.tell(record, None, str(error), lost)
        told, reason = self._book.values(record), self._book.failed(record)
        self._progress.trial_finished(record, told, reason)

    def _with_twins(self, record: TrialRecord, rows: list[Row]) -> Sequence[Row]:
        """Return the rows of a trial with what compares the faulted ones with their twins."""
        scenarios = self._config.scenarios
        if len(scenarios) == 1:
            return rows
        folders = [
            self._folder.replicate(record.number, number, label(scenario))
            for scenario in scenarios
            for number in range(self._config.replicates)
        ]
        return rows_with_twins(last_attempt(folder) for folder in folders)

    def _replicate(self, record: TrialRecord, scenario: str, number: int) -> Row:
        spec = self.spec(record, scenario, number)
        if self._code is not None:
            self._code.check()
        ran = self._runner.run(spec, self._again)
        if not record.told and self._runner.of_other_code(spec):
            ran = self._runner.run(spec)
        try:
            row = self._measure(Path(spec.folder))
        except DamagedError as error:
            self._runner.set_aside(spec, error)
            ran = self._runner.run(spec) or ran
            row = self._measure(Path(spec.folder))
        self._progress.replicate_finished(spec, row, kept=not ran)
        if ran:
            self._count_losses(row)
        return row

    def _count_losses(self, row: Row) -> None:
        """End a sweep that would lose all of its replicates, one after the other.

        Raises:
            ClusterError: As many in a row were lost as :data:`LOSSES` says.
        """
        self._lost_in_a_row = self._lost_in_a_row + 1 if row["state"] == LOST else 0
        if self._lost_in_a_row >= LOSSES:
            raise ClusterError(
                f"{LOSSES} replicates in a row were lost to the infrastructure, the last one: "
                f"{row.get('stop_reason')}; once that is mended, `rayhive retry "
                f"{self._folder.path}` runs them again and goes on"
            )

    def spec(self, record: TrialRecord, scenario: str, replicate: int) -> ReplicateSpec:
        """Return what a replicate of a trial is; its attempt is chosen when it is run."""
        config = self._config
        seed = replicate_seed(config.seed, replicate)
        name = label(scenario)
        return ReplicateSpec(
            study=config.name,
            trial=record.number,
            replicate=replicate,
            scenario=name,
            plan=replicate_plan(config, scenario, seed),
            seed=seed,
            workload=config.workload,
            swarm=config.swarm,
            configuration=record.configuration,
            budget=config.budget,
            evaluation=config.evaluation,
            timeouts=config.timeouts,
            folder=str(self._folder.replicate(record.number, replicate, name)),
            code=None if self._code is None else self._code.digest,
            git_revision=code_revision(),
            directory=os.getcwd(),
        )
