"""Baseline ``elastic``: the members wait for one whose checkpoint takes long to come."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rayhive.baselines import elastic

MEMBERS = 3
#: Timeout of the collectives of training, and the time for which the checkpoint is on its way [s].
TIMEOUT_S, COPY_S = 2.0, 5.0


def exchange(rank: int, store: str, folder: Path) -> None:
    """Exchange checkpoints, of which the last member's takes long, and meet as training does."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=MEMBERS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    if rank == MEMBERS - 1:
        receive = dist.recv

        def slowly(*given: Any, **named: Any) -> Any:
            time.sleep(COPY_S / 2)
            return receive(*given, **named)

        dist.recv = slowly
    restored = elastic.exchange_checkpoint(folder, f"peer-{rank}")
    dist.barrier()
    content = None if restored.path is None else restored.path.read_bytes()
    os._exit(0 if (restored.round, content) == (5, b"state") else 3)


@pytest.mark.slow
def test_members_wait_for_a_checkpoint_longer_than_for_a_collective(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    members = []
    for rank in range(MEMBERS):
        folder = tmp_path / str(rank)
        folder.mkdir()
        if rank < MEMBERS - 1:
            (folder / "round-5.ckpt").write_bytes(b"state")
        place = (rank, str(tmp_path / "store"), folder)
        members.append(context.Process(target=exchange, args=place))
    for member in members:
        member.start()
    for member in members:
        member.join(60)
        member.kill()
    assert [member.exitcode for member in members] == [0, 0, 0]
