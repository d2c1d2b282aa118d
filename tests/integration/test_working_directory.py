"""Peers work in the study's directory, wherever their node starts processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayhive.spec import WorkloadConfig
from tests.integration.forkserver_harness import digits_peers, finish_swarm, forkserver, start_swarm

WORKLOAD = """
from pathlib import Path

from rayhive.workloads.digits import Digits


class Prepared(Digits):
    def __init__(self, **args):
        super().__init__(width=int(Path("data/width.txt").read_text()))

    def module(self, seed):
        module = super().module(seed)

        def prepare_data():
            count = Path("data/prepared.txt")
            before = count.read_text() if count.exists() else ""
            for _ in range(1000):  # two at a time would lose each other's lines
                count.write_text(before + "prepared\\n")

        module.prepare_data = prepare_data
        return module
"""


@pytest.mark.swarm
@pytest.mark.slow
def test_relative_paths_mean_the_same_on_every_peer(tmp_path: Path) -> None:
    (tmp_path / "prepared_digits.py").write_text(WORKLOAD)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "width.txt").write_text("8")
    specs = [
        spec.model_copy(
            update={
                "workload": WorkloadConfig(import_path="prepared_digits:Prepared"),
                "directory": str(tmp_path),
            }
        )
        for spec in digits_peers(
            "directory",
            3,
            swarm={"target_batch_size": 96, "batch_size": 32},
            configuration={},
            evaluate_every=96,
            seconds=60,
            samples=192,
        )
    ]
    assert os.getcwd() != str(tmp_path)
    with forkserver() as path:
        lines = start_swarm(path, specs, tmp_path)
        finish_swarm(lines)
    for line in lines:
        assert line.of("peer_finished")[0]["reason"] == "rounds", lines[0].story()
    assert (tmp_path / "data" / "prepared.txt").read_text() == 3 * "prepared\n"
