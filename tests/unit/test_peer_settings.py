"""Arguments of a peer's strategy, from its spec."""

from __future__ import annotations

from typing import Any

import torch

from rayhive.peer.from_spec import payload_fields, strategy_arguments
from rayhive.spec import Configuration, SwarmConfig, WorkloadConfig
from rayhive.spec.replicate import PeerSpec


def bandwidth_of(peer: int, classes: dict[str, Any] | None) -> float | None:
    swarm = SwarmConfig.model_validate({"peers": 3, "node_classes": classes})
    spec = PeerSpec(
        run_id="run",
        peer=peer,
        peers=3,
        workload=WorkloadConfig(name="digits"),
        swarm=swarm,
        configuration=Configuration(),
    )
    options = strategy_arguments(spec, 32).get("averager_opts", {})
    return dict(options).get("bandwidth")


def test_reducers_are_weighed_by_the_rate_of_their_node_class() -> None:
    classes = {
        "fast": {"count": 1, "link": {"rate_mbit": 100}},
        "near": {"count": 1, "link": {"delay_ms": 2}},
        "slow": {"count": 1, "link": {"rate_mbit": 20}},
    }
    # An unlimited link counts as the fastest, and a peer that joins as the last of the other peers.
    assert [bandwidth_of(peer, classes) for peer in range(4)] == [100, 100, 20, 20]


def test_without_rates_all_reducers_weigh_the_same() -> None:
    assert bandwidth_of(0, None) is None
    assert bandwidth_of(1, {"any": {"count": 3, "cpu_share": 0.5}}) is None


def test_every_fragment_counts_all_extra_tensors_without_compression() -> None:
    configuration = Configuration(local_steps=2, fragments=4, codec="none")
    spec = PeerSpec(
        run_id="run",
        peer=0,
        peers=2,
        workload=WorkloadConfig(name="digits"),
        swarm=SwarmConfig(),
        configuration=configuration,
    )
    parameters = [torch.nn.Parameter(torch.zeros(25)) for _ in range(4)]
    fields = payload_fields(spec, parameters, [(50,)])
    assert fields["dense_payload_bytes"] == 4 * (25 + 50)
    assert fields["predicted_payload_bytes_per_round"] == fields["dense_payload_bytes"]
