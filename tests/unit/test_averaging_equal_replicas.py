"""From equal starts, complete rounds leave equal replicas: no averaging of parameters is needed.

Averagers and all-reduces are real, and run in one process. On real peers, with everything that
delays a step: ``tests/integration/test_equal_replicas.py``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
from rayhive.registry import CODECS
from tests.unit.averaging_fakes import unstarted
from tests.unit.meeting import LIMIT, Meeting, take_part

#: A matrix with several reducers, one too small for factors, and tensors of one and no element.
SHAPES = [(70, 50), (4, 3), (40, 5, 3), (11,), (), (0,)]
CODEC_NAMES = [name for name in CODECS.names() if CODECS.get(name).available()]
#: Elements from which size_adaptive uses 8 bits.
THRESHOLD = 500
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Replica:
    """A peer with parameters, an averager and an optimizer.

    Args:
        optimizer: Name of the optimizer.
        rank: Rank of PowerSGD, or None.
        delay: Rounds by which its gradients are older than its parameters.
        seed: Seed of its own data.
        options: Options of the averager.
    """

    def __init__(
        self, optimizer: str, rank: int | None, delay: int, seed: int, **options: Any
    ) -> None:
        kind: Any = RayhiveGradientAverager
        if rank is not None:
            kind = RayhivePowerSGDAverager
            options.update(averager_rank=rank, min_compression_ratio=0.3)
        self.averager = unstarted(kind, SHAPES, **options)
        self.parameters = list(self.averager.parameters)
        start = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(torch.randn(parameter.shape, generator=start))
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)
        self._own = torch.Generator().manual_seed(seed)
        self._seen: deque[list[torch.Tensor]] = deque(maxlen=delay + 1)

    def compute(self, batches: list[int]) -> None:
        """Accumulate the gradients of some batches, at the parameters of an earlier round."""
        self._seen.append([parameter.detach().clone() for parameter in self.parameters])
        self.averager.reset_accumulated_grads_()
        for size in batches:
            for parameter, old in zip(self.parameters, self._seen[0], strict=True):
                noise = torch.randn(parameter.shape, generator=self._own) / max(size, 1) ** 0.5
                parameter.grad = old + 3 * noise
            self.averager.accumulate_grads_(size)
        self.averager.load_accumulators_into_averager_()

    @property
    def samples(self) -> int:
        return int(self.averager.local_samples_accumulated)

    async def meet(self, meeting: Meeting, name: str) -> None:
        with self.averager.get_tensors() as tensors:
            await take_part(meeting, name, self.averager.payload, tensors)

    def step(self) -> None:
        with self.averager.use_averaged_gradients():
            self.optimizer.step()

    def bits(self) -> Iterator[torch.Tensor]:
        """Yield parameters and statistics of the optimizer."""
        yield from self.parameters
        for parameter in self.parameters:
            for statistic in self.optimizer.state[parameter].values():
                yield torch.as_tensor(statistic)


def assert_equal(replicas: list[Replica]) -> None:
    first, *rest = (list(replica.bits()) for replica in replicas)
    for other in rest:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


async def train(replicas: list[Replica], rounds: list[dict[str, Any]], codec: Any) -> None:
    for round_ in rounds:
        at_hand = itertools.cycle(round_["batches"])
        for replica, batches in zip(replicas, at_hand, strict=False):
            replica.compute(batches)
        names = [f"peer {at}" for at in range(len(replicas))]
        weights = {name: float(r.samples) for name, r in zip(names, replicas, strict=True)}
        rates = list(itertools.islice(itertools.cycle(round_["rates"]), len(replicas)))
        meeting = Meeting(weights, codec, rates=rates)
        meetings = (r.meet(meeting, name) for name, r in zip(names, replicas, strict=True))
        await asyncio.wait_for(asyncio.gather(*meetings), LIMIT)
        for replica in replicas:
            replica.step()
        assert_equal(replicas)


#: Sizes of a peer's batches; a peer may have none in a round.
batches = st.lists(st.integers(1, 33), max_size=3)
rounds = st.fixed_dictionaries(
    {
        "batches": st.lists(batches, min_size=1, max_size=8),
        #: The first link has a rate: at least one peer reduces.
        "rates": st.tuples(
            st.sampled_from([10.0, 100.0]), st.sampled_from([None, 0.0, 3.0, 10.0, 1000.0])
        ),
    }
)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("name", CODEC_NAMES)
@settings(max_examples=8, deadline=None)
@given(
    peers=st.integers(2, 8),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    delay=st.integers(0, 1),
    feedback=st.booleans(),
    played=st.lists(rounds, min_size=1, max_size=4),
)
def test_complete_rounds_leave_equal_replicas(
    name: str,
    rank: int | None,
    peers: int,
    optimizer: str,
    delay: int,
    feedback: bool,
    played: list[dict[str, Any]],
) -> None:
    kind = CODECS.get(name)()
    codec = kind.build(THRESHOLD if kind.uses_threshold else None)
    options = {"compression": codec, "error_feedback": feedback}
    replicas = [Replica(optimizer, rank, delay, seed, **options) for seed in range(peers)]
    asyncio.run(train(replicas, played, codec))
    for replica in replicas:
        replica.averager.payload.close()
