"""Driver of a study: asks Optuna for trials, runs their replicates and reports their values.

The driver may be killed at any instant. Its state is in the storage and in the run folder: a trial
is stored with its configuration before its first replicate starts, and the log of a replicate
records its end. A new driver goes through the trials from the first one, keeps finished replicates
and runs the missing ones.

A machine drifts during a study: it warms up, other jobs come and go. If the replicates of one
configuration ran back to back, the drift would look like a difference between configurations, or
between a scenario and its twin. Trials therefore run in batches, and a batch in blocks, as in a
randomised complete block design: a block holds one replicate of every configuration of the batch
under every scenario, in an order that the seed of the study determines.

Several replicates may run at the same time. They begin in that order, and their results are used in
that order, whichever ends first. A batch ends before the next one is asked for. So Optuna receives
the same calls as with one replicate at a time, and its values differ only where the load does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Protocol

from rayhive.cluster.live_metrics import SweepMetrics
from rayhive.columns import Row
from rayhive.crash_points import crash_point
from rayhive.errors import ClusterError, DamagedError
from rayhive.metrics.rows import Codes, last_attempt, replicate_row, rows_with_twins
from rayhive.spec import SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.early_failures import EarlyFailures
from rayhive.sweep.objectives import Charges, NoValue, count_lacking, failure, objective_values
from rayhive.sweep.provenance import Fingerprint, code_revision
from rayhive.sweep.pruning import Pruning
from rayhive.sweep.replicate_runner import POLL_S, ReplicateRunner, Swarms, Watcher
from rayhive.sweep.resolve import ResolvedScenario, ResolvedStudy
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.samplers import STARTUP_TRIALS
from rayhive.sweep.side_by_side import SideBySide
from rayhive.sweep.signals import Interruption
from rayhive.sweep.trial_book import TrialBook, TrialRecord, Values, baseline_records
from rayhive.sweep.warm_up import warm_up
from rayhive.timeline import LOST, UNKNOWN

#: Replicates in a row, each lost in all of its attempts, after which a sweep ends.
LOSSES = 3


class Progress(Watcher, Protocol):
    """Display of the progress of a sweep."""

    def began(self, trials: int, replicates: int) -> None:
        """Take note of the number of trials, and of replicates in each."""

    def replicate_finished(self, spec: ReplicateSpec, row: Row, kept: bool) -> None:
        """Take note of a finished replicate; ``kept`` if an earlier driver ran it."""

    def trial_finished(self, record: TrialRecord, values: Values, reason: str | None) -> None:
        """Take note of a trial that has its values, or has failed for a reason."""


@dataclass(frozen=True)
class Done:
    """Outcome of a sweep.

    Attributes:
        trials: Distinct configurations that were tried.
        failed: Trials without a replicate that completed.
        duplicates: Suggestions that repeated an earlier configuration.
        exhausted: Whether the space was exhausted before the budget.
    """

    trials: int
    failed: int
    duplicates: int
    exhausted: bool


@dataclass(frozen=True)
class _Replicate:
    """A finished replicate: its trial, its folder, its row, and whether it ran now."""

    record: TrialRecord
    folder: Path
    row: Row
    ran: bool


@dataclass
class Driver:
    """Runs a study to its end.

    Attributes:
        study: The study.
        folder: Its run folder, locked by this process.
        book: Its trials.
        swarms: The cluster.
        progress: Display of the progress.
        interruption: Ends the sweep.
        measure: Computes the row of a finished replicate from its folder, and from the attempts
            with the given code.
        code: Fingerprint of the workload, whose code must not change during the sweep.
        again: Whether replicates that were lost in every attempt get the same number of further
            attempts.
        at_once: Replicates that run at the same time.
    """

    study: ResolvedStudy
    folder: RunFolder
    book: TrialBook
    swarms: Swarms
    progress: Progress
    interruption: Interruption
    measure: Callable[[Path, Codes], Row] = replicate_row
    code: Fingerprint | None = None
    again: bool = False
    at_once: int = 1

    def __post_init__(self) -> None:
        self._charges = Charges(self.study.config)
        self._size = self.study.space.size(self.study.config.enqueue)
        self._early = EarlyFailures(self.folder.path)
        self._pruning = Pruning(self.study.config)
        self._lost_in_a_row = 0
        self._cold = self.study.config.warm_up_s > 0
        self._runner = ReplicateRunner(
            self.swarms,
            self.progress,
            self.interruption,
            poll_s=POLL_S / self.at_once,  # the running ones are polled in turn
            retries=self.study.config.retries,
            before=self._warm_up,
        )

    def run(self) -> Done:
        """Run every trial of the budget to its end.

        Raises:
            Interrupted: The sweep was interrupted; a later run resumes it.
            RayhiveError: The first replicates failed with the same error.
            ClusterError: Several replicates in a row were lost to the infrastructure.
        """
        config = self.study.config
        trials, each = config.budget.trials, self.study.replicates_per_trial
        if self._size is not None:
            trials = max(min(trials, self._size), len(self.book.records))
        self.progress.began(trials, each)
        self._metrics = SweepMetrics(config.name, (trials + len(config.baselines)) * each)
        self._early.mend(self._failed_before())
        places = (record.place for record in self.book.records)
        self._early.resume(chain.from_iterable(map(self.folder.replicates, places)))
        start, exhausted = 0, False
        while not exhausted and start < max(config.budget.trials, len(self.book.records)):
            batch, exhausted = self._batch(start)
            self._run_batch(start, batch)
            start += len(batch)
        if exhausted:
            self.progress.note(
                f"the space has no further configuration: {len(self.book.records)} "
                f"instead of {config.budget.trials} trials"
            )
        records = self.book.records
        failed = sum(self.book.failed(record) is not None for record in records)
        return Done(len(records), failed, self.book.duplicates, exhausted)

    def _batch(self, start: int) -> tuple[Sequence[TrialRecord], bool]:
        """Return the batch of trials that begins at position ``start``.

        Returns:
            The trials, and whether the space has no further configuration.
        """
        end = batch_end(self.study.config, start, self._size)
        wanted = min(end, max(self.study.config.budget.trials, len(self.book.records)))
        while len(self.book.records) < wanted:
            self.interruption.check()
            if self.book.next() is None:
                break
        return self.book.records[start:end], len(self.book.records) < wanted

    def _failed_before(self) -> Iterator[Path]:
        """Yield the replicates whose failures an earlier sweep ended at, or may have ended at.

        These are replicates of open trials and of baselines, unless the last sweep went on after a
        replicate had measured something.
        """
        if self._early.ended or not self.folder.has_measured:
            for record in (*self.book.records, *baseline_records(self.study.config.baselines)):
                if not record.reported:
                    yield from self.folder.replicates(record.place)

    def _run_batch(self, start: int, batch: Sequence[TrialRecord]) -> None:
        """Run the missing replicates of some trials; report each trial after its last one.

        A trial that was reported before runs only the replicates that the study has gained since.
        The replicates of the baselines run among those of the first batch.
        """
        if start == 0:
            batch = [*batch, *baseline_records(self.study.config.baselines)]
        rows: dict[int, list[Row]] = {record.number: [] for record in batch}
        whole: list[TrialRecord] = []
        with SideBySide[_Replicate](self.at_once) as side_by_side:
            for replicate in side_by_side.results(self._courses(start, batch)):
                record = replicate.record
                done = rows[record.number]
                done.append(replicate.row)
                if replicate.ran:
                    self._count_losses(replicate.row)
                if record.baseline is not None:
                    continue  # its failure is a result, and says nothing about the study
                if replicate.row["state"] not in UNKNOWN and not record.reported:
                    self._early.take(record.number, replicate.row, replicate.folder)
                if len(done) == self.study.replicates_per_trial:
                    whole.append(record)
                while whole and not self._early.undecided:
                    first = whole.pop(0)
                    self._tell(first, rows[first.number])
        for record in whole:
            self._tell(record, rows[record.number])

    def _courses(
        self, start: int, batch: Sequence[TrialRecord]
    ) -> Iterator[Generator[None, None, _Replicate]]:
        """Yield the course of each replicate of a batch, in order."""
        scenarios = self.study.scenarios
        for record, scenario, number in run_order(self.study.config, scenarios, start, batch):
            self.interruption.check()
            yield self._replicate(record, scenario, number)

    def _tell(self, record: TrialRecord, rows: list[Row]) -> None:
        judged = self.book.scenarios
        rows = [
            row
            for row in self._with_twins(record, rows)
            if judged is None or row["scenario"] in judged
        ]
        if record.reported and not self.book.lost(record):
            self._charges.learn(rows)
        else:
            reason = failure(self.study.config, rows)
            try:
                values = objective_values(self.study.config, rows, self._charges)
                count = count_lacking(self.study.config, rows)
                self.book.tell(record, values, reason, lacking=count)
            except NoValue as error:
                lost = any(row["state"] == LOST for row in rows)
                if not record.reported:
                    self.book.tell(record, None, str(error), lost)
        self.progress.trial_finished(record, self.book.values(record), self.book.failed(record))

    def _with_twins(self, record: TrialRecord, rows: list[Row]) -> Sequence[Row]:
        """Return the rows of a trial, the faulted ones compared with their twins."""
        scenarios = self.study.scenarios
        if len(scenarios) == 1:
            return rows
        folders = [
            self.folder.replicate(record.number, number, scenario.name)
            for scenario in scenarios
            for number in range(self.study.config.replicates)
        ]
        codes = self._codes(record)
        return rows_with_twins(last_attempt(folder, codes) for folder in folders)

    def _codes(self, record: TrialRecord) -> Codes:
        """Return the code of a trial's replicates: any for one that was reported, and not lost."""
        if record.reported and not self.book.lost(record):
            return ()
        return (None if self.code is None else self.code.digest,)

    def _replicate(
        self, record: TrialRecord, scenario: ResolvedScenario, number: int
    ) -> Generator[None, None, _Replicate]:
        whole = self.spec(record, scenario, number)
        spec = self._pruning.prepared(whole, may_skip=not self._early.undecided)
        if self.code is not None:
            self.code.check_unchanged(self.study.config.workload)
        ran, codes = (yield from self._runner.course(spec, self.again)), self._codes(record)
        if codes and self._runner.of_other_code(spec):
            spec = self._pruning.prepared(whole, may_skip=not self._early.undecided)
            ran = yield from self._runner.course(spec)
        row: Row | None = None
        while row is None:
            try:
                row = self.measure(Path(spec.folder), codes)
            except DamagedError as error:
                self._runner.set_aside(spec, error)
                ran = (yield from self._runner.course(spec)) or ran
        crash_point("replicate_folded")
        self._pruning.take(spec, row)
        self._metrics.ended(str(row["state"]))
        self.progress.replicate_finished(spec, row, kept=not ran)
        return _Replicate(record, Path(spec.folder), row, ran)

    def _warm_up(self, first: ReplicateSpec) -> None:
        """Warm the cluster up before the first replicate that this driver starts."""
        if self._cold:
            self._cold = False
            runner, seconds = replace(self._runner, before=None), self.study.config.warm_up_s
            for _ in warm_up(runner, first, seconds, self.folder.path):
                pass  # without a pause: no replicate begins beside it

    def _count_losses(self, row: Row) -> None:
        """End a sweep whose replicates are lost one after the other.

        Raises:
            ClusterError: :data:`LOSSES` replicates in a row were lost.
        """
        self._lost_in_a_row = self._lost_in_a_row + 1 if row["state"] == LOST else 0
        if self._lost_in_a_row >= LOSSES:
            raise ClusterError(
                f"{LOSSES} replicates in a row were lost to the infrastructure, the last one: "
                f"{row.get('stop_reason')}; once the cause is removed, `rayhive retry "
                f"{self.folder.path}` runs them again and resumes the sweep"
            )

    def spec(self, record: TrialRecord, scenario: ResolvedScenario, number: int) -> ReplicateSpec:
        """Return the spec of a replicate of a trial; the runner chooses its attempt."""
        config = self.study.config
        spec = ReplicateSpec(
            study=config.name,
            trial=record.number if record.baseline is None else None,
            baseline=record.baseline,
            replicate=number,
            scenario=scenario.name,
            seed=self.study.seeds[number],
            workload=config.workload,
            swarm=config.swarm,
            configuration=record.configuration,
            budget=config.budget,
            evaluation=config.evaluation,
            timeouts=config.timeouts,
            elastic=config.elastic,
            local_sgd=config.local_sgd,
            preemption=config.preemption,
            folder=str(self.folder.replicate(record.place, number, scenario.name)),
            code=None if self.code is None else self.code.digest,
            git_revision=code_revision(),
            directory=os.getcwd(),
        )
        return spec.model_copy(update={"plan": spec.in_own_rounds(scenario.plans[number])})


def batch_end(config: SweepConfig, start: int, size: int | None) -> int:
    """Return the position after the last trial of the batch that begins at ``start``.

    The first batch holds the enqueued configurations and the random start-up draws of the sampler.
    If the budget covers the whole space, the first batch holds every trial. Later batches hold
    ``interleave`` trials: the sampler learns from a batch when it ends.

    Args:
        config: The study.
        start: Position of the first trial of the batch among the distinct trials.
        size: Distinct configurations of the study; None if a range makes the space unbounded.
    """
    trials = config.budget.trials
    if size is not None and size <= trials:
        return max(start + 1, size)
    first = max(len(config.enqueue), STARTUP_TRIALS)
    if start < first:
        return max(start + 1, min(first, trials))
    return max(start + 1, min(start + config.interleave, trials))


def run_order(
    config: SweepConfig,
    scenarios: Sequence[ResolvedScenario],
    start: int,
    trials: Sequence[TrialRecord],
) -> Iterator[tuple[TrialRecord, ResolvedScenario, int]]:
    """Yield every trial of a batch with every scenario and replicate number.

    The order of a study is the same after an interruption; added replicates form further blocks.

    Args:
        config: The study.
        scenarios: Its scenarios.
        start: Position of the first of ``trials`` among the distinct trials.
        trials: The batch.
    """
    for number in range(config.replicates):
        block = [(trial, scenario, number) for trial in trials for scenario in scenarios]
        text = f"order/{config.seed}/{start}/{number}".encode()
        Random(hashlib.blake2b(text).digest()).shuffle(block)
        yield from block
