"""Command ``rayhive doctor``: checks of this machine, each with a fix."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import psutil
from packaging.requirements import Requirement
from pyroute2.netlink.exceptions import NetlinkError

from rayhive.cluster.node import capabilities, cgroups, machine, process_group
from rayhive.cluster.node.notice_watch import found_sources
from rayhive.cluster.node.processes import started
from rayhive.cluster.node.tools import small_disk
from rayhive.cluster.testbed import privilege, state, veth
from rayhive.faults.target import CAPABILITIES

_MIN_PYTHON = (3, 10)
_MIN_SHARED_MEMORY = 512 * 2**20
_MIN_OPEN_FILES = 4096
_MIN_CORES = 2
_MIN_MEMORY = 4 * 2**30
_COMMAND_TIMEOUT = 10.0


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: Name of the check.
        ok: Whether it passed.
        detail: Observed value.
        mend: How to fix it; empty if it passed.
        needed: Whether rayhive cannot work without it; otherwise some features are missing.
    """

    name: str
    ok: bool
    detail: str
    mend: str = ""
    needed: bool = True


#: Result of a check: whether it passed, the observed value, and the fix where it depends on both.
Found: TypeAlias = tuple[bool, str] | tuple[bool, str, str]
#: Every check, in the order of its row.
_CHECKS: list[Callable[[], Check]] = []


def _check(name: str, mend: str, needed: bool = True) -> Callable[[Callable[[], Found]], None]:
    """Return a decorator that adds a check; the arguments are the fields of :class:`Check`."""

    def add(run: Callable[[], Found]) -> None:
        def check() -> Check:
            ok, detail, *own = run()
            return Check(name, ok, detail, "" if ok else "".join(own) or mend, needed)

        _CHECKS.append(check)

    return add


def doctor() -> list[Check]:
    """Return the results of all checks of this machine, which they leave unchanged."""
    return [*(check() for check in _CHECKS), *_faults()]


@_check("python", "install Python 3.10 or newer")
def _python() -> Found:
    return sys.version_info >= _MIN_PYTHON, ".".join(map(str, sys.version_info[:3]))


@_check("packages", "pip install -c constraints.txt rayhive")
def _packages() -> Found:
    """Compare the installed packages with the unconditional requirements of rayhive."""
    try:
        lines = metadata.requires("rayhive") or []
    except metadata.PackageNotFoundError:
        lines = [name for name in machine.PACKAGES if name != "rayhive"]
    wrong, found = [], []
    for required in map(Requirement, lines):
        if required.marker is not None:
            continue
        try:
            version = metadata.version(required.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{required.name} is missing")
            continue
        if required.name in machine.PACKAGES:
            found.append(f"{required.name} {version}")
        wrong += [
            f"{required.name} {version} is not {bound}"
            for bound in required.specifier
            if not bound.contains(version, prereleases=True)
        ]
    return not wrong, "; ".join(wrong or found)


@_check("p2pd", "pip install --force-reinstall hivemind (its wheel has the daemon inside)")
def _daemon() -> Found:
    """Check that hivemind's peer-to-peer daemon runs on this machine."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        return False, "hivemind is not installed"
    path = Path(spec.origin).parent / "hivemind_cli" / "p2pd"
    if not path.is_file():
        return False, f"{path} is missing"
    try:
        done = subprocess.run([path, "-help"], capture_output=True, timeout=_COMMAND_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{path} does not run: {error}"
    ok = b"-listen" in done.stdout + done.stderr
    return ok, str(path) if ok else f"{path} does not run"


@_check("shared memory", "mount /dev/shm larger (in a container: --shm-size=2g), or clear it")
def _shared_memory() -> Found:
    usage = shutil.disk_usage(process_group.SHARED_MEMORY)
    detail = f"{_size(usage.free)} free of {_size(usage.total)}"
    return usage.free >= _MIN_SHARED_MEMORY, detail


@_check("open files", "ulimit -n 8192")
def _open_files() -> Found:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard == resource.RLIM_INFINITY or hard >= _MIN_OPEN_FILES, f"{soft} (hard {hard})"


@_check("ports", "allow local connections on 127.0.0.1")
def _ports() -> Found:
    """Check that a process can listen on the loopback interface and be reached there."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            socket.create_connection(address, 2.0).close()
    except OSError as error:
        return False, str(error)
    return True, "127.0.0.1 can be listened on and reached"


@_check("temporary files", "make room")
def _temporary() -> Found:
    base = Path(machine.short_temporary_directory())
    free = shutil.disk_usage(base).free
    asked = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    detail = f"{base}, {_size(free)} free"
    if str(base) != asked:
        detail += f" ({asked} makes paths of unix sockets too long)"
    return free > 2**30, detail, f"make room in {base}"


@_check("cores", "peers share the one core: measured times are not reliable", needed=False)
def _cores() -> Found:
    cores = machine.cores()
    return cores >= _MIN_CORES, str(cores)


@_check("memory", "end other programs, or use fewer peers", needed=False)
def _memory() -> Found:
    memory = psutil.virtual_memory()
    detail = f"{_size(memory.available)} available of {_size(memory.total)}"
    return memory.available >= _MIN_MEMORY, detail


@_check("cuda", "let this user open /dev/nvidia*", needed=False)
def _cuda() -> Found:
    names = machine.gpu_names()
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not names and not nodes:
        return True, "no device: peers train on the CPU"
    readable = all(os.access(f"/dev/{node}", os.R_OK | os.W_OK) for node in nodes)
    return readable, ", ".join(names or nodes)


_PROCESS_FAULTS = "run as root (or with CAP_SYS_ADMIN); faults on processes work without"


@_check("network namespaces", _PROCESS_FAULTS, needed=False)
def _namespaces() -> Found:
    try:
        privilege.in_new_namespace(lambda: None)
    except OSError as error:
        return False, str(error)
    return True, "yes"


@_check("cgroups", "give this user a writable group", needed=False)
def _control_groups() -> Found:
    root = Path("/sys/fs/cgroup")
    second = (root / "cgroup.controllers").exists()
    folder = root if second else root / "cpu"
    ok = folder.is_dir() and os.access(folder, os.W_OK)
    detail = "writable" if ok else "not writable"
    if ok and second and not cgroups.may_limit_children(folder):
        ok, detail = False, "writable, but with processes beside which groups can have no limits"
    version = 2 if second else 1
    return ok, f"version {version}, {detail}", f"give this user a writable group below {folder}"


@_check("link shaping", _PROCESS_FAULTS, needed=False)
def _traffic_control() -> Found:
    """Try netem in a temporary network namespace."""
    try:
        netem = privilege.in_new_namespace(veth.kernel_delays)
    except (OSError, NetlinkError) as error:
        return False, str(error)
    if not netem:
        return False, "rates can be shaped; the kernel has no netem", "modprobe sch_netem"
    return True, "rate, delay and loss"


_METADATA = (
    "let processes of this machine reach the metadata service (in a container on AWS: a hop limit "
    "of 2); without it, peers learn of a preemption by SIGTERM at the earliest"
)


@_check("preemption notices", _METADATA, needed=False)
def _notices() -> Found:
    """Ask the metadata service of the cloud that the firmware names."""
    found = asyncio.run(found_sources())
    texts = [f"{each.name}: {each.error or each.answer}" for each in found]
    ok = all(each.error is None for each in found)
    return ok, "; ".join(texts) or "no cloud: on a cluster, the drain of a node by Ray"


def _faults() -> Iterator[Check]:
    """Check each capability that faults need."""
    for name, reason in capabilities.here().items():
        verb = "can" if reason is None else "can't"
        detail = f"{verb} {CAPABILITIES[name]}"
        yield Check(f"faults: {name}", reason is None, detail, reason or "", needed=False)


@_check(
    "leftovers",
    "the next run on this machine removes those of rayhive; remove the other ones by hand",
    needed=False,
)
def _leftovers() -> Found:
    """Check for remains of dead runs: mounts and files of rayhive, hivemind and torch."""
    base = Path(machine.short_temporary_directory())
    used = {directory for directory, _ in process_group.owned(base)}
    used |= {made.folder for made in state.testbeds() if not made.abandoned}
    found = [
        f"mount {mount.mountpoint} (umount {mount.mountpoint})"
        for mount in psutil.disk_partitions(all=True)
        if mount.device == small_disk.SOURCE and not used & set(Path(mount.mountpoint).parents)
    ]
    found += [str(path) for path in process_group.orphaned(base)]
    for process in psutil.process_iter(["name", "ppid", "pid", "uids"]):
        info = process.info
        if info["name"] == "p2pd" and info["ppid"] == 1 and info["uids"].real == os.getuid():
            found.append(f"process {info['pid']} (p2pd)")
    bound = set(Path("/proc/net/unix").read_text(encoding="utf-8").split())
    found += [str(path) for path in Path("/tmp").glob("hivemind-*.sock") if str(path) not in bound]
    made = process_group.shared_memory()
    found += [str(path) for path, creator in made.items() if started(creator) is None]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return not found, ", ".join(found[:5]) + more or "none"


def _size(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"
