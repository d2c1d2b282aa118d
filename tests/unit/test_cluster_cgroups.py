"""Location of control groups, versions 1 and 2, from the files of the kernel."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from rayhive.cluster.node import cgroups, machine
from rayhive.errors import ClusterError


def proc(folder: Path, groups: str, mounts: str) -> Path:
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def test_version_1_is_found_whatever_it_is_mounted_with(tmp_path: Path) -> None:
    where = proc(
        tmp_path,
        "5:cpu,cpuacct:/peers/one\n4:memory:/\n0::/\n",
        "30 1 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "31 1 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
        "32 1 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n",
    )
    assert cgroups.own("cpu", where) == (1, Path("/sys/fs/cgroup/cpu,cpuacct/peers/one"))
    assert cgroups.own("memory", where) == (1, Path("/sys/fs/cgroup/memory"))


def test_a_container_sees_its_own_part_of_the_hierarchy(tmp_path: Path) -> None:
    where = proc(
        tmp_path,
        "5:cpu:/docker/abc/peers\n",
        "31 1 0:27 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n",
    )
    assert cgroups.own("cpu", where) == (1, Path("/sys/fs/cgroup/cpu/peers"))


def test_version_2_counts_only_with_the_controller(tmp_path: Path) -> None:
    group = tmp_path / "mount" / "user.slice"
    group.mkdir(parents=True)
    where = proc(
        tmp_path,
        "0::/user.slice\n",
        f"30 1 0:26 / {tmp_path}/mount rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
    )
    with pytest.raises(ClusterError, match="no control groups for cpu"):
        cgroups.own("cpu", where)
    (group / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    assert cgroups.own("cpu", where) == (2, group)


def test_a_kernel_without_quotas_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "own", lambda controller: (1, tmp_path))
    with pytest.raises(ClusterError, match="takes no CPU quota"):
        cgroups.CpuLimit("x", 0.5)
    assert list(tmp_path.iterdir()) == []


def test_version_2_goes_beside_a_group_that_shares_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "parent" / "home"
    home.mkdir(parents=True)
    made = []

    def write(folder: Path, name: str, text: str) -> None:
        """Take what the kernel's file would get."""
        made.append((folder.parent, name, text))

    monkeypatch.setattr(cgroups, "write", write)
    monkeypatch.setattr(cgroups, "own", lambda controller: (2, home))
    limit = cgroups.CpuLimit("x", 0.25)
    assert made == [(home.parent, "cpu.max", "12500 50000")]
    (limit.folder / "cpu.stat").write_text("nr_periods 8\nnr_throttled 3\nthrottled_usec 500000\n")
    assert limit.stat() == {"periods": 8, "throttled": 3, "throttled_s": 0.5}
    assert cgroups.made_here() == [limit.folder]
    (limit.folder / "cpu.stat").unlink()
    limit.release()
    limit.release()
    assert cgroups.made_here() == []

    (home / "cpu.max").write_text("20000 100000\n")
    with pytest.raises(ClusterError, match=r"0\.25 cores must be less than the 0\.2 of now"):
        cgroups.CpuLimit("x", 0.25)  # beside its home a process would get more than now
    assert cgroups.made_here() == []
    cgroups.CpuLimit("x", 0.1).release()

    (home / "cgroup.subtree_control").write_text("cpu memory\n")
    inside = cgroups.CpuLimit("x", 0.25)
    assert inside.folder.parent == home
    inside.release()


@pytest.mark.parametrize(
    ("type_", "shared_out", "takes"),
    [(None, "", True), ("domain", "", False), ("domain", "cpu memory", True)],
    ids=["root", "group of a container", "group without processes"],
)
def test_testbeds_need_a_group_whose_children_can_have_limits(
    type_: str | None, shared_out: str, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    control = tmp_path / "cgroup.subtree_control"
    control.write_text(shared_out)
    if type_ is not None:
        (tmp_path / "cgroup.type").write_text(type_)
    assert cgroups.home_of_testbeds() == (tmp_path if takes else None)
    if not takes:
        assert control.read_text() == shared_out  # nothing was changed


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        ({"": "250000 100000", "a": "max 100000", "a/b": "400000 100000"}, 2.5),
        ({"a": "50000 100000"}, 0.5),  # the process's own group does not have the controller
        ({"a/b": "max 100000"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_least_quota_of_a_group_and_its_ancestors_counts_in_version_2(
    limits: dict[str, str], least: float, tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    (mount / "a" / "b").mkdir(parents=True)
    where = proc(tmp_path, "0::/a/b\n", f"30 1 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    for folder, limit in limits.items():
        (mount / folder / "cpu.max").write_text(limit + "\n")
    (tmp_path / "cpu.max").write_text("1000 100000\n")  # above the mount
    assert cgroups.quota(where) == least


def test_the_quota_of_a_container_counts_in_version_1(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    (mount / "peers").mkdir(parents=True)
    where = proc(
        tmp_path,
        "5:cpu,cpuacct:/docker/abc/peers\n0::/\n",
        f"30 1 0:26 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
        f"31 1 0:27 /docker/abc {mount} ro - cgroup cgroup rw,cpu,cpuacct\n",
    )
    for folder, quota in ((mount, 150_000), (mount / "peers", -1)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroups.quota(where) == 1.5


def test_a_kernel_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cgroups.quota(tmp_path) == math.inf


@pytest.mark.parametrize(
    ("usable", "quota", "cores"),
    [(64, 2.0, 2), (64, 1.5, 2), (64, 0.2, 1), (4, 8.0, 4), (4, math.inf, 4)],
)
def test_cores_are_those_that_a_quota_leaves(
    usable: int, quota: float, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)))
    monkeypatch.setattr(cgroups, "quota", lambda: quota)
    assert machine.cores() == cores
