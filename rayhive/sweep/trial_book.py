"""Trials of a study in Optuna's storage.

The storage holds everything that a later driver needs: the configuration of a trial is a user
attribute before its first replicate starts. A trial is *distinct* if no earlier trial has an
equivalent configuration. Duplicates are reported to Optuna as failed at once, which the sampler
ignores: as complete they would count twice, as pruned they would count as bad.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import optuna
from optuna.samplers import BaseSampler, NSGAIISampler
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from rayhive.crash_points import crash_point
from rayhive.errors import RayhiveError
from rayhive.spec import Configuration
from rayhive.sweep.space import SearchSpace, suggested

#: Repeated suggestions in a row after which an untried configuration is drawn at random.
REASKS = 8

#: Values of the objectives of a trial, in the study's order; None if it has none.
Values: TypeAlias = Sequence[float] | None

#: User attribute of the study: scenarios over which the values of its trials are taken.
SCENARIOS = "scenarios"

# User attributes of a trial.
CONFIGURATION = "configuration"
ENQUEUED = "enqueued"
DUPLICATE_OF = "duplicate_of"
FAILED = "failed"
LOST = "lost"
AMENDS = "amends"
ORPHAN = "orphan"

#: Constraint of a trial: replicates that keep it off the front. 0 is feasible.
CONSTRAINT = "replicates_failed_or_missed"


@dataclass(frozen=True)
class TrialRecord:
    """One distinct trial, or a baseline, of which Optuna knows nothing.

    Attributes:
        number: Its number in the study; of a baseline, a negative one.
        configuration: Its configuration; of a baseline, the default one.
        reported: Whether its values, or its failure, have been reported to Optuna.
        baseline: Name of the baseline; None for a trial.
    """

    number: int
    configuration: Configuration
    reported: bool
    baseline: str | None = None

    @property
    def place(self) -> int | str:
        """Name of its folder: the number, or the name of the baseline."""
        return self.number if self.baseline is None else self.baseline


def baseline_records(names: Sequence[str]) -> list[TrialRecord]:
    """Return the records of baselines."""
    return [TrialRecord(-1 - n, Configuration(), False, name) for n, name in enumerate(names)]


@dataclass
class TrialBook:
    """The distinct trials of a study.

    Attributes:
        study: The study in Optuna's storage.
        space: The space of new configurations.
        enqueue: The configurations to try first, in this order.
        seed: Seed of the random choices.
        in_order: Whether every configuration is tried in the order of the axes and their values;
            otherwise a sampler suggests them.
        sampler: Returns the sampler of a suggestion, given the number of trials before it. None for
            the sampler that the study has. Trials of dead drivers do not count, so a resumed study
            is suggested what an uninterrupted one would be.
        scenarios: Scenarios over which values are taken: those that the study began with, so that
            all of its values are comparable. None for all scenarios.
        duplicates: Suggestions that repeated an earlier configuration.
    """

    study: optuna.Study
    space: SearchSpace
    enqueue: Sequence[Configuration] = ()
    seed: int = 0
    in_order: bool = False
    sampler: Callable[[int], BaseSampler] | None = None
    scenarios: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._records: list[TrialRecord] = []
        self._amended: dict[int, int] = {}  # lost trial -> trial with its values
        self.duplicates = 0
        for trial in self._trials():
            self._settle(trial)

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """The distinct trials so far, in the order of their numbers."""
        return tuple(self._records)

    def next(self) -> TrialRecord | None:
        """Return the next distinct trial; None if the space is exhausted.

        After :data:`REASKS` repeated suggestions an untried configuration is drawn at random.
        """
        while True:
            trials = self._trials()
            asked = [trial for trial in trials if not trial.user_attrs.keys() & {ORPHAN, AMENDS}]
            waiting = any(trial.state == TrialState.WAITING for trial in asked)
            if not waiting and not self._queue_enqueued():
                seed = f"chance/{self.seed}/{len(asked)}".encode()
                random = Random(hashlib.blake2b(seed).digest())
                fresh = self.space.unseen(set(self._seen), None if self.in_order else random)
                if fresh is None:
                    return None
                if self.in_order or sum(map(_repeated, asked[-REASKS:])) == REASKS:
                    self._queue(fresh)
            if self.sampler is not None:
                self.study.sampler = self.sampler(len(asked))
            record = self._take(self.study.ask())
            if record is not None:
                return record

    def tell(
        self,
        record: TrialRecord,
        values: Values,
        reason: str | None = None,
        lost: bool = False,
        lacking: int = 0,
    ) -> None:
        """Finish a trial, or add values to one that was reported as lost.

        Optuna does not change a finished trial, so the values go into a further trial that replaces
        it.

        Args:
            record: The trial.
            values: Values of its objectives; None if it has none.
            reason: Reason of its failure, if it failed. A failed trial may have values, from which
                the sampler learns.
            lost: Whether it has no values because its replicates were lost.
            lacking: Replicates that keep it off the front
                (:func:`rayhive.sweep.objectives.lacking`); with any, it is not feasible.

        Raises:
            RayhiveError: Another driver has finished the trial.
        """
        if record.reported:
            self._amend(record, values, reason, lacking)
            return
        failed = reason or (None if values is not None else "no value")
        self._describe(record.number, failed, lost, None if values is None else float(lacking))
        crash_point("trial_described")
        try:
            if values is None:
                self.study.tell(record.number, state=TrialState.FAIL)
            else:
                self.study.tell(record.number, list(values))
        except ValueError as error:  # Optuna takes the values of a trial once
            raise RayhiveError(
                f"trial {record.number} has got its values from another driver: a copy of the run "
                f"folder, with the same storage? ({error})"
            ) from error
        crash_point("trial_told")
        at = self._records.index(record)
        self._records[at] = TrialRecord(record.number, record.configuration, reported=True)

    def _describe(self, number: int, failed: str | None, lost: bool, lacking: float | None) -> None:
        """Store the attributes of a trial's end, in place of those of a driver that died here."""
        trial = self._trial(number)
        before = self._trials()[number]
        for name, value in ((FAILED, failed), (LOST, lost or None)):
            if before.user_attrs.get(name) != value:
                trial.set_user_attr(name, value)
        if lacking is None:
            return
        # Optuna sets a constraint once; its attribute can be set again.
        known = [name for name in before.system_attrs if name.endswith(f":{CONSTRAINT}")]
        if not known:
            trial.set_constraint(CONSTRAINT, lacking)
        elif before.system_attrs[known[0]] != lacking:
            trial.storage.set_trial_system_attr(before._trial_id, known[0], lacking)

    def _amend(self, record: TrialRecord, values: Values, reason: str | None, lacking: int) -> None:
        before = self._trials()[record.number]
        failed = {} if reason is None else {FAILED: reason}
        self.study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE,
                values=list(values or ()),
                params=before.params,
                distributions=before.distributions,
                user_attrs={AMENDS: record.number, **failed},
                constraints={CONSTRAINT: float(lacking)},
                system_attrs={
                    name: value
                    for name, value in before.system_attrs.items()
                    if name.endswith(":generation")  # of NSGA-II
                },
            )
        )
        self._amended[record.number] = len(self._trials()) - 1

    def lost(self, record: TrialRecord) -> bool:
        """Return whether a trial was reported as lost and has no values yet."""
        return record.reported and bool(self._holder(record).user_attrs.get(LOST))

    def _holder(self, record: TrialRecord) -> FrozenTrial:
        """Return the trial that holds the values of a trial: mostly itself."""
        return self._trials()[self._amended.get(record.number, record.number)]

    def values(self, record: TrialRecord) -> tuple[float, ...] | None:
        """Return the values of a trial; None if it has none yet or failed without any."""
        found = self._holder(record)
        return None if found.state != TrialState.COMPLETE else tuple(found.values)

    def failed(self, record: TrialRecord) -> str | None:
        """Return the reason of a trial's failure; None if it has not failed."""
        reason = self._holder(record).user_attrs.get(FAILED)
        return None if reason is None else str(reason)

    def _settle(self, trial: FrozenTrial) -> None:
        """Take over a trial of an earlier driver, and finish one that it cannot have started."""
        if AMENDS in trial.user_attrs:
            self._amended[int(trial.user_attrs[AMENDS])] = trial.number
            return
        if trial.state == TrialState.WAITING:
            return
        given = trial.user_attrs.get(CONFIGURATION)
        running = trial.state == TrialState.RUNNING
        if given is not None:
            configuration = self._configuration(trial, given)
            if self._record(trial.number, configuration, running) is not None and running:
                # the driver may have died while it asked for the queued values
                self.space.parameters(configuration, self._trial(trial.number))
        elif running:  # the driver died before it received the configuration
            self._discard(trial.number, ORPHAN, True)

    def _take(self, trial: optuna.Trial) -> TrialRecord | None:
        """Record a new trial if it is distinct, or finish it as a duplicate."""
        crash_point("trial_asked")
        given = trial.user_attrs.get(CONFIGURATION)
        if given is None:
            configuration = self.space.draw(suggested(trial))
            trial.set_user_attr(CONFIGURATION, configuration.model_dump(mode="json"))
        else:
            configuration = self._configuration(trial, given)
            self.space.parameters(configuration, trial)
            if isinstance(self.study.sampler, NSGAIISampler):
                _ = trial.relative_params  # gives it a generation, so that it may be a parent
        crash_point("trial_recorded")
        return self._record(trial.number, configuration, running=True)

    def _record(
        self, number: int, configuration: Configuration, running: bool
    ) -> TrialRecord | None:
        """Record a trial if it is distinct; a running duplicate is finished."""
        earlier = self._seen.setdefault(self.space.key(configuration), number)
        if earlier != number:
            self.duplicates += 1
            if running:
                self._discard(number, DUPLICATE_OF, earlier)
            return None
        record = TrialRecord(number, configuration, reported=not running)
        self._records.append(record)
        return record

    def _queue_enqueued(self) -> bool:
        """Queue the next enqueued configuration that has not been queued."""
        done = {trial.user_attrs.get(ENQUEUED) for trial in self._trials()}
        for index, configuration in enumerate(self.enqueue):
            if index not in done:
                self._queue(configuration, **{ENQUEUED: index})
                return True
        return False

    def _queue(self, configuration: Configuration, **attributes: Any) -> None:
        self.study.enqueue_trial(
            self.space.parameters(configuration),
            user_attrs={CONFIGURATION: configuration.model_dump(mode="json"), **attributes},
        )

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _trial(self, number: int) -> optuna.Trial:
        """Return a trial whose attributes and parameters can be set."""
        return optuna.Trial(self.study, self._trials()[number]._trial_id)

    def _discard(self, number: int, attribute: str, value: Any) -> None:
        """Finish a trial that stands for no configuration, with the reason as an attribute."""
        self._trial(number).set_user_attr(attribute, value)
        self.study.tell(number, state=TrialState.FAIL)

    def _configuration(self, trial: FrozenTrial | optuna.Trial, given: object) -> Configuration:
        """Return the configuration of a trial, which an earlier version may have stored.

        An axis that did not exist then has its one value in the space of the resumed study.
        """
        try:
            if isinstance(given, Mapping):
                given = {**self.space.constants, **given}
            return Configuration.model_validate(given)
        except ValidationError as error:
            where = f"trial {trial.number} in the storage"
            first = str(error).splitlines()[0]
            raise RayhiveError(f"{where} has no valid configuration: {first}") from error


def _repeated(trial: FrozenTrial) -> bool:
    """Return whether a sampler's suggestion repeated an earlier configuration."""
    return DUPLICATE_OF in trial.user_attrs and ENQUEUED not in trial.user_attrs
