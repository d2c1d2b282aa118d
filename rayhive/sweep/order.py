"""The order in which the replicates of a study are run.

A machine changes while a study runs: it warms up, others come and go. If the replicates of a
configuration were run one after the other, such a change would look like a difference between
configurations, or between a scenario and its twin. So trials are run in batches, and a batch in
blocks (a randomised complete block design): a block holds one replicate of every configuration of
the batch under every scenario, in an order that the seed of the study decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import TypeVar

from rayhive.spec import SweepConfig
from rayhive.sweep.storage import STARTUP_TRIALS

T = TypeVar("T")


def batch_end(config: SweepConfig, start: int, size: int | None) -> int:
    """Return the position behind the last trial of the batch that begins at ``start``.

    The first batch holds all enqueued configurations and what the sampler draws at random. If the
    budget covers the whole space, every trial is in it. Later ones hold as many trials as
    ``interleave`` says: the sampler learns from a batch when it is over.

    Args:
        config: The study.
        start: Position of the first trial of the batch among the distinct trials.
        size: Distinct configurations of the study, None where a range makes many.
    """
    trials = config.budget.trials
    if size is not None and size <= trials:
        return max(start + 1, size)
    first = max(len(config.enqueue), STARTUP_TRIALS)
    if start < first:
        return max(start + 1, min(first, trials))
    return max(start + 1, min(start + config.interleave, trials))


def run_order(config: SweepConfig, start: int, trials: Sequence[T]) -> Iterator[tuple[T, str, int]]:
    """Yield every trial of a batch with every scenario and number of a replicate.

    The same study gives the same order after an interruption; more replicates make more blocks.

    Args:
        config: The study.
        start: Position of the first of ``trials`` among the distinct trials.
        trials: The batch.
    """
    for number in range(config.replicates):
        block = [(trial, scenario, number) for trial in trials for scenario in config.scenarios]
        text = f"order/{config.seed}/{start}/{number}".encode()
        Random(hashlib.blake2b(text).digest()).shuffle(block)
        yield from block
