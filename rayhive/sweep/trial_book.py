"""The trials of a study in Optuna's storage: which configurations were asked for, which are told.

Everything that a later driver needs stands in the storage: the configuration of a trial is a user
attribute from before its first replicate starts. A trial is *distinct* if its configuration does
something that no earlier one's does; the others are told as failed at once, which the sampler
passes over: told as complete they would count twice, told as pruned they would count as bad.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from rayhive.errors import RayhiveError
from rayhive.spec import Configuration
from rayhive.sweep.space import OptunaChooser, SearchSpace

#: Suggestions in a row that were tried before, after which chance chooses instead.
REASKS = 8

# User attributes of a trial.
CONFIGURATION = "configuration"
ENQUEUED = "enqueued"
DUPLICATE_OF = "duplicate_of"
FAILED = "failed"
LOST = "lost"
AMENDS = "amends"
ORPHAN = "orphan"


@dataclass(frozen=True)
class TrialRecord:
    """One distinct trial.

    Attributes:
        number: Its number in the study, and the name of its folder.
        configuration: What it tries.
        told: Whether it has its values, or its failure.
    """

    number: int
    configuration: Configuration
    told: bool


class TrialBook:
    """The distinct trials of a study.

    Args:
        study: Where they are kept.
        space: Where new ones come from.
        enqueue: The configurations to try first, in this order.
        seed: Seed of what chance chooses.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: SearchSpace,
        enqueue: Sequence[Configuration] = (),
        seed: int = 0,
    ) -> None:
        self._study = study
        self._space = space
        self._enqueue = tuple(enqueue)
        self._seed = seed
        self._seen: dict[str, int] = {}
        self._records: list[TrialRecord] = []
        self._amended: dict[int, int] = {}  # a lost trial -> the one with its values
        self.duplicates = 0
        for trial in self._trials():
            self._settle(trial)

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """Every distinct trial so far, in the order of their numbers."""
        return tuple(self._records)

    def next(self) -> TrialRecord | None:
        """Return the next distinct trial; None if the space has no more.

        Asks at most :data:`REASKS` times before chance chooses among what is left.
        """
        asked = 0
        while True:
            if not self._waiting() and not self._queue_enqueued():
                fresh = self._space.unseen(set(self._seen), self._random())
                if fresh is None:
                    return None
                if asked >= REASKS:
                    self._queue(fresh)
                asked += 1
            record = self._take(self._study.ask())
            if record is not None:
                return record

    @property
    def size(self) -> int | None:
        """Distinct configurations, the enqueued ones among them; None where a range makes many."""
        everything = self._space.every()
        if everything is None:
            return None
        return len({self._space.key(item) for item in (*everything, *self._enqueue)})

    def tell(
        self,
        record: TrialRecord,
        values: Sequence[float] | None,
        reason: str | None = None,
        lost: bool = False,
    ) -> None:
        """Finish a trial, or one that was told as lost and has values by now.

        Optuna keeps a finished trial as it is: the values go into another one, which stands for
        it.

        Args:
            record: The trial.
            values: Those of its objectives; None if there is nothing to learn from it.
            reason: Why it failed, if it did: the sampler may learn from a failed trial, too.
            lost: Whether it has no values because the infrastructure lost its replicates.
        """
        if record.told:
            self._amend(record, values, reason)
            return
        if values is None or reason is not None:
            trial = optuna.Trial(self._study, self._id(record.number))
            trial.set_user_attr(FAILED, reason or "no value")
            if lost:
                trial.set_user_attr(LOST, True)
        if values is None:
            self._study.tell(record.number, state=TrialState.FAIL)
        else:
            self._study.tell(record.number, list(values))
        at = self._records.index(record)
        self._records[at] = TrialRecord(record.number, record.configuration, told=True)

    def _amend(
        self, record: TrialRecord, values: Sequence[float] | None, reason: str | None
    ) -> None:
        before = self._trials()[record.number]
        attributes: dict[str, Any] = {AMENDS: record.number}
        if reason is not None:
            attributes[FAILED] = reason
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE,
                values=list(values or ()),
                params=before.params,
                distributions=before.distributions,
                user_attrs=attributes,
            )
        )
        self._amended[record.number] = len(self._trials()) - 1

    def lost(self, record: TrialRecord) -> bool:
        """Return whether a trial was told as lost to the infrastructure, and still is."""
        return record.told and bool(self._told(record).user_attrs.get(LOST))

    def _told(self, record: TrialRecord) -> FrozenTrial:
        """Return the trial that holds what was told of another one, mostly itself."""
        return self._trials()[self._amended.get(record.number, record.number)]

    def values(self, record: TrialRecord) -> tuple[float, ...] | None:
        """Return what a trial was told, None if it failed or has not been told."""
        found = self._told(record)
        return None if found.state != TrialState.COMPLETE else tuple(found.values)

    def failed(self, record: TrialRecord) -> str | None:
        """Return why a trial failed, None if it did not or has not been told."""
        reason = self._told(record).user_attrs.get(FAILED)
        return None if reason is None else str(reason)

    def _settle(self, trial: FrozenTrial) -> None:
        """Enter what a driver left behind, and finish what it can't have started."""
        if AMENDS in trial.user_attrs:
            self._amended[int(trial.user_attrs[AMENDS])] = trial.number
            return
        given = trial.user_attrs.get(CONFIGURATION)
        if trial.state == TrialState.WAITING:
            return
        running = trial.state == TrialState.RUNNING
        if given is None:
            if running:  # the driver died before it knew what it had asked for
                optuna.Trial(self._study, trial._trial_id).set_user_attr(ORPHAN, True)
                self._study.tell(trial.number, state=TrialState.FAIL)
            return
        configuration = _configuration(trial, given)
        key = self._space.key(configuration)
        if DUPLICATE_OF in trial.user_attrs or key in self._seen:
            self.duplicates += 1
            if running:
                again = optuna.Trial(self._study, trial._trial_id)
                again.set_user_attr(DUPLICATE_OF, self._seen[key])
                self._study.tell(trial.number, state=TrialState.FAIL)
            return
        if running:  # it may have died while the queued values were being asked for
            self._space.follow(configuration, optuna.Trial(self._study, trial._trial_id))
        self._seen[key] = trial.number
        self._records.append(TrialRecord(trial.number, configuration, told=not running))

    def _take(self, trial: optuna.Trial) -> TrialRecord | None:
        """Make a fresh trial a distinct one, or finish it as a duplicate."""
        given = trial.user_attrs.get(CONFIGURATION)
        if given is None:
            configuration = self._space.draw(OptunaChooser(trial))
            trial.set_user_attr(CONFIGURATION, configuration.model_dump(mode="json"))
        else:
            configuration = _configuration(trial, given)
            self._space.follow(configuration, trial)
        key = self._space.key(configuration)
        earlier = self._seen.setdefault(key, trial.number)
        if earlier != trial.number:
            self.duplicates += 1
            trial.set_user_attr(DUPLICATE_OF, earlier)
            self._study.tell(trial, state=TrialState.FAIL)
            return None
        record = TrialRecord(trial.number, configuration, told=False)
        self._records.append(record)
        return record

    def _queue_enqueued(self) -> bool:
        """Queue the next enqueued configuration of the study that was not queued yet."""
        done = {trial.user_attrs.get(ENQUEUED) for trial in self._trials()}
        for index, configuration in enumerate(self._enqueue):
            if index not in done:
                self._queue(configuration, **{ENQUEUED: index})
                return True
        return False

    def _queue(self, configuration: Configuration, **attributes: Any) -> None:
        self._study.enqueue_trial(
            self._space.parameters(configuration),
            user_attrs={CONFIGURATION: configuration.model_dump(mode="json"), **attributes},
        )

    def _waiting(self) -> bool:
        return any(trial.state == TrialState.WAITING for trial in self._trials())

    def _random(self) -> Random:
        digest = hashlib.blake2b(f"chance/{self._seed}/{len(self._trials())}".encode()).digest()
        return Random(digest)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _id(self, number: int) -> int:
        return self._trials()[number]._trial_id


def _configuration(trial: FrozenTrial | optuna.Trial, given: object) -> Configuration:
    try:
        return Configuration.model_validate(given)
    except ValidationError as error:
        first = str(error).splitlines()[0]
        raise RayhiveError(
            f"the storage says of trial {trial.number} what is no configuration: {first}"
        ) from error
