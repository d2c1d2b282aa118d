"""Collectives of a member of DDP, alone in its process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

from rayhive.baselines.ddp import Rank
from rayhive.events import Event, Round
from rayhive.peer.baseline import BaselineTraining
from rayhive.peer.from_spec import PeerFit
from rayhive.spec.replicate import PeerSpec

ROUNDS, BATCHES = 2, 3


def test_a_member_exchanges_gradients_and_nothing_before_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = 8 * BATCHES
    spec = PeerSpec.model_validate(
        {
            "run_id": "alone",
            "peer": 0,
            "peers": 1,
            "workload": {"name": "digits"},
            "swarm": {"peers": 1, "batch_size": 8, "target_batch_size": samples},
            "configuration": {},
            "budget": {"samples_per_replicate": samples * ROUNDS, "seconds_per_replicate": 60},
            "evaluation": {"every_samples": samples * ROUNDS},
            "baseline": "ddp",
        }
    )
    emitted: list[Event] = []
    broadcasts: list[Any] = []

    def begins(kind: Any) -> None:  # from here on Lightning sees two members
        monkeypatch.setattr(Trainer, "world_size", 2)
        monkeypatch.setattr(dist, "broadcast", lambda *args, **_: broadcasts.append(args))

    channel = SimpleNamespace(emit=emitted.append, wait_for=begins, notice=None, stop_reason=None)
    fit, member = PeerFit(spec, (0, 1)), Rank(spec, 8)
    member.listen([])
    member.connect()
    training = BaselineTraining(spec, fit, member, channel, {})  # type: ignore[arg-type]
    fit.run(
        fit.make_trainer(
            member.strategy(),  # type: ignore[arg-type]
            training,  # type: ignore[arg-type]
            accumulate_grad_batches=member.batches_per_round,
        )
    )
    assert [event.round for event in emitted if isinstance(event, Round)] == [1, 2]
    assert not broadcasts
