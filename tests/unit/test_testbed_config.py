"""Reading and checking of a testbed's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.cluster.testbed import TestbedConfig, TestbedNodes, load_testbed, raylets, state
from rayhive.errors import ConfigError
from rayhive.spec import Link, SwarmConfig

ROOT = Path(__file__).resolve().parents[2]


def problems(tmp_path: Path, text: str) -> str:
    file = tmp_path / "testbed.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_testbed(file)
    return str(raised.value)


def test_the_example_is_valid() -> None:
    config = load_testbed(ROOT / "experiments" / "testbed.yaml")
    assert [name for name, _ in config.nodes] == ["fast", "fast", "fast", "slow"]


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = """
name: "no spaces"
mtu: 100
nods: 3
node_classes:
  a: {count: 0, link: {rate_mbits: 3, loss: 1.0}}
  b: {cpu_share: none}
"""
    found = problems(tmp_path, text)
    for key in (
        "name",
        "mtu",
        "nods",
        "a.count",
        "a.link.rate_mbits",
        "a.link.loss",
        "b.cpu_share",
    ):
        assert key in found
    assert "did you mean 'rate_mbit'?" in found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node_classes: {}", "node_classes"),
        ("name: a", "node_classes: None is not valid: required"),
        ("- a", "mapping"),
        ("a: [", "valid YAML"),
        ("node_classes: {a: {count: 65}}", "at most 64 nodes"),
        ("node_classes: {a: {labels: {rayhive.io/data-address: x}}}", "does not set"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in problems(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable"):
        load_testbed(tmp_path / "none.yaml")


def test_a_swarm_gets_a_node_for_each_peer() -> None:
    config = TestbedConfig.of_swarm(SwarmConfig(peers=3, threads_per_peer=2), spare=1)
    assert config.nodes == [("node", TestbedNodes(count=4, num_cpus=2))] * 4


def test_a_swarm_of_classes_gets_their_links() -> None:
    swarm = SwarmConfig.model_validate(
        {
            "peers": 3,
            "threads_per_peer": 2,
            "node_classes": {
                "fast": {"count": 2, "link": {"rate_mbit": 100}},
                "slow": {"count": 1, "cpu_share": 0.4, "labels": {"k": "v"}},
            },
        }
    )
    nodes = TestbedConfig.of_swarm(swarm, name="n", spare=1).nodes
    assert [name for name, _ in nodes] == ["fast", "fast", "slow", "slow"]
    assert nodes[0][1].link == Link(rate_mbit=100) and nodes[0][1].cpu_share == 2.0
    assert nodes[3][1].cpu_share == 0.8 and nodes[3][1].labels == {"k": "v"}


def test_nodes_do_not_wait_for_a_name_server_that_they_cannot_reach() -> None:
    def resolver(place: str, **given: str) -> str | None:
        made = state.TestbedState(number=7, name="n", mtu=9000, nodes=(), environment=given)
        return raylets.variables(made, place).get("RES_OPTIONS")

    assert resolver("0") == "timeout:1 attempts:1"
    assert resolver("0", RES_OPTIONS="timeout:3") == "timeout:3"
    assert resolver(raylets.HEAD) is None
