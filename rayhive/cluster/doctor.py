"""Command ``rayhive doctor``: checks of this machine, each with a fix."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from rayhive.cluster.node import capabilities, machine, process_group
from rayhive.cluster.node.processes import started
from rayhive.cluster.node.tools import small_disk
from rayhive.cluster.testbed import state
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


def doctor() -> list[Check]:
    """Return the results of all checks of this machine, which they leave unchanged."""
    checks: tuple[Callable[[], Check], ...] = (
        _python,
        _packages,
        _daemon,
        _shared_memory,
        _open_files,
        _ports,
        _temporary,
        _cores,
        _memory,
        _cuda,
        _namespaces,
        _control_groups,
        _traffic_control,
        _leftovers,
    )
    found = [*(check() for check in checks), *_faults()]
    return [replace(check, mend="") if check.ok else check for check in found]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= _MIN_PYTHON
    return Check("python", ok, version, "install Python 3.10 or newer")


def _packages() -> Check:
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
    fix = "pip install -c constraints.txt rayhive"
    return Check("packages", not wrong, "; ".join(wrong or found), fix)


def _daemon() -> Check:
    """Check that hivemind's peer-to-peer daemon runs on this machine."""
    mend = "pip install --force-reinstall hivemind (its wheel has the daemon inside)"
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        return Check("p2pd", False, "hivemind is not installed", mend)
    path = Path(spec.origin).parent / "hivemind_cli" / "p2pd"
    if not path.is_file():
        return Check("p2pd", False, f"{path} is missing", mend)
    try:
        done = subprocess.run([path, "-help"], capture_output=True, timeout=_COMMAND_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("p2pd", False, f"{path} does not run: {error}", mend)
    ok = b"-listen" in done.stdout + done.stderr
    return Check("p2pd", ok, str(path) if ok else f"{path} does not run", mend)


def _shared_memory() -> Check:
    usage = shutil.disk_usage(process_group.SHARED_MEMORY)
    ok = usage.free >= _MIN_SHARED_MEMORY
    mend = "mount /dev/shm larger (in a container: --shm-size=2g), or clear it"
    return Check("shared memory", ok, f"{_size(usage.free)} free of {_size(usage.total)}", mend)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = hard == resource.RLIM_INFINITY or hard >= _MIN_OPEN_FILES
    return Check("open files", ok, f"{soft} (hard {hard})", "ulimit -n 8192")


def _ports() -> Check:
    """Check that a process can listen on the loopback interface and be reached there."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            socket.create_connection(address, 2.0).close()
    except OSError as error:
        return Check("ports", False, str(error), "allow local connections on 127.0.0.1")
    return Check("ports", True, "127.0.0.1 can be listened on and reached")


def _temporary() -> Check:
    base = Path(machine.short_temporary_directory())
    free = shutil.disk_usage(base).free
    asked = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    detail = f"{base}, {_size(free)} free"
    if str(base) != asked:
        detail += f" ({asked} makes paths of unix sockets too long)"
    return Check("temporary files", free > 2**30, detail, f"make room in {base}")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    mend = "peers share the one core: measured times are not reliable"
    return Check("cores", cores >= _MIN_CORES, str(cores), mend, needed=False)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    ok = memory.available >= _MIN_MEMORY
    detail = f"{_size(memory.available)} available of {_size(memory.total)}"
    return Check("memory", ok, detail, "end other programs, or use fewer peers", needed=False)


def _cuda() -> Check:
    names = machine.gpu_names()
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not names and not nodes:
        return Check("cuda", True, "no device: peers train on the CPU", needed=False)
    readable = all(os.access(f"/dev/{node}", os.R_OK | os.W_OK) for node in nodes)
    mend = "let this user open /dev/nvidia*"
    return Check("cuda", readable, ", ".join(names or nodes), mend, needed=False)


_PROCESS_FAULTS = "run as root (or with CAP_SYS_ADMIN); faults on processes work without"


def _namespaces() -> Check:
    ok, detail = _try("true")
    return Check("network namespaces", ok, detail, _PROCESS_FAULTS, needed=False)


def _control_groups() -> Check:
    root = Path("/sys/fs/cgroup")
    second = (root / "cgroup.controllers").exists()
    folder = root if second else root / "cpu"
    ok = folder.is_dir() and os.access(folder, os.W_OK)
    detail = f"version {2 if second else 1}, {'writable' if ok else 'not writable'}"
    mend = f"give this user a writable group below {folder}"
    return Check("cgroups", ok, detail, mend, needed=False)


def _traffic_control() -> Check:
    """Try netem in a temporary network namespace."""
    if shutil.which("tc") is None:
        return Check("link shaping", False, "tc is missing", "install iproute2", needed=False)
    rate, why = _try("tc qdisc add dev lo root tbf rate 1mbit burst 4k latency 9ms")
    delay, _ = _try("tc qdisc add dev lo root netem delay 1ms")
    if not rate:
        return Check("link shaping", False, why, _PROCESS_FAULTS, needed=False)
    if not delay:
        text = "rates can be shaped; the kernel has no netem"
        return Check("link shaping", False, text, "modprobe sch_netem", needed=False)
    return Check("link shaping", True, "rate, delay and loss", needed=False)


def _faults() -> Iterator[Check]:
    """Check each capability that faults need."""
    for name, reason in capabilities.here().items():
        verb = "can" if reason is None else "can't"
        detail = f"{verb} {CAPABILITIES[name]}"
        yield Check(f"faults: {name}", reason is None, detail, reason or "", needed=False)


def _leftovers() -> Check:
    """Check for remains of dead runs: mounts and files of rayhive, hivemind and torch."""
    base = Path(machine.short_temporary_directory())
    used = {directory for directory, _ in process_group.owned(base)}
    used |= {made.folder for made in state.testbeds() if not made.abandoned}
    found = [
        f"mount {mount.point} (umount {mount.point})"
        for mount in process_group.mounts()
        if mount.source == small_disk.SOURCE and not used & set(mount.point.parents)
    ]
    found += [str(path) for path in process_group.orphaned(base)]
    for process in psutil.process_iter(["name", "ppid", "pid", "uids"]):
        info = process.info
        if info["name"] == "p2pd" and info["ppid"] == 1 and info["uids"].real == os.getuid():
            found.append(f"process {info['pid']} (p2pd)")
    bound = set(Path("/proc/net/unix").read_text(encoding="utf-8").split())
    found += [str(path) for path in Path("/tmp").glob("hivemind-*.sock") if str(path) not in bound]
    for path in process_group.shared_memory():
        pid = process_group.creator_of(path)
        if pid is not None and started(pid) is None:
            found.append(str(path))
    if not found:
        return Check("leftovers", True, "none")
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    mend = "the next run on this machine removes those of rayhive; remove the other ones by hand"
    return Check("leftovers", False, ", ".join(found[:5]) + more, mend, needed=False)


def _try(shell_command: str) -> tuple[bool, str]:
    """Run a command in a temporary network namespace; return success and the last error line."""
    command = ["unshare", "--net", "sh", "-c", shell_command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    text = done.stderr.strip().splitlines()
    return done.returncode == 0, text[-1] if text else "yes"


def _size(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"
