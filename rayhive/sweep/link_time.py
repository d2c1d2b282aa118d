"""Bytes of a round and their time on the links, predicted from shapes, settings and links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean

from rayhive.compression.payload import (
    Payload,
    allreduce_bytes,
    configuration_payload,
    fragment_payloads,
    payload,
)
from rayhive.compression.powersgd.shapes import Shape
from rayhive.compression.shares import reducer_shares
from rayhive.spec import BLOCKWISE, Configuration, SwarmConfig

BITS = 8


@dataclass(frozen=True)
class RoundTraffic:
    """Traffic of a round, as the mean over the rounds between two averagings of parameters.

    Attributes:
        gradients: One encoded copy of the gradients and of the extra tensors among them, by phase.
        state_every: Rounds between two averagings of parameters; None for averagings with a
            reason only, of which a plan knows nothing.
        gradient_bytes: Gradient payload that one peer sends in a round, the mean over peers [B].
        state_bytes: Payload of parameters, outer momentum and extra tensors, the same way [B].
            The statistics that ``inner_state: average`` adds are not known before the training,
            and in neither of the two.
        seconds: Time of a round's payload on the links [s]; None if no link has a rate or a delay.
    """

    gradients: Payload
    state_every: int | None
    gradient_bytes: float
    state_bytes: float
    seconds: float | None

    @property
    def bytes(self) -> float:
        """All payload that one peer sends in a round, the mean over peers and rounds [B]."""
        return self.gradient_bytes + self.state_bytes


def round_traffic(
    shapes: Iterable[Shape],
    extras: Iterable[Shape],
    configuration: Configuration,
    swarm: SwarmConfig,
) -> RoundTraffic:
    """Predict the traffic of a round without failures.

    Args:
        shapes: Shape of each parameter.
        extras: Shape of each extra tensor that is averaged.
        configuration: The configuration.
        swarm: The swarm.
    """
    shapes, extras = tuple(shapes), tuple(extras)
    rates = [swarm.link_rate(peer) for peer in range(swarm.peers)]
    values = configuration.values
    every = values["average_state_every"]
    along: tuple[Shape, ...] = ()
    if every == "auto":  # as rayhive.optim.parameter_rounds.period_of
        with_gradients = swarm.aggregation not in BLOCKWISE
        along = extras if with_gradients else ()
        own = bool(extras) or values["inner_state"] == "average"
        every = 1 if own and not with_gradients else None
    gradients = configuration_payload(shapes, configuration, rates=rates, extras=along)
    rounds = fragment_payloads(shapes, configuration, rates=rates, extras=along)
    outer = shapes if values["outer_momentum"] else ()  # averaged with the parameters
    state = payload(shapes, codec=values["state_codec"], rates=rates, extras=(*outer, *extras))
    size = configuration.group_peers(swarm.peers)
    seconds = fmean(allreduce_seconds(each, swarm, size) for each in rounds)
    if every is not None:
        seconds += allreduce_seconds(state, swarm) / every
    payloads = [sum(each.bytes_per_transfer for each in rounds), state.bytes_per_transfer]
    counts = (configuration.groups(swarm.peers), 1)
    sent, sent_state = (
        float(allreduce_bytes(size, swarm.peers, groups))
        for size, groups in zip(payloads, counts, strict=True)
    )
    limited = any(cls.link is not None for _, cls in swarm.peer_classes)
    return RoundTraffic(
        gradients=gradients,
        state_every=every,
        gradient_bytes=sent / len(rounds),
        state_bytes=0.0 if every is None else sent_state / every,
        seconds=seconds if limited else None,
    )


def allreduce_seconds(sent: Payload, swarm: SwarmConfig, size: int | None = None) -> float:
    """Return the time that an all-reduce's payload needs on the swarm's links [s].

    Of N peers, one that reduces the share x of a payload V sends V(1 + (N - 2)x), and receives as
    much (:func:`rayhive.compression.shares.reducer_shares`). A phase lasts until the slowest link
    has carried this, and at least one round trip: a part goes to a peer that reduces, and the
    average comes back. A packet takes the delays of both links. The phases of PowerSGD follow each
    other.

    Computing, encoding, headers, lost packets, the forming of the group and the windows of TCP
    take time besides. Lossless coding of what a slow link carries saves time, about a sixth for
    float32 (:mod:`rayhive.membership.links.lossless`).

    Args:
        sent: The payload.
        swarm: The swarm, with the rates [Mbit/s] and delays [ms] of its links.
        size: Peers of a group; None for all.
    """
    peers, others = range(swarm.peers), (size or swarm.peers) - 2
    if len(peers) < 2:
        return 0.0
    links = [item.link for _, item in swarm.peer_classes] or [None for _ in peers]
    shares = reducer_shares([swarm.link_rate(peer) for peer in peers])
    slowest = max(
        (
            float(1 + others * share) / (link.rate_mbit * 1e6 / BITS)
            for share, link in zip(shares, links, strict=True)
            if link is not None and link.rate_mbit is not None
        ),
        default=0.0,
    )
    delays = [0.0 if link is None else link.delay_ms / 1e3 for link in links]
    round_trip = max(
        2 * (ours + theirs)
        for (reduces, ours), (_, theirs) in permutations(zip(shares, delays, strict=True), 2)
        if reduces
    )
    return sum(phase.bytes * slowest + round_trip for phase in sent.phases)
