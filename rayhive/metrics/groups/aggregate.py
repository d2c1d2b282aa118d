"""Numbers of replicates by their state."""

from __future__ import annotations

from rayhive.columns import Column, in_group
from rayhive.metrics.folds import Count
from rayhive.metrics.group import MetricGroup
from rayhive.spec.pruning import PRUNED, SKIPPED
from rayhive.timeline import FINISHED, LOST


def _number(name: str, about: str, *states: str, other: bool = False) -> Column:
    fold = Count(frozenset(states), other)
    return Column(name, about, type="count", stage="fold", fold=fold)


class Aggregate(MetricGroup):
    """Numbers of replicates by their state.

    * ``n``: completed, or ended by the time limit; every other number of a row is of these.
    * ``n_failed``: ended in any other way (diverged, failed, invalid).
    * ``n_pruned``: stopped by the study's pruner, because others were better at the same samples.
    * ``n_skipped``: not run, because the row cannot be on the Pareto front any more.
    * ``n_lost``: lost by the infrastructure in every attempt.
    * ``n_timed_out``: of the ``n``, those ended by the time limit.
    """

    columns = (
        *in_group(
            "replication",
            _number("n", "Replicates that finished", *FINISHED),
            _number(
                "n_failed",
                "Replicates that diverged, failed or were invalid",
                *FINISHED,
                LOST,
                PRUNED,
                SKIPPED,
                other=True,
            ),
            _number("n_pruned", "Replicates that were stopped early", PRUNED),
            _number("n_skipped", "Replicates that were not run: the front was lost", SKIPPED),
            _number("n_lost", "Replicates that the infrastructure lost in every attempt", LOST),
        ),
        _number("n_timed_out", "Replicates among the n that the time limit ended", "timed_out"),
    )
