"""One real peer whose rounds fail, run as a script: prints what was applied, as JSON.

The swarm claims a second peer that never comes, so matchmaking runs into its timeout.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import hivemind
import torch

from rayhive.checks import DELAY_FLAGS
from rayhive.peer.optimizer import RayhiveOptimizer

BATCH, BATCHES = 4, 3


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Do two rounds of ``BATCHES`` batches; return the weights after each and the events."""
    torch.set_num_threads(1)
    dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    events: list[tuple[str, dict[str, Any]]] = []
    flags = dict(DELAY_FLAGS[settings["delay"]])
    offloaded = flags.get("offload_optimizer", False)
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="failing",
        target_batch_size=BATCH * BATCHES,
        batch_size_per_step=BATCH,
        params=[parameter] if offloaded else None,
        optimizer=(lambda groups: torch.optim.SGD(groups, lr=1.0))
        if offloaded
        else torch.optim.SGD([parameter], lr=1.0),
        matchmaking_time=0.5,
        averaging_timeout=1.0,
        on_event=lambda kind, fields: events.append((kind, fields)),
        on_failure=settings["on_failure"],
        **{"delay_state_averaging": False, **flags},
    )
    if settings["company"]:
        optimizer.tracker._parse_swarm_progress_data = _claim_company(optimizer.tracker)
        optimizer.tracker.global_progress.num_peers = 2
    weights = []
    for round_ in range(2):
        for batch in range(BATCHES):
            parameter.grad = torch.full_like(parameter, float(10 * round_ + batch))
            optimizer.step()
        optimizer.state_averager.step(wait_for_delayed_updates=True)
        weights.append(float(parameter.detach()[0, 0]))
        assert parameter.detach().unique().numel() == 1
    optimizer.shutdown()
    dht.shutdown()
    return {
        "weights": weights,
        "outcomes": [fields["outcome"] for kind, fields in events if kind == "round"],
        "samples": [fields["samples"] for kind, fields in events if kind == "round"],
        "choices": [fields["choice"] for kind, fields in events if kind == "fallback"],
    }


def _claim_company(tracker: Any) -> Any:
    parse = tracker._parse_swarm_progress_data

    def parse_and_claim(metadata: Any) -> Any:
        progress = parse(metadata)
        progress.num_peers = 2
        return progress

    return parse_and_claim


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
