"""One real peer whose rounds fail, run as a script: prints what was applied, as JSON.

In company, a second peer says that it has come to the rounds and cannot be met there, so
matchmaking runs into its timeout. One that said that it computed would be waited for.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import hivemind
import torch

from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.optim.optimizer import RayhiveOptimizer
from rayhive.spec.axes.delay import DELAY_FLAGS

#: Samples of a round's batches: unequal ones.
BATCHES = (5, 1, 6)


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Do two rounds of ``BATCHES``; return the weights after each and the events."""
    torch.set_num_threads(1)
    dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    events: list[tuple[str, dict[str, Any]]] = []
    flags = dict(DELAY_FLAGS[settings["delay"]])
    offloaded = flags.get("offload_optimizer", False)
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="failing",
        target_batch_size=sum(BATCHES),
        reuse_grad_buffers=settings["reuse"],
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
    company = _idle_peer(dht) if settings["company"] else None
    if company is not None:
        assert optimizer.tracker.wait_for_peers(2, 20)
    weights = []
    for round_ in range(2):
        for number, batch_size in enumerate(BATCHES):
            gradient = torch.full_like(parameter, float(10 * round_ + number))
            optimizer.grad_averager.expect_batch(batch_size)
            if settings["reuse"]:
                parameter.grad += gradient
            else:
                parameter.grad = gradient
            optimizer.step(batch_size=batch_size)
        optimizer.state_averager.step(wait_for_delayed_updates=True)
        while optimizer.state_averager.pending_updates:  # one wait is as long as an all-reduce
            optimizer.state_averager.step(wait_for_delayed_updates=True)
        weights.append(float(parameter.detach()[0, 0]))
        assert parameter.detach().unique().numel() == 1
    optimizer.shutdown()
    if company is not None:
        company.shutdown(5)
        company.dht.shutdown()
    dht.shutdown()
    return {
        "weights": weights,
        "outcomes": [fields["outcome"] for kind, fields in events if kind == "round"],
        "samples": [fields["samples"] for kind, fields in events if kind == "round"],
        "choices": [fields["choice"] for kind, fields in events if kind == "fallback"],
    }


def _idle_peer(dht: hivemind.DHT) -> LiveProgressTracker:
    """Return a peer of the run that says that it has come to the rounds, and does nothing."""
    addresses = [str(address) for address in dht.get_visible_maddrs()]
    own = hivemind.DHT(
        initial_peers=addresses, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False
    )
    tracker = LiveProgressTracker(own, "failing", sum(BATCHES), start=True)
    tracker.take_part(True)
    tracker.enter(2)
    return tracker


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
