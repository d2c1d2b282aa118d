"""Arguments of the strategy: defaults are resolved, and invalid combinations refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayhive.errors import Problem
from rayhive.membership import addresses
from rayhive.strategy import validation
from rayhive.strategy.validation import Delays, StrategyError

#: Default addresses that a DHT listens on.
HOST_MADDRS = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic")

_NETWORK_DEFAULTS: dict[str, Any] = {
    "use_ipfs": False,
    "wait_timeout": 3,
    "bootstrap_timeout": None,
    "use_relay": True,
    "use_auto_relay": False,
    "identity_path": None,
}


@dataclass(frozen=True)
class Settings:
    """Checked settings of a strategy.

    Attributes:
        delays: Parts of a round that run in the background.
        batch_size: Samples of each batch; None to count them.
        scheduler_fn: A scheduler, or a function that makes one.
        initial_peers: Addresses to join at; None to begin a swarm.
        optimizer: Arguments of the swarm's optimizer.
        network: Arguments of the DHT.
    """

    delays: Delays
    batch_size: int | None
    scheduler_fn: Any
    initial_peers: list[str] | None
    optimizer: dict[str, Any]
    network: dict[str, Any]


def read_arguments(
    *,
    run_id: Any,
    batch_size: Any,
    delay_state_averaging: bool,
    delay_optimizer_step: bool | None,
    delay_grad_averaging: bool,
    offload_optimizer: bool | None,
    scheduler_fn: Any,
    host_maddrs: Any,
    initial_peers: Any,
    use_ipfs: bool,
    wait_timeout: float,
    bootstrap_timeout: float | None,
    use_relay: bool,
    use_auto_relay: bool,
    identity_path: str | None,
    dht: Any,
    global_zero: bool | None,
    load_initial_state: bool | None,
    **optimizer: Any,
) -> Settings:
    """Return the settings for the arguments of the strategy.

    The arguments are those of :class:`rayhive.strategy.strategy.HivemindStrategy`. Those without a
    name here go to the swarm's optimizer unchanged.

    Raises:
        StrategyError: With all mistakes in the arguments.
    """
    local_updates = bool(optimizer.get("use_local_updates"))
    delays = validation.resolve_delays(
        delay_state_averaging=delay_state_averaging,
        delay_optimizer_step=delay_optimizer_step,
        delay_grad_averaging=delay_grad_averaging,
        offload_optimizer=offload_optimizer,
        use_local_updates=local_updates,
    )
    network: dict[str, Any] = {
        "use_ipfs": use_ipfs,
        "wait_timeout": wait_timeout,
        "bootstrap_timeout": bootstrap_timeout,
        "use_relay": use_relay,
        "use_auto_relay": use_auto_relay,
        "identity_path": identity_path,
    }
    chosen = {name: value for name, value in network.items() if value != _NETWORK_DEFAULTS[name]}
    for name, value in (("host_maddrs", host_maddrs), ("initial_peers", initial_peers)):
        if value is not None:
            chosen[name] = value
    peers = None
    if dht is None or initial_peers is not None:
        peers = addresses.initial_peers(initial_peers)
    problems = [
        *validation.check_delays(delays, local_updates),
        *validation.check_options(optimizer),
        *validation.check_numbers({**optimizer, **network, "batch_size": batch_size}),
        *validation.check_network(
            run_id=run_id, dht=dht, given=chosen, initial_peers=peers, use_ipfs=use_ipfs
        ),
    ]
    if not (scheduler_fn is None or callable(scheduler_fn) or hasattr(scheduler_fn, "step")):
        problems.append(Problem("scheduler_fn", scheduler_fn, "callable(optimizer) -> scheduler"))
    if problems:
        raise StrategyError(problems)
    if "client_mode" in optimizer:  # the optimizer follows its DHT
        network["client_mode"] = bool(optimizer["client_mode"])
    return Settings(
        delays=delays,
        batch_size=batch_size,
        scheduler_fn=scheduler_fn,
        initial_peers=peers,
        optimizer={
            **optimizer,
            "run_id": run_id,
            "batch_size_per_step": batch_size,
            "delay_state_averaging": delays.state,
            "delay_optimizer_step": delays.optimizer,
            "delay_grad_averaging": delays.gradients,
            "offload_optimizer": delays.offload,
        },
        network={
            "host_maddrs": list(HOST_MADDRS if host_maddrs is None else host_maddrs),
            "ensure_bootstrap_success": True,
            **network,
        },
    )
