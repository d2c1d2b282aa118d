"""The models of a study: what may be said, of which type, with which default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from rayhive.columns import Direction
from rayhive.errors import without_secrets
from rayhive.spec.scalars import as_written

Delay = Literal["none", "state", "optimizer", "gradients"]
DELAYS: tuple[str, ...] = get_args(Delay)
#: What is refused before a group averages; each rule refuses what those before it refuse.
OutlierFilterRule = Literal["finite", "norm", "direction"]
OUTLIER_FILTERS: tuple[str, ...] = get_args(OutlierFilterRule)
#: What a reducer makes of the gradients of a group.
Aggregation = Literal["mean", "centered_clipping", "trimmed_mean"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
DEFAULT_RULES: dict[str, str] = {"outlier_filter": "norm", "aggregation": "mean"}

#: hivemind's documented usage compresses tensors of more than 2**16 elements to 8 bits.
DEFAULT_THRESHOLD = 2**16 + 1
#: The default of hivemind's PowerSGD averager.
DEFAULT_MIN_COMPRESSION_RATIO = 0.5


#: Most peers of a swarm: more are a slip of the keyboard.
MOST_PEERS = 100_000
#: Most samples, rounds and the like: what a double counts exactly.
MOST = 2**53
#: Longest time [s]: ten years.
LONGEST_S = 3.2e8

#: A name or a label in the syntax of Kubernetes, which Ray's labels follow.
WORD = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, StringConstraints(pattern=rf"^([a-z0-9.-]{{1,253}}/)?{WORD}$")]
LabelValue = Annotated[str, StringConstraints(pattern=rf"^({WORD})?$")]
ClassName = Annotated[str, StringConstraints(pattern=rf"^{WORD}$")]


class Model(BaseModel):
    """Base of every model that crosses a boundary: frozen, and strict about keys and types.

    A number is not read out of a truth value (``peers: yes``) or of text, but for ``1e-3`` and
    the like, which YAML 1.1 takes for text.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        return as_written(value, cls.model_fields[str(info.field_name)].annotation)


class Range(Model):
    """A numeric axis of the space.

    Attributes:
        low: Least value, included.
        high: Greatest value, included.
        log: Sample uniformly in the logarithm.
    """

    low: float
    high: float
    log: bool = False


def _axis(value: object) -> object:
    """Read a constant as a list of one, leaving lists and ranges alone."""
    if isinstance(value, (Mapping, Range)):
        return value if isinstance(value, Range) else Range.model_validate(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (value,)


Axis = Annotated[Range | tuple[Any, ...], BeforeValidator(_axis)]


class WorkloadConfig(Model):
    """What is trained: a registered workload by name, or the user's own by import path."""

    name: str | None = None
    import_path: str | None = Field(default=None, alias="import")
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name that results rows carry."""
        return self.name or self.import_path or "unnamed"


class Link(Model):
    """Shaping of a node's link."""

    rate_mbit: float | None = Field(default=None, ge=1e-3, le=1e7)
    delay_ms: float = Field(default=0.0, ge=0, le=1e6)
    loss: float = Field(default=0.0, ge=0, lt=1)


class NodeClass(Model):
    """A class of nodes that hosts some of the peers.

    Attributes:
        count: Peers on nodes of this class.
        labels: Ray node labels that a node of this class must carry.
        gpus: GPUs of one peer; fractions share a GPU between peers.
        cpu_share: Share of a core that a peer gets.
        link: Shaping of the link.
        preemptible: Whether the cloud may take the node away.
    """

    count: int = Field(ge=1, le=MOST_PEERS)
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    gpus: float = Field(default=0.0, ge=0, le=1024)
    cpu_share: float = Field(default=1.0, ge=0.01, le=1024)
    link: Link | None = None
    preemptible: bool = False

    @property
    def shaped(self) -> bool:
        """Whether its nodes are made what they are: by a testbed."""
        return self.link is not None or self.cpu_share != 1.0


class SwarmConfig(Model):
    """The peers of a trial and how they meet.

    Attributes:
        peers: Number of peers.
        target_batch_size: Samples per round, over the swarm.
        batch_size: Samples per micro-batch of one peer; the workload's default if absent.
        average_state_every: Rounds between two averagings of the parameters themselves.
        matchmaking_time: Longest wait for a peer that has come to a round and cannot be met [s];
            rounds start when all are there.
        averaging_timeout: Longest time of one averaging [s].
        straggler_timeout: How long a round waits for a peer that computes and makes no progress,
            until it does [s].
        metadata_expiration: Seconds after which a silent peer is no longer counted as live.
        state_codec: Codec of the averaging of parameters.
        use_local_updates: Step locally on every batch and average parameters only.
        outlier_filter: What is refused before a group averages: what is not ``finite``, also an
            absurd ``norm``, or also a lasting opposite ``direction``.
        aggregation: What is made of a group's gradients; robust rules need three peers or more.
        threads_per_peer: Torch threads of one peer.
        gpus_per_peer: GPUs of one peer when there are no node classes.
        node_classes: Where peers go, by the name of the class.
    """

    peers: int = Field(default=2, ge=1, le=MOST_PEERS)
    target_batch_size: int = Field(default=256, ge=1, le=MOST)
    batch_size: int | None = Field(default=None, ge=1, le=MOST)
    average_state_every: int = Field(default=1, ge=1, le=MOST)
    matchmaking_time: float = Field(default=5.0, ge=0.01, le=LONGEST_S)
    averaging_timeout: float = Field(default=30.0, ge=0.01, le=LONGEST_S)
    straggler_timeout: float = Field(default=60.0, ge=0.01, le=LONGEST_S)
    metadata_expiration: float = Field(default=4.0, ge=0.01, le=LONGEST_S)
    state_codec: str = "none"
    use_local_updates: bool = False
    outlier_filter: OutlierFilterRule = "norm"
    aggregation: Aggregation = "mean"
    threads_per_peer: int = Field(default=1, ge=1, le=1024)
    gpus_per_peer: float = Field(default=0.0, ge=0, le=1024)
    node_classes: dict[ClassName, NodeClass] | None = None

    @property
    def peer_classes(self) -> list[tuple[str, NodeClass]]:
        """Name and node class of each peer, by number; empty without node classes.

        Node classes take the peers in the order in which they are written. A peer that joins later
        is of the class of the last one.
        """
        classes = (self.node_classes or {}).items()
        return [(name, item) for name, item in classes for _ in range(item.count)]

    def rate_of(self, peer: int) -> float | None:
        """Return the link rate that reducers of a peer's group are weighed by [Mbit/s].

        Args:
            peer: The peer's number.

        Returns:
            The rate of the peer's node class; the highest rate of all classes where its own link
            is not limited; None if no class has one.
        """
        links = [item.link for _, item in self.peer_classes]
        rates = [None if link is None else link.rate_mbit for link in links]
        given = [rate for rate in rates if rate is not None]
        if not given:
            return None
        return rates[min(peer, len(rates) - 1)] or max(given)


class Configuration(Model):
    """One point of the space: what a row of the results table stands for.

    Attributes:
        codec: Gradient codec.
        threshold: Elements from which ``size_adaptive`` uses 8 bits; None for other codecs.
        powersgd_rank: Rank of the factors; None averages gradients as they are.
        min_compression_ratio: Least fraction saved for a matrix to be factorised; None without
            PowerSGD.
        delay: What happens in the background; each choice includes those before it.
    """

    codec: str = "none"
    threshold: int | None = None
    powersgd_rank: int | None = None
    min_compression_ratio: float | None = None
    delay: Delay = "none"

    @property
    def label(self) -> str:
        """A short stable name, unique among configurations that differ."""
        parts = [self.codec if self.threshold is None else f"{self.codec}({self.threshold})"]
        if self.powersgd_rank is not None:
            ratio = self.min_compression_ratio
            at_least = DEFAULT_MIN_COMPRESSION_RATIO if ratio is None else ratio
            parts.append(f"rank{self.powersgd_rank}(≥{at_least:.4g})")
        if self.delay != "none":
            parts.append(f"delay-{self.delay}")
        return " ".join(parts)


class Space(Model):
    """The axes of the sweep; a constant is an axis of one point."""

    codec: Axis = ("none",)
    threshold: Axis = (DEFAULT_THRESHOLD,)
    powersgd_rank: Axis = (None,)
    min_compression_ratio: Axis = (DEFAULT_MIN_COMPRESSION_RATIO,)
    delay: Axis = ("none",)


class Budget(Model):
    """When to stop.

    Attributes:
        trials: Configurations to try.
        seconds_per_replicate: Longest training time of one replicate [s].
        samples_per_replicate: Committed samples after which a replicate is complete; without it
            the seconds are the budget.
        stop_at_target: End a replicate when its target is reached.
    """

    trials: int = Field(default=24, ge=1, le=1_000_000)
    seconds_per_replicate: float = Field(default=120.0, ge=0.1, le=LONGEST_S)
    samples_per_replicate: int | None = Field(default=None, ge=1, le=MOST)
    stop_at_target: bool = False


class Evaluation(Model):
    """When the held-out split is evaluated.

    Attributes:
        every_samples: Committed samples between two evaluations.
    """

    every_samples: int = Field(default=2048, ge=1, le=MOST)


#: A limit of a phase [s]; at most a week, which every clock that waits for it can hold.
Limit = Annotated[float, Field(gt=0, le=604_800)]


class Timeouts(Model):
    """How long what surrounds the training of a replicate may take, all in seconds.

    Attributes:
        placing: Wait for room on the cluster.
        supervisor: From the start of the replicate's supervisor to its first answer.
        starting: From the first peer's start to its DHT: imports, and a process for every peer.
        barrier: From the first peer's DHT until every peer is ready: data, model, DHT.
        stopping: From the command to stop to the end of training; the swarm's
            ``averaging_timeout`` is added.
        teardown: From the command to shut down to the exit of the last peer.
        unreachable: How long an actor may be unavailable before it counts as lost.
    """

    placing: Limit = 600.0
    supervisor: Limit = 60.0
    starting: Limit = 120.0
    barrier: Limit = 120.0
    stopping: Limit = 15.0
    teardown: Limit = 15.0
    unreachable: Limit = 60.0


def is_path(scenario: str) -> bool:
    """Return whether a scenario is given by the path of its file, and not by name."""
    return "/" in scenario or scenario.endswith((".yaml", ".yml"))


class SweepConfig(Model):
    """One study.

    Attributes:
        name: Its name.
        workload: What is trained.
        swarm: Who trains.
        space: What is searched.
        enqueue: Configurations to try first.
        scenarios: What each configuration runs under: registered names, and paths of the user's
            own scenario files.
        scenario_args: Name of a scenario -> values of its parameters.
        across_scenarios: What an objective of a trial is made of: the mean over its scenarios, or
            the worst of them.
        replicates: Repetitions under each scenario.
        objectives: Column -> direction.
        budget: When to stop.
        evaluation: When to evaluate.
        interleave: Suggested configurations whose replicates are run in turn.
        timeouts: Limits of the phases around training.
        retries: Further attempts at a replicate that was lost to the infrastructure.
        seed: Of the sampler and of all replicates.
        storage: Where trials are kept; None is the run folder. ``${NAME}`` in it stands for a
            variable of the environment.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    workload: WorkloadConfig
    swarm: SwarmConfig = SwarmConfig()
    space: Space = Space()
    enqueue: tuple[Configuration, ...] = ()
    scenarios: tuple[str, ...] = Field(default=("none",), min_length=1)
    scenario_args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    across_scenarios: Literal["mean", "worst"] = "mean"
    replicates: int = Field(default=3, ge=1, le=1000)
    objectives: dict[str, Direction] = Field(
        default={"time_to_target_s": "minimize", "payload_bytes_per_sample": "minimize"},
        min_length=1,
    )
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    interleave: int = Field(default=4, ge=1, le=1000)
    timeouts: Timeouts = Timeouts()
    retries: int = Field(default=2, ge=0, le=100)
    seed: int = Field(default=0, ge=0)
    storage: str | None = Field(default=None, repr=False)

    def to_yaml(self) -> str:
        """Return the resolved study as YAML that :func:`load_sweep` reads back.

        A password in ``storage`` is left out, as the YAML goes to disk.
        """
        data = self.model_dump(mode="json", by_alias=True)
        if self.storage is not None:
            data["storage"] = without_secrets(self.storage)
        for name in ("threshold", "min_compression_ratio"):
            # Given where they mean nothing they are mistakes, and defaults are not given.
            if name not in self.space.model_fields_set:
                del data["space"][name]
        return str(yaml.safe_dump(data, sort_keys=False))
