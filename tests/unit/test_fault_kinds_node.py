"""Faults on nodes: their effects on the real machine, none of which remains."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.node import capabilities, cgroups, process_group
from rayhive.cluster.node.tools import small_disk
from rayhive.errors import RayhiveError
from rayhive.faults.node_tools import CPU_LIMIT, SMALL_DISK, CpuQuota, DiskArgs
from tests.unit.fault_fakes import RUN, FakeSwarm, my_groups, planned, run


def needs(capability: str) -> pytest.MarkDecorator:
    reason = capabilities.here()[capability]
    return pytest.mark.skipif(reason is not None, reason=f"{capability}: {reason}")


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


@needs("cpu_quota")
def test_a_straggler_is_held_back_until_it_is_healed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path, busy=True) as swarm:
            for peer in ("peer-0", "peer-2"):
                os.killpg(swarm.incarnations[peer].process.pid, signal.SIGSTOP)
            kind = planned("straggler", cores=0.05)
            proof = await run(kind, swarm)
            assert proof.ok
            assert proof.what["peer-1"]["throttled"] >= 1
            (group,) = my_groups()
            members = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
            assert members == set(await swarm.process_states("peer-1"))
            assert await kind.heal(swarm, ["peer-1"]) == {"failed": {}}
            assert my_groups() == []
            assert set((await swarm.process_states("peer-1")).values()) == {"running"}

    play(scene())


@needs("cpu_quota")
def test_a_limit_does_not_outlive_its_run_or_its_maker(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("straggler")
            await kind.inject(swarm, ["peer-1"])
            (group,) = my_groups()
            leader = str(swarm.incarnations["peer-1"].process.pid)
            with pytest.raises(RayhiveError, match="already"):
                await CPU_LIMIT.on(swarm, "node-1", leader).start(CpuQuota(cores=0.5))
            assert group not in map(Path, cgroups.remove_dead())
            await swarm.toolbox.release(RUN)
            assert not group.exists()
            await kind.teardown(swarm)

            dead = group.with_name(f"{cgroups.PREFIX}{os.getpid()}.1-x-{leader}")
            dead.mkdir()  # the pid is this process's, but it started at another time
            (dead / "cgroup.procs").write_text(leader)
            assert str(dead) in cgroups.remove_dead()
            assert set((await swarm.process_states("peer-1")).values()) == {"running"}

    play(scene())


@needs("memory")
def test_memory_is_held_and_given_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("memory_pressure", who=["node-1"], megabytes=8)
            await kind.setup(swarm)
            done = await kind.inject(swarm, ["node-1"])
            proof = await kind.verify(swarm, ["node-1"])
            assert proof.ok
            assert 8 * 10**6 <= proof.what["rss"]["node-1"] < 9 * 10**6
            await kind.heal(swarm, ["node-1"])
            with pytest.raises(ProcessLookupError):
                os.kill(done["held"]["node-1"]["pid"], 0)

    play(scene())


@needs("memory")
def test_memory_whose_holder_died_is_no_proof(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("memory_pressure", who=["node-1"], megabytes=8)
            done = await kind.inject(swarm, ["node-1"])
            pid = done["held"]["node-1"]["pid"]
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert not (await kind.verify(swarm, ["node-1"])).ok
            await kind.teardown(swarm)

    play(scene())


def test_more_memory_than_is_free_is_refused_before_training(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("memory_pressure", who=["node-0"], megabytes=2**30)
            with pytest.raises(RayhiveError, match="besides a reserve"):
                await kind.setup(swarm)
            with pytest.raises(RayhiveError, match="besides a reserve"):
                await kind.inject(swarm, ["node-0"])
            await kind.teardown(swarm)

    play(scene())


@pytest.mark.parametrize("held_up_s", [0.0, 0.3])
@needs("mount")
def test_a_full_disk_fails_checkpoints_and_training_goes_on(
    tmp_path: Path, held_up_s: float
) -> None:
    """Also on a busy machine, on which events of the peer come while the proof is held up."""

    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("disk_full", megabytes=1)
            folder = tmp_path / "peer-1" / "checkpoints"
            try:
                await kind.setup(swarm)
                (folder / "early.ckpt").write_bytes(b"x")
                done = await kind.inject(swarm, ["peer-1"])
                assert 0 < done["written"]["peer-1"] <= 2**20 + 4096
                asyncio.get_running_loop().call_later(0.005, time.sleep, held_up_s)
                proof = await kind.verify(swarm, ["peer-1"])
                assert proof.ok
                assert proof.what["peer-1"]["checkpoint"] == "ENOSPC"
                assert proof.what["peer-1"]["goes_on"]
                assert await kind.heal(swarm, ["peer-1"]) == {"failed": {}}
                (folder / "late.ckpt").write_bytes(bytes(65536))
            finally:
                await kind.teardown(swarm)
            assert process_group.mounts_below(tmp_path) == []
            assert not folder.exists()

    play(scene())


@needs("mount")
def test_a_checkpoint_that_is_written_is_no_proof(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("disk_full", megabytes=1)
            await kind.inject(swarm, ["peer-1"])
            (tmp_path / "peer-1" / "checkpoints" / ".rayhive-full").unlink()
            assert not (await kind.verify(swarm, ["peer-1"])).ok
            await kind.teardown(swarm)

    play(scene())


@needs("mount")
def test_only_what_was_mounted_here_is_filled(tmp_path: Path) -> None:
    disk = small_disk.SmallDisk(tmp_path / "checkpoints", 2**20)
    process_group.unmount(disk.folder)  # now the folder is on the real disk
    with pytest.raises(RayhiveError, match="not rayhive's own"):
        disk.fill()
    disk.empty()
    disk.release()
    assert list(disk.folder.iterdir()) == []
    with pytest.raises(RayhiveError, match="for a small file system"):
        small_disk.SmallDisk(tmp_path / "checkpoints", 2**30)


@needs("mount")
def test_a_mount_does_not_outlive_its_run(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            await planned("disk_full", megabytes=1).inject(swarm, ["peer-1"])
            assert len(process_group.mounts_below(tmp_path)) == 1
            await swarm.toolbox.release(RUN)
            assert process_group.mounts_below(tmp_path) == []
            leader = str(swarm.incarnations["peer-1"].process.pid)
            with pytest.raises(RayhiveError, match="temporary directory of the peer"):
                disk = SMALL_DISK.on(swarm, "node-1", leader)
                await disk.start(DiskArgs(folder="../elsewhere", size=1))

    play(scene())


def test_a_killed_node_comes_back_with_its_peers(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("kill_node", who=["node-1"])
            proof = await run(kind, swarm, ["node-1"])
            assert proof.ok
            assert proof.what == {"answers": {"node-1": False}, "alive": []}
            assert swarm.living() == ["peer-0"]
            healed = await kind.heal(swarm, ["node-1"])
            assert healed == {"lives": {"peer-1": "peer-1.1", "peer-2": "peer-2.1"}}
            assert swarm.peers_on("node-1") == ["peer-1", "peer-2"]

    play(scene())


@pytest.mark.parametrize("kind", ["kill_node", "drain_node"])
@pytest.mark.parametrize("proved", [True, False])
def test_a_node_that_was_not_healed_is_started_at_the_end(
    tmp_path: Path, kind: str, proved: bool
) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            fault = planned(kind, who=["node-1"], **({"notice_s": 0.5} if kind[0] == "d" else {}))
            await fault.inject(swarm, ["node-1"])
            if proved:
                await fault.verify(swarm, ["node-1"])
            await fault.teardown(swarm)
            assert swarm.dead_nodes == set()
            assert swarm.restarts == ["node-1"]

    play(scene())


def test_a_drained_node_has_its_peers_leave_before_it_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("drain_node", who=["node-1"], notice_s=0.5)
            proof = await run(kind, swarm, ["node-1"])
            assert proof.ok
            assert swarm.drained == {"node-1": 0.5}
            assert {peer: seen["by"] for peer, seen in proof.what["peers"].items()} == {
                "peer-1": "itself",
                "peer-2": "itself",
            }
            assert sorted(swarm.expected) == ["peer-1", "peer-2"]
            assert swarm.dead_nodes == {"node-1"}
            await kind.heal(swarm, ["node-1"])
            assert len(swarm.living()) == 3

    play(scene())
