"""Error feedback: what was applied and what is owed add up to the gradients, whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hivemind.compression import CompressionInfo, Uniform8BitQuantization
from hivemind.optim.grad_averager import GradientAverager
from hivemind.proto import runtime_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.averaging.error_feedback import FeedbackPayload
from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
from rayhive.averaging.payload_policy import STALE_WEIGHT, DensePayload
from rayhive.averaging.powersgd_payload import PowerSGDOptions, PowerSGDPayload
from rayhive.errors import ConfigError
from rayhive.registry import CODECS
from rayhive.strategy.arguments import check_options
from tests.unit.averaging_fakes import unstarted
from tests.unit.meeting import LIMIT, Meeting, take_part

#: Large enough for several reducers of 8-bit parts.
SHAPES = [(90, 60), (7,), (50, 90), (), (0,)]
RANK = {"rank": 30, "min_compression_ratio": 0.0}
PHASES = {"dense": ("dense",), "powersgd": ("P", "Q"), "factors": ("P", "Q")}
LOW = ("blockwise4", "blockwise2", "sign", "topk")
LOSSY = ("float16", "scaled_float16", "uniform8", "quantile8", "size_adaptive", *LOW)


def codec(name: str) -> Any:
    if name == "signs":
        return Signs()
    kind = CODECS.get(name)()
    return kind.build(1000 if kind.uses_threshold else None)


class OwnAverager(GradientAverager):
    """An averager of a user's own."""


class Signs(Uniform8BitQuantization):
    """Codec that keeps two values of a part: sent as indices of a codebook, as by hivemind."""

    def quantize(
        self, tensor: torch.Tensor, allow_inplace: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        size = float(tensor.abs().mean()) if tensor.numel() else 0.0
        book = np.zeros(256, np.float32)
        book[:2] = -size, size
        return (tensor >= 0).numpy().astype(np.uint8), book

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        indices, book = self.quantize(tensor.detach().float())
        buffer = np.int64(len(book)).tobytes() + book.tobytes() + indices.tobytes()
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=buffer,
            size=tensor.shape,
            dtype="float32",
            requires_grad=False,
        )


@dataclass
class Peer:
    """A peer with gradients in a payload policy."""

    kind: str
    dtype: torch.dtype = torch.float32
    gradients: list[torch.Tensor] = field(init=False)
    policy: Any = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = [torch.zeros(shape, dtype=self.dtype) for shape in SHAPES]
        if self.kind == "dense":
            self.policy = FeedbackPayload(self.gradients)
        else:  # "factors" has a codec for the factors only
            options = PowerSGDOptions(**RANK, error_feedback=self.kind == "powersgd")
            cpu = torch.device("cpu")
            self.policy = PowerSGDPayload(self.gradients, options, seed="test", device=cpu)

    def give(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for gradient in self.gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        return [gradient.double() for gradient in self.gradients]

    def debt(self) -> list[torch.Tensor]:
        """Return the sums over samples that the peer owes, by gradient, in float64."""
        if self.kind == "dense":
            return [each.double() for each in self.policy.feedback.debt]
        factors = self.policy.factors
        found = dict(zip(self.policy.compressed, factors.debt, strict=True))
        rest = iter(self.policy.feedback.debt if self.kind == "powersgd" else ())
        debts = (found.get(at) for at in range(len(SHAPES)))
        return [
            (next(rest, torch.zeros_like(gradient)) if debt is None else debt).double()
            for debt, gradient in zip(debts, self.gradients, strict=True)
        ]

    def state(self) -> list[torch.Tensor]:
        return [each.clone() for each in (*self.debt(), *self.gradients)]


def total(tensors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(column).sum(0) for column in zip(*tensors, strict=True)]


def step(given_up: bool) -> Any:
    return SimpleNamespace(done=lambda: True, cancelled=lambda: given_up, exception=lambda: None)


async def average(
    peers: dict[str, Peer], weights: dict[str, float], how: str, **options: Any
) -> dict[str, bool]:
    """Let peers average; return which of them succeeded."""
    absent, fails, given_up = (options.get(key, {}) for key in ("absent", "fails", "given_up"))
    meeting = Meeting(weights, codec(how), absent)
    trying = {
        name: asyncio.ensure_future(
            take_part(
                meeting,
                name,
                peer.policy,
                peer.gradients,
                fails=dict(fails).get(name),
                step=step(name in given_up),
                limit=options.get("limit", LIMIT),
            )
        )
        for name, peer in peers.items()
        if name not in absent
    }
    await asyncio.wait(set(trying.values()))
    return {name: name in trying and not trying[name].exception() for name in peers}


def check_sum(
    peers: list[Peer], before: list[torch.Tensor], weights: list[float], scale: float
) -> None:
    """Hold the sum of what was applied and what is owed against the sum before."""
    applied = [
        [weight * gradient.double() for gradient in peer.gradients]
        for peer, weight in zip(peers, weights, strict=True)
    ]
    after = total([*applied, *(peer.debt() for peer in peers)])
    for was, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=2e-5 * scale)


async def play(kind: str, how: str, rounds: list[dict[str, Any]], seed: int) -> None:
    swarm: dict[str, Peer] = {}
    for number, round_ in enumerate(rounds):
        weights = {f"peer {at}": w for at, w in enumerate(round_["weights"]) if w is not None}
        swarm = {name: peer for name, peer in swarm.items() if name in weights}  # others died
        for name in weights.keys() - swarm.keys():  # joined, with the Q of the group
            swarm[name] = Peer(kind)
            for source in list(swarm.values())[:1]:
                if kind != "dense":
                    swarm[name].policy.restore(*source.policy.snapshot())
        own = {name: swarm[name].give(seed + 7 * number + at) for at, name in enumerate(weights)}
        own = {
            name: [weights[name] * gradient for gradient in gradients]
            for name, gradients in own.items()
        }
        for failing in round_["failing"]:  # all fail at the same point, and try again
            phase = PHASES[kind][failing % len(PHASES[kind])]
            before = {name: peer.state() for name, peer in swarm.items()}
            done = await average(swarm, weights, how, fails=dict.fromkeys(weights, phase))
            assert not any(done.values())
            for name, peer in swarm.items():
                for was, now in zip(before[name], peer.state(), strict=True):
                    assert torch.equal(was, now)
        absent = {f"peer {round_['absent']}"} & weights.keys()
        if kind != "dense" or absent == weights.keys():  # PowerSGD may fail for some of them only
            absent = set()
        before = {name: peer.state() for name, peer in swarm.items()}
        debts = {name: peer.debt() for name, peer in swarm.items()}
        given_up = {f"peer {at}" for at in round_["given up"]}
        done = await average(swarm, weights, how, absent=absent, given_up=given_up)
        for name in weights:
            if not done[name]:
                for was, now in zip(before[name], swarm[name].state(), strict=True):
                    assert torch.equal(was, now), "a failed round changes nothing"
        present = [name for name in weights if done[name]]
        assert present == [name for name in weights if name not in absent]
        sums = total([tensors for name in present for tensors in (own[name], debts[name])] or [[]])
        scale = 1 + sum(weights.values())
        check_sum([swarm[name] for name in present], sums, [weights[n] for n in present], scale)
        for name in given_up & set(present):
            await swarm[name].policy.undo_given_up()
            for was, now in zip(debts[name], swarm[name].debt(), strict=True):
                torch.testing.assert_close(now, was, rtol=1e-6, atol=1e-5 * scale)


#: Samples of a peer in a round; None while it is dead, and after that comes another one.
weights = st.one_of(st.none(), st.just(0), st.integers(1, 64))
rounds = st.fixed_dictionaries(
    {
        "weights": st.tuples(st.integers(1, 64), weights, weights),
        "failing": st.lists(st.integers(0, 1), max_size=2),
        "absent": st.integers(0, 7),
        "given up": st.lists(st.integers(0, 2), max_size=1),
    }
)


@pytest.mark.parametrize("kind", ["dense", "powersgd", "factors"])
@settings(max_examples=25, deadline=None)
@given(
    how=st.sampled_from([*LOSSY, "signs", "none"]),
    played=st.lists(rounds, min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_what_was_applied_and_what_is_owed_add_up(
    kind: str, how: str, played: list[dict[str, Any]], seed: int
) -> None:
    """Over unequal and changing weights, joins, deaths, lost peers, and failed rounds."""
    asyncio.run(play(kind, "none" if kind == "factors" else how, played, seed))


@pytest.mark.parametrize("kind", ["dense", "powersgd", "factors"])
def test_all_peers_owe_something(kind: str) -> None:
    """Otherwise the property above would hold trivially."""
    names = {"a": 3.0, "b": 5.0, "c": 0.0}
    peers = {name: Peer(kind) for name in names}
    for seed, peer in enumerate(peers.values()):
        peer.give(seed)
    how = "none" if kind == "factors" else "uniform8"
    assert all(asyncio.run(average(peers, names, how)).values())
    owed = {name: sum(float(each.norm()) for each in p.debt()[:3]) for name, p in peers.items()}
    assert min(owed["a"], owed["b"]) > 0.1
    assert (owed["c"] > 0.1) == (kind == "dense"), "without samples, as a reducer"


def test_without_errors_nothing_is_owed() -> None:
    peers = {"a": Peer("dense"), "b": Peer("dense")}
    for seed, peer in enumerate(peers.values()):
        peer.give(seed)
    assert all(asyncio.run(average(peers, {"a": 1.0, "b": 2.0}, "none")).values())
    assert not any(bool(each.any()) for peer in peers.values() for each in peer.debt())


def test_rounding_to_half_precision_is_owed() -> None:
    peers = {"a": Peer("dense", torch.float16), "b": Peer("dense", torch.float16)}
    names = {"a": 3.0, "b": 5.0}
    own = [[names[n] * each for each in p.give(i)] for i, (n, p) in enumerate(peers.items())]
    assert all(asyncio.run(average(peers, names, "none")).values())
    assert any(bool(each.any()) for peer in peers.values() for each in peer.debt())
    check_sum(list(peers.values()), total(own), list(names.values()), 1.0)


def test_a_peer_with_old_parameters_keeps_its_debt() -> None:
    peers = {name: Peer("dense") for name in "abc"}
    for weights in ({"a": 4.0, "b": 4.0, "c": 3.0}, {"a": 4.0, "b": STALE_WEIGHT, "c": 3.0}):
        before = peers["b"].debt()
        for seed, peer in enumerate(peers.values()):
            peer.give(seed)
        assert all(asyncio.run(average(peers, weights, "uniform8")).values())
    was, now = (
        torch.cat([each.flatten() for each in debt]) for debt in (before, peers["b"].debt())
    )
    assert 0.4 < float((was == now).double().mean()) < 0.9, "of what others reduce"


@pytest.mark.parametrize("kind", ["dense", "powersgd"])
def test_a_round_with_values_that_are_not_finite_leaves_no_debt_behind(kind: str) -> None:
    names = {"a": 3.0, "b": 5.0}
    peers = {name: Peer(kind) for name in names}
    for bad in (False, True, False):
        for seed, peer in enumerate(peers.values()):
            peer.give(seed)
        if bad:
            peers["a"].gradients[0][3, 2] = torch.nan
        limit = {"limit": 5.0} if bad else {}  # the other peer waits for the end of the round
        assert asyncio.run(average(peers, names, "float16", **limit))["b"] or bad
        for peer in peers.values():
            assert all(bool(each.isfinite().all()) for each in peer.debt())


def test_powersgd_cannot_pay_in_dense_rounds() -> None:
    with pytest.raises(ConfigError, match="0 with error_feedback"):
        PowerSGDOptions(2, start_compressing_after_num_steps=3, error_feedback=True)


def trained(how: str, feedback: bool, seed: int, rounds: int = 60) -> float:
    """Return the relative distance of parameters to the target after training with a codec.

    Each of three peers has noisy gradients of its own target, with unequal samples; coordinates
    have scales over one order of magnitude, which few codecs keep apart.
    """
    generator = torch.Generator().manual_seed(seed)
    count, samples = 3000, {"a": 3.0, "b": 8.0, "c": 21.0}
    scales = torch.logspace(-0.5, 0.5, count)[torch.randperm(count, generator=generator)]
    targets = {name: scales * torch.randn(count, generator=generator) for name in samples}
    target = sum(samples[name] * targets[name] for name in samples) / sum(samples.values())
    parameters = torch.zeros(count)
    gradients = {name: [torch.zeros(count)] for name in samples}
    policies: dict[str, Any] = {
        name: FeedbackPayload(own) if feedback else DensePayload()
        for name, own in gradients.items()
    }

    async def train() -> None:
        for number in range(rounds):
            meeting = Meeting(samples, codec(how))
            for name, size in samples.items():
                noise = 0.1 * scales * torch.randn(count, generator=generator) / size**0.5
                gradients[name][0].copy_(parameters - targets[name] + noise)
            await asyncio.gather(
                *(take_part(meeting, name, policies[name], gradients[name]) for name in samples)
            )
            parameters.sub_(gradients["a"][0], alpha=0.2 * 0.97**number)

    asyncio.run(train())
    return float(((parameters - target) / scales).norm() / (target / scales).norm())


@pytest.mark.parametrize(
    ("how", "ratio"),
    [("uniform8", 0.4), ("quantile8", 0.5), ("size_adaptive", 0.4), ("signs", 0.5)],
)
def test_feedback_reaches_the_target_where_a_codec_alone_does_not(how: str, ratio: float) -> None:
    """Without feedback the tails that a codec cuts are lost in every round."""
    without, with_ = (trained(how, feedback, seed=0) for feedback in (False, True))
    assert with_ < ratio * without


@pytest.mark.parametrize("feedback", [False, True])
def test_averagers_take_the_option(feedback: bool) -> None:
    shapes = [(40, 30), (7,)]
    plain = unstarted(RayhiveGradientAverager, shapes, error_feedback=feedback)
    assert isinstance(plain.payload, FeedbackPayload) == feedback
    low_rank = unstarted(RayhivePowerSGDAverager, shapes, averager_rank=2, error_feedback=feedback)
    assert (low_rank.payload.feedback is not None) == feedback


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"error_feedback": 1}, "True or False"),
        ({"error_feedback": True, "aggregation": "trimmed_mean"}, "False with aggregation"),
        ({"error_feedback": True, "grad_averager_factory": GradientAverager}, None),
        ({"error_feedback": True, "grad_averager_factory": OwnAverager}, "of your own"),
    ],
)
def test_the_strategy_refuses_what_cannot_be_fed_back(
    options: dict[str, Any], allowed: str | None
) -> None:
    problems = [each for each in check_options(options) if each.key == "error_feedback"]
    assert [bool(allowed) and allowed in each.allowed for each in problems] == [True] * bool(
        allowed
    )
