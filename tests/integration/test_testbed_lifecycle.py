"""A testbed leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from rayhive.cli import main
from rayhive.cluster.node import cgroups, process_group
from rayhive.cluster.node.processes import start_reaper
from rayhive.cluster.node.tools.small_disk import SmallDisk
from rayhive.cluster.testbed import Testbed, lifecycle, namespaces, raylets, state
from rayhive.errors import ClusterError, ConfigError
from tests.integration.testbed_helpers import bare, busy, config, needs_testbed, remains

ROOT = Path(__file__).resolve().parents[2]
DELAYED = {"rate_mbit": 20.0, "delay_ms": 5.0}


@needs_testbed
def test_nothing_is_left() -> None:
    with bare(DELAYED, {}) as made:
        number = made.state.number
        child = busy(made.nodes[0].namespace)
        assert len(remains(number)) > 5
    assert remains(number) == []
    assert child.wait() == -signal.SIGKILL
    lifecycle.down(number)  # once more, for nothing


@needs_testbed
def test_it_ends_with_its_process() -> None:
    code = """
        import signal
        from tests.integration.testbed_helpers import DELAYED_CONFIG, Testbed
        with Testbed(DELAYED_CONFIG, ray=False) as made:
            print(made.state.number, made.reaper, flush=True)
            signal.pause()
    """
    code = code.replace("DELAYED_CONFIG, Testbed", "config, Testbed")
    code = code.replace("DELAYED_CONFIG", f"config({DELAYED!r})")
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number, reaper = map(int, process.stdout.readline().split())
        assert remains(number)
        process.kill()
    psutil.wait_procs([psutil.Process(reaper)], timeout=30)
    assert remains(number) == []


@needs_testbed
def test_one_whose_owner_is_gone_is_removed_by_the_next() -> None:
    made = lifecycle.up(config({}, name=f"gone-{os.getpid()}"), owner=(os.getpid(), 1), ray=False)
    with bare({}) as other:
        assert made.name not in [each.name for each in state.testbeds()]
        assert other.state.number == made.number or remains(made.number) == []


@needs_testbed
def test_a_testbed_without_its_folder_is_removed_by_the_next_one() -> None:
    made = lifecycle.up(config({}), ray=False)
    shutil.rmtree(made.folder)
    assert made.number in state.numbers()
    assert made.number in lifecycle.clear_abandoned()
    assert remains(made.number) == []


@needs_testbed
def test_one_that_is_being_made_is_left_alone() -> None:
    number = state.claim()
    try:
        assert number not in lifecycle.clear_abandoned()
        assert state.folder_of(number).is_dir()
        hour_ago = time.time() - 3600
        os.utime(state.folder_of(number), (hour_ago, hour_ago))
        assert number in lifecycle.clear_abandoned()
    finally:
        lifecycle.down(number)


@needs_testbed
def test_a_failed_creation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state.numbers()

    def broken(*given: object) -> None:
        raise ClusterError("planted")

    monkeypatch.setattr(lifecycle, "limit_cpu", broken)
    with pytest.raises(ClusterError, match="planted"):
        lifecycle.up(config(DELAYED), ray=False)
    assert state.numbers() == before
    number = next(n for n in range(200) if n not in before)
    assert remains(number) == []


@needs_testbed
def test_a_failed_testbed_leaves_no_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook it would wait until the notebook ends."""
    started: list[int | None] = []
    testbed = Testbed(config(DELAYED), ray=False)

    def broken(*given: object) -> None:
        started.append(testbed.reaper)
        raise ClusterError("planted")

    monkeypatch.setattr(lifecycle, "limit_cpu", broken)
    with pytest.raises(ClusterError, match="planted"):
        testbed.__enter__()
    (reaper,) = started
    assert reaper is not None and not psutil.pid_exists(reaper)


@needs_testbed
def test_a_reaper_spares_a_testbed_of_another_process() -> None:
    """One that got the number of a testbed that has ended before its process."""
    made = lifecycle.up(config({}), ray=False)
    try:
        with start_reaper(lifecycle.__name__, made.number, os.getpid(), 1) as reaper:
            assert reaper.stdin is not None
            reaper.stdin.close()
            assert reaper.wait(60.0) == 0
        assert made.number in state.numbers() and remains(made.number)
    finally:
        lifecycle.down(made.number)


@needs_testbed
def test_a_node_is_killed_with_all_that_is_on_it() -> None:
    with bare(DELAYED, DELAYED) as made:
        first, second = (busy(node.namespace) for node in made.nodes)
        assert made.kill_node(0) == [first.pid]
        assert first.wait() == -signal.SIGKILL
        assert second.poll() is None
        assert made.link(0).relays() == []
        if not made.state.netem:
            assert made.link(1).relays()
        with pytest.raises(ClusterError, match="runs"):
            made.start_node(1)
        with pytest.raises(ClusterError, match="nodes 0 to 1"):
            made.kill_node(2)


@needs_testbed
def test_names_are_unique() -> None:
    with bare({}) as made, pytest.raises(ConfigError, match=made.state.name):
        lifecycle.up(config({}), ray=False)


@needs_testbed
def test_a_share_of_a_core_is_all_that_a_node_gets() -> None:
    home = cgroups.home_of_testbeds()
    if home is None:
        pytest.skip("no control group that may be written")
    folder = home / f"rhtest-{os.getpid()}"
    folder.mkdir()
    try:
        cgroups.limit(folder, 0.2, period_us=100_000)
        burn = "import time\nwhile time.process_time() < 0.3: pass"
        join = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs")]
        subprocess.run([*join, sys.executable, "-c", burn], check=True)
        counts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        assert int(counts["nr_throttled"]) > 0
        cgroups.limit(folder, None, period_us=100_000)
        before = (folder / "cpu.stat").read_text()
        subprocess.run([*join, sys.executable, "-c", burn], check=True)
        after = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        assert f"nr_throttled {after['nr_throttled']}" in before
    finally:
        cgroups.remove(folder)
    assert not folder.exists()


@needs_testbed
def test_commands_show_and_remove(capsys: pytest.CaptureFixture[str]) -> None:
    made = lifecycle.up(config(DELAYED), ray=False)
    try:
        assert main(["testbed", "status", made.name]) == 0
        assert made.nodes[0].data_address in capsys.readouterr().out
        assert main(["testbed", "status", made.name, "--format", "json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["rate_mbit"] == pytest.approx(row["rate_mbit_asked"], rel=0.1)
        assert row["rtt_ms"] == pytest.approx(row["rtt_ms_asked"], rel=0.1)
        assert (row["rate_mbit_asked"], row["rtt_ms_asked"]) == (20, 10)
        assert row["loss"] == row["loss_asked"] == 0
        assert main(["testbed", "down", "no-such"]) == 2
        assert made.name in capsys.readouterr().err
        assert main(["testbed", "down", made.name]) == 0
        assert remains(made.number) == []
    finally:
        lifecycle.down(made.number)


@needs_testbed
def test_mounts_of_an_agent_end_with_the_testbed(capsys: pytest.CaptureFixture[str]) -> None:
    made = lifecycle.up(config({}), ray=False)
    agent = made.folder / f"{process_group.DIRECTORY_PREFIX}a-killed"
    agent.mkdir()
    (agent / process_group.OWNER_FILE).write_text(f"{os.getpid()} 1")
    disks = [SmallDisk(folder / "checkpoints", 2**20) for folder in (agent, made.folder)]
    try:
        assert main(["testbed", "down", made.name]) == 0
        assert process_group.mounts_below(made.folder) == []
        assert remains(made.number) == [] and not made.folder.exists()
    finally:
        for disk in disks:
            disk.release()
        lifecycle.down(made.number)


SLOW_ONCE = """
import pathlib, sys
folder = pathlib.Path([a for a in sys.argv if a.startswith("--temp-dir=")][0].split("=")[1])
tries = len(list(folder.glob("start-*.log")))
print(f"try {tries}")
sys.exit(0 if tries > LAST_FAILURE and folder.name == "0" else 1)
"""


@needs_testbed
def test_a_raylet_that_did_not_start_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "start.py"
    monkeypatch.setattr(raylets.entrypoint, "__file__", str(script))
    with bare({}, {}) as made:
        script.write_text(SLOW_ONCE.replace("LAST_FAILURE", "1"))
        raylets.start_nodes(made.state, made.nodes[:1])
        with pytest.raises(ClusterError) as raised:
            raylets.start_nodes(made.state, made.nodes[1:])
        told = str(raised.value)
        assert "the raylet of 1 did not start, tried twice" in told
        assert told.index("try 1") < told.index("try 2")


def test_commands_without_a_testbed_say_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state, "testbeds", lambda: iter(()))
    assert main(["testbed", "status"]) == 2
    told = capsys.readouterr().err
    assert "this machine has none. To make one: rayhive testbed up FILE" in told


def test_without_the_privilege_the_remaining_faults_are_listed() -> None:
    code = """
        import os
        import encodings.ascii
        import rayhive.faults
        from rayhive.cluster.testbed import privilege
        from rayhive.registry import FAULTS
        list(FAULTS.items())  # another user may not be able to read the modules
        if os.geteuid() == 0:
            os.setuid(65534)
        privilege.require()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    start = "rayhive.errors.ClusterError: no testbed on this machine"
    (told,) = [line for line in done.stderr.splitlines() if line.startswith(start)]
    assert "CAP_NET_ADMIN" in told and "run it as root" in told
    assert "those that need one: delay" in told and "partition" in told


def test_namespaces_that_are_not_there_are_no_error() -> None:
    assert namespaces.named("rht-none") == []
    assert namespaces.processes(["rht-none"]) == []
    namespaces.remove("rht-none")


def test_a_testbed_that_is_not_up_has_no_address() -> None:
    with pytest.raises(ClusterError, match="not up"):
        _ = Testbed(config({})).address
