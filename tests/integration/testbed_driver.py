"""A driver on a testbed's Ray that prints the observations of agents and supervisors as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.testbed import lifecycle
from rayhive.faults.node_tools import LinkChange

_TIMEOUT = 90


class Agent(NodeLink):
    """An asynchronous actor like a node's agent: uvloop and all."""


class Supervisor:
    """Actor on the head that kills and starts nodes."""

    def kill(self, folder: str, index: int) -> int:
        return len(lifecycle.kill_node(folder, index))

    def start(self, folder: str, index: int) -> None:
        lifecycle.start_node(folder, index)


def told(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def alive() -> dict[str, str]:
    """Return the labels' node number of every living node that has one, by Ray's id."""
    return {
        node["NodeID"]: node["Labels"]["rayhive.io/testbed-node"]
        for node in ray.nodes()
        if node["Alive"] and "rayhive.io/testbed-node" in node["Labels"]
    }


def agent(index: int) -> Any:
    made: Any = ray.remote(Agent)
    label = {"rayhive.io/testbed-node": str(index)}
    return made.options(num_cpus=0, label_selector=label).remote()


def main(address: str, folder: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    told(nodes=sorted(alive().values()))
    agents = [agent(index) for index in range(2)]
    told(addresses=ray.get([each.address.remote() for each in agents], timeout=_TIMEOUT))
    other = ray.get(agents[1].address.remote())
    first = agents[0]
    change = LinkChange(rate_mbit=3.0, delay_ms=30.0)
    told(before=ray.get(first.change.remote(change), timeout=_TIMEOUT).model_dump())
    measured = ray.get(first.measure.remote("rate", "rtt"), timeout=_TIMEOUT)
    told(measured=measured.model_dump())
    ray.get(first.cut.remote("f0"), timeout=_TIMEOUT)
    told(cut=ray.get(first.reach.remote(other), timeout=_TIMEOUT).model_dump(by_alias=True))
    ray.get([first.mend.remote("f0"), first.restore.remote()], timeout=_TIMEOUT)
    told(mended=ray.get(first.reach.remote(other), timeout=_TIMEOUT).model_dump(by_alias=True))

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    supervisor: Any = ray.remote(Supervisor).options(num_cpus=0, scheduling_strategy=here).remote()
    told(killed=ray.get(supervisor.kill.remote(folder, 1), timeout=_TIMEOUT))
    deadline = time.monotonic() + _TIMEOUT
    while len(alive()) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray has no way to be told
    told(nodes=sorted(alive().values()))
    ray.get(supervisor.start.remote(folder, 1), timeout=_TIMEOUT)
    told(nodes=sorted(alive().values()))
    ray.kill(supervisor)
    told(addresses=[ray.get(agent(1).address.remote(), timeout=_TIMEOUT)])


if __name__ == "__main__":
    main(*sys.argv[1:])
