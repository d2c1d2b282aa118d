"""Order in which the replicates of a study run.

A machine drifts during a study: it warms up, other jobs come and go. If the replicates of one
configuration ran back to back, the drift would look like a difference between configurations, or
between a scenario and its twin. Trials therefore run in batches, and a batch in blocks, as in a
randomised complete block design: a block holds one replicate of every configuration of the batch
under every scenario, in an order that the seed of the study determines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import TypeVar

from rayhive.spec import SweepConfig
from rayhive.sweep.storage import STARTUP_TRIALS

T = TypeVar("T")
S = TypeVar("S")


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
    config: SweepConfig, scenarios: Sequence[S], start: int, trials: Sequence[T]
) -> Iterator[tuple[T, S, int]]:
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
