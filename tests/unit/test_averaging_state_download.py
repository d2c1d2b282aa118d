"""States that a joining peer takes over, with and without digests of other peers."""

from __future__ import annotations

import asyncio
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration

from rayhive.averaging import state_download
from rayhive.averaging.state_download import (
    LatestDownload,
    OwnState,
    SharedStates,
    StateDownload,
)
from rayhive.averaging.tensor_summary import Digest, norm_of, with_digest

State = tuple[dict[str, Any], list[torch.Tensor]]


def trained(seed: int = 0, factor: float = 1.0) -> list[torch.Tensor]:
    """Return parameters of a run, equal but for the changes of a few rounds."""
    common = torch.Generator().manual_seed(7)
    own = torch.Generator().manual_seed(seed)
    shapes = [(40, 30), (40,)]
    return [
        factor * (torch.randn(s, generator=common) + 0.1 * torch.randn(s, generator=own))
        for s in shapes
    ]


#: Norm of the joining peer's own state.
OWN = OwnState(norm_of(trained(99)))


def state(tensors: list[torch.Tensor], announced: list[torch.Tensor] | None = None) -> State:
    """Return a state with optimizer statistics, whose digest is of ``announced``."""
    return with_digest({}, announced or tensors), [*tensors, torch.full((5,), 1e9)]


class Sources:
    """Other peers, of which only the digests are known.

    Args:
        opinions: Tensors of each of them; None if it does not answer.
        alive: Those that are known to be alive; by default all.
    """

    received_bytes = 0

    def __init__(self, *opinions: list[torch.Tensor] | None, alive: Any = range(9)) -> None:
        self.opinions = [None if o is None else Digest.of(o) for o in opinions]
        self.alive = alive
        self.asked: list[Any] = []

    async def peers(self) -> list[Any]:
        return list(range(len(self.opinions)))

    async def state(self, peer: Any) -> State | None:
        return None

    async def digest(self, peer: Any) -> Digest | None:
        self.asked.append(peer)
        return self.opinions[peer]


def verdict(sources: Sources, offered: State, own: OwnState = OWN) -> str | None:
    """Return the reason why a joining peer refuses a state; None if it does not."""
    others: Any = list(range(len(sources.opinions)))
    return asyncio.run(StateDownload(sources, own).fault_in(offered, others))


def test_live_peers_are_asked_first() -> None:
    names = [PeerID(name) for name in (b"dead and newest", b"newer", b"older", b"oneself")]
    rounds = dict(zip(names, (9, 8, 7, 9), strict=True))
    entries = {name.to_bytes(): ValueWithExpiration(float(rounds[name]), 1e12) for name in names}

    async def get(key: str, **_: Any) -> Any:
        return ValueWithExpiration(entries, 1e12)

    dht: Any = SimpleNamespace(get=get, peer_id=names[3])
    states = SharedStates(dht, "run", lambda peer: None, frozenset(names[1:3]), 1.0)
    assert asyncio.run(states.peers()) == [names[1], names[2], names[0]]


def test_the_first_sound_state_is_taken_and_refused_ones_are_reported() -> None:
    class Offering(Sources):
        received_bytes = 7

        async def state(self, peer: Any) -> State | None:
            if peer == 0:
                raise TimeoutError("gone")
            return (
                state(trained(factor=1000.0), announced=trained())
                if peer == 1
                else state(trained())
            )

    download = StateDownload(Offering(*[trained(seed) for seed in range(4)]), OWN)
    asyncio.run(download.run())
    outcome = download.outcome
    assert outcome.state is not None and outcome.received_bytes == 7
    (refusal,) = outcome.refused
    assert (refusal["offender"], refusal["reason"]) == ("1", "checksum")


def test_distances_of_digests_estimate_those_of_the_tensors() -> None:
    a, b = trained(1), trained(2)
    true = math.dist(torch.cat([t.flatten() for t in a]), torch.cat([t.flatten() for t in b]))
    scale = max(Digest.of(a).norm, Digest.of(b).norm)
    assert Digest.of(a).distance(Digest.of(b)) == pytest.approx(true / scale, rel=0.3)
    assert Digest.of(a).distance(Digest.of(a)) == 0.0
    assert Digest.of(a).distance(Digest.of(trained(1, factor=1000.0))) > 0.9
    assert Digest.of(a).distance(Digest.of(a[:1])) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_state_that_is_not_finite_anywhere_is_refused(bad: float) -> None:
    metadata, tensors = state(trained())
    tensors[-1][2] = bad
    assert verdict(Sources(), (metadata, tensors)) == "not_finite"


def test_a_state_that_differs_from_its_digest_is_refused() -> None:
    assert verdict(Sources(), state(trained(factor=1000.0), announced=trained())) == "checksum"
    assert verdict(Sources(), state(trained())) is None


def test_one_agreeing_digest_of_another_peer_is_enough() -> None:
    wrong, right = state(trained(factor=1000.0)), state(trained())
    assert verdict(Sources(trained(1), trained(2)), wrong) == "disagrees"
    assert verdict(Sources(trained(1), trained(2)), right) is None
    assert verdict(Sources(trained(1, factor=1000.0), trained(2)), right) is None
    assert verdict(Sources(None, trained(1), trained(2)), wrong) == "disagrees"


def test_of_two_states_the_one_nearer_to_the_joining_peer_is_taken() -> None:
    wrong, right = trained(factor=1000.0), trained()
    assert verdict(Sources(right), state(wrong)) == "disagrees"
    assert verdict(Sources(wrong), state(right)) is None
    assert verdict(Sources(None), state(right)) is None, "no other digest is known"


def test_at_most_two_digests_are_requested_and_states_without_one_are_taken() -> None:
    sources = Sources(*(trained(seed) for seed in range(5)))
    verdict(sources, state(trained(factor=1000.0)))
    assert sources.asked == [0, 1]
    assert verdict(Sources(trained(1)), ({"epoch": 3}, trained(factor=1000.0))) is None


@pytest.mark.parametrize(
    ("opinions", "alive", "asked"),
    [
        ([trained(1), trained(2), trained(3)], [1], [1]),
        ([trained(1), trained(2), trained(3)], [2, 1], [1, 2]),
        ([trained(1), None, trained(3)], [1], [1, 0, 2]),
        ([trained(1), None, None, trained(3)], [1, 2, 3], [1, 2, 3]),
        ([None, None, None], [], [0, 1, 2]),
    ],
)
def test_peers_that_may_be_dead_are_asked_only_if_no_live_one_answers(
    opinions: list[list[torch.Tensor] | None], alive: list[int], asked: list[int]
) -> None:
    sources = Sources(*opinions, alive=alive)
    verdict(sources, state(trained()))
    assert sources.asked == asked


def test_digests_are_requested_together() -> None:
    class Slow(Sources):
        async def digest(self, peer: Any) -> Digest | None:
            found = await super().digest(peer)
            while len(self.asked) < 2:
                await asyncio.sleep(0)
            return found

    assert verdict(Slow(trained(1), trained(2)), state(trained())) is None


def test_a_download_that_was_given_up_ends_when_the_next_one_begins() -> None:
    """Else both share the link, and neither gets there in time."""
    running: list[int] = []

    async def download(number: int) -> None:
        running.append(number)
        try:
            await asyncio.sleep(60.0)
        finally:
            running.remove(number)

    async def body() -> None:
        downloads, callers = LatestDownload(), []
        for number in range(3):
            callers.append(asyncio.create_task(downloads.run(download(number))))
            for _ in range(10):
                await asyncio.sleep(0)
            assert running == [number]
        assert [each.done() for each in callers] == [True, True, False]
        callers[-1].cancel()

    asyncio.run(body())


class Entries:
    """A DHT that notes when an entry was stored and when it expires; the first requests fail."""

    peer_id = SimpleNamespace(to_bytes=lambda: b"me")

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.stored: list[tuple[float, float]] = []

    async def store(self, *args: Any, expiration_time: float, **kwargs: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("no peer answers")
        self.stored.append((state_download.get_dht_time(), expiration_time))


@pytest.mark.parametrize(("failures", "period"), [(0, 1.5), (2, 1e6)])
def test_an_announced_state_never_expires(
    failures: int, period: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joiner that found no state would begin with its own parameters."""
    for name in ("DECLARE_PAUSE_S", "ROUND_PAUSE_S", "LOOK_S"):
        monkeypatch.setattr(state_download, name, 0.01)

    async def body() -> None:
        dht: Any = Entries(failures)
        declaring = asyncio.create_task(
            state_download.declare_state(dht, "key", lambda: 3.0, asyncio.Event(), period)
        )
        async with asyncio.timeout(20.0):
            while len(dht.stored) < (1 if failures else 3):
                await asyncio.sleep(0.01)
        declaring.cancel()
        for (_, expires), (renewed, _) in itertools.pairwise(dht.stored):
            assert renewed < expires

    asyncio.run(body())


def test_a_mask_of_the_joiners_own_module_is_no_fault() -> None:
    """An attention mask of -inf made a joiner refuse every state."""
    mask = torch.full((3, 3), -torch.inf)
    metadata, tensors = state(trained())
    offered = (metadata, [*tensors, mask, torch.ones(2)])
    alike = Sources(trained(1))
    assert verdict(alike, offered) == "not_finite"
    masked = OwnState(OWN.norm, frozenset({2}))
    assert verdict(alike, offered, masked) is None
    offered[1][-1][0] = torch.nan
    assert verdict(alike, offered, masked) == "not_finite"
    large = (metadata, [*tensors, torch.full((3,), -1e30)])
    assert verdict(alike, large) is None
