"""Peers of a swarm, the nodes that host them, and how the peers meet."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, StringConstraints

from rayhive.spec.model import LONGEST_S, MOST, Model

#: Rules of the outlier filter; each includes the rules before it.
OutlierFilterRule = Literal["finite", "norm", "direction"]
OUTLIER_FILTERS: tuple[str, ...] = get_args(OutlierFilterRule)
#: How a reducer combines the gradients of a group.
Aggregation = Literal["mean", "centered_clipping", "trimmed_mean"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
#: Aggregation rules that look at several elements at a time, so that these must be gradients alone.
BLOCKWISE: tuple[Aggregation, ...] = ("centered_clipping",)
DEFAULT_RULES: dict[str, str] = {"outlier_filter": "norm", "aggregation": "mean"}

#: Largest number of peers; larger numbers are typing errors.
MOST_PEERS = 100_000

#: A name or a label in the syntax of Kubernetes, which Ray's labels follow.
WORD = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, StringConstraints(pattern=rf"^([a-z0-9.-]{{1,253}}/)?{WORD}$")]
LabelValue = Annotated[str, StringConstraints(pattern=rf"^({WORD})?$")]
ClassName = Annotated[str, StringConstraints(pattern=rf"^{WORD}$")]


class Link(Model):
    """Shaping of a node's link, in each direction.

    Attributes:
        rate_mbit: Rate [Mbit/s]; None for no limit.
        delay_ms: Delay of every packet [ms].
        loss: Share of the packets that is lost.
    """

    rate_mbit: float | None = Field(default=None, ge=1e-3, le=1e7)
    delay_ms: float = Field(default=0.0, ge=0, le=1e6)
    loss: float = Field(default=0.0, ge=0, lt=1)


class NodeClass(Model):
    """Class of nodes that host some of the peers.

    Attributes:
        count: Peers on nodes of this class.
        labels: Ray node labels that a node of this class must carry.
        gpus: GPUs of one peer; fractions share a GPU between peers.
        cpu_share: CPU time that a peer gets for each of its threads [cores].
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
        """Whether only a testbed provides nodes of this class."""
        return self.link is not None or self.cpu_share != 1.0


class SwarmConfig(Model):
    """Peers of a trial, and the settings of their rounds.

    Attributes:
        peers: Number of peers.
        target_batch_size: Samples per round, over the swarm.
        batch_size: Samples per micro-batch of one peer; the workload's default if absent.
        matchmaking_time: Longest wait for a peer that has joined a round and cannot be reached [s];
            a round starts as soon as all live peers have joined it.
        averaging_timeout: Longest time of one averaging in which no data move [s].
        straggler_timeout: Longest wait of a round for a peer that computes without progress [s].
        metadata_expiration: Time after which a silent peer no longer counts as live [s].
        outlier_filter: Tensors that are refused before a group averages. ``finite`` refuses values
            that are not finite, ``norm`` also an implausible norm, ``direction`` also a direction
            that stays opposite to that of the other peers.
        aggregation: Combination of a group's gradients; robust rules need three peers or more.
        trusted_network: Whether peers send tensors to each other without encryption.
        threads_per_peer: Torch threads of one peer.
        gpus_per_peer: GPUs of one peer when there are no node classes.
        share_nodes: Whether other replicates may use the nodes of the swarm at the same time.
        node_classes: Classes of the nodes that host the peers, by name.
    """

    peers: int = Field(default=2, ge=1, le=MOST_PEERS)
    target_batch_size: int = Field(default=256, ge=1, le=MOST)
    batch_size: int | None = Field(default=None, ge=1, le=MOST)
    matchmaking_time: float = Field(default=5.0, ge=0.01, le=LONGEST_S)
    averaging_timeout: float = Field(default=30.0, ge=0.01, le=LONGEST_S)
    straggler_timeout: float = Field(default=60.0, ge=0.01, le=LONGEST_S)
    metadata_expiration: float = Field(default=4.0, ge=0.01, le=LONGEST_S)
    outlier_filter: OutlierFilterRule = "norm"
    aggregation: Aggregation = "mean"
    trusted_network: bool = False
    threads_per_peer: int = Field(default=1, ge=1, le=1024)
    gpus_per_peer: float = Field(default=0.0, ge=0, le=1024)
    share_nodes: bool = False
    node_classes: dict[ClassName, NodeClass] | None = None

    @property
    def peer_classes(self) -> tuple[tuple[str, NodeClass], ...]:
        """Name and class of the node of each peer, by the peer's number; empty without classes.

        Node classes take the peers in the order in which they are written. A peer that joins later
        has the class of the last one.
        """
        classes = (self.node_classes or {}).items()
        return tuple(entry for entry in classes for _ in range(entry[1].count))

    def link_rate(self, peer: int) -> float | None:
        """Return the link rate by which a group decides what a peer reduces [Mbit/s].

        Args:
            peer: Number of the peer. Peers that join later are like the last of the others.

        Returns:
            The rate of the peer's node class; the highest rate of all classes if its own link is
            not limited; None if no class has a rate.
        """
        links = [item.link for _, item in self.peer_classes]
        rates = [None if link is None else link.rate_mbit for link in links]
        given = [rate for rate in rates if rate is not None]
        if not given:
            return None
        return rates[min(peer, len(rates) - 1)] or max(given)
