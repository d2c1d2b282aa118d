"""Early end of replicates that are of no use: the rule of a study, and its bounds for one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rayhive.spec.model import Model

PrunerName = Literal["none", "front", "median", "percentile"]
#: State of a replicate that was stopped early because others were better, and that of one that was
#: not run because its row cannot be on the front.
PRUNED, SKIPPED = "pruned", "skipped"
#: Pruners that end replicates during the training.
BY_METRIC = ("median", "percentile")


class Pruner(Model):
    """Rule by which hopeless replicates are skipped or stopped; its name alone is enough.

    Attributes:
        name: ``none``; ``front``: replicates of a row that cannot be on the Pareto front any more
            are skipped; ``median`` and ``percentile``: the same, and a replicate whose target
            metric is worse than that of others at the same samples is stopped.
        percentile: Share of the finished replicates that the bound leaves worse [%]; 50 with
            ``median``. Smaller numbers stop fewer replicates.
        margin: How much worse than the bound a metric must be, as a share of the bound.
        least: Finished replicates of other configurations that a bound takes.
        after: Evaluations of a replicate before it can be stopped.
    """

    name: PrunerName = "none"
    percentile: float | None = Field(default=None, gt=0, lt=100)
    margin: float = Field(default=0.1, ge=0, le=1000)
    least: int = Field(default=4, ge=1, le=1_000_000)
    after: int = Field(default=2, ge=0, le=1_000_000)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    @property
    def share(self) -> float:
        """Share of the finished replicates that the bound leaves worse [%]."""
        return 50.0 if self.percentile is None else self.percentile


class Bar(Model):
    """Bound of a metric from a number of samples on.

    Attributes:
        samples: Committed samples of the swarm.
        value: The bound.
        replicates: Replicates that it was taken from.
    """

    samples: int
    value: float
    replicates: int


class EarlyStop(Model):
    """Bounds at which one replicate is stopped, fixed when it begins.

    Attributes:
        metric: Metric of the held-out evaluations.
        mode: Whether smaller (``min``) or larger (``max``) values are better.
        share: Share of the finished replicates that a bar leaves worse [%].
        margin: How much worse than a bar the metric must be, as a share of the bar.
        after: Evaluations before the replicate can be stopped.
        bars: Bounds, in the order of samples.
    """

    metric: str
    mode: Literal["min", "max"]
    share: float
    margin: float
    after: int
    bars: tuple[Bar, ...]
