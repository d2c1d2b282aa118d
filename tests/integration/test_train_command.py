"""``rayhive train``: peers that are started by hand find each other, and end in order."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.fixtures.network import needs_ipv6
from tests.integration.swarm_helpers import call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

STUDY = """
name: by.hand
workload: {name: digits}
swarm: {target_batch_size: 128, matchmaking_time: 1.5, averaging_timeout: 4}
space: {codec: float16}
budget: {samples_per_replicate: 2048, seconds_per_replicate: 60}
evaluation: {every_samples: 1024}
"""


def train(path: str, overrides: list[str], host: str = "127.0.0.1") -> None:
    from rayhive.peer import train as module

    module.LINE_EVERY_S = 0.0
    module.train_file(path, overrides=overrides, host=host)


@pytest.fixture
def study(tmp_path: Path) -> str:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_peers_by_hand_train_together(study: str, host: str) -> None:
    endless = "budget.samples_per_replicate=null"
    for_ever = [endless, "budget.seconds_per_replicate=600"]
    first = call(train, path=study, overrides=for_ever, host=host)
    invitation = first.invitation()
    first.wait_for_line("round 2: loss")
    for_a_while = [endless, "budget.seconds_per_replicate=4"]
    second = call(train, env=invitation, path=study, overrides=for_a_while, host=host)
    assert second.result() is None
    first.signal(signal.SIGINT)
    assert first.result() is None
    for child in (first, second):
        log, last = child.log(), child.end_of_log()
        rounds = [int(number) for number in re.findall(r"^round (\d+): loss", log, re.M)]
        assert rounds == sorted(rounds), last
        assert re.search(r"^round \d+: loss [\d.]+, \d+ samples/s here, 2 peers$", log, re.M), last
        assert re.search(r"^round \d+: held out: loss [\d.]+, accuracy 0\.\d+$", log, re.M), last
        assert re.search(r"^ended in round \d+: ", log, re.M), last
    log = second.log()
    assert int(re.findall(r"^round (\d+): loss", log, re.M)[0]) > 2  # it went on from the first
    assert "INITIAL_PEERS=" not in log  # only the first has to tell


def test_an_interrupt_ends_a_peer_in_order(study: str) -> None:
    child = call(train, path=study, overrides=["budget.samples_per_replicate=null"])
    child.wait_for_line("round 2: loss")
    child.signal(signal.SIGINT, group=True)
    assert child.exit_code(20) == 0, child.end_of_log()
    assert "stopping after this batch" in child.log()
    assert re.search(r"^ended in round \d+: interrupted$", child.log(), re.M), child.end_of_log()


def test_a_target_ends_a_peer(study: str) -> None:
    overrides = [
        "workload.args.target=0.3",
        "budget.stop_at_target=true",
        "objectives={time_to_target_s: minimize}",
    ]
    child = call(train, path=study, overrides=overrides)
    assert child.result() is None
    assert "the target is reached" in child.log()
