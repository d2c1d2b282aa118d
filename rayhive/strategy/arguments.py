"""Arguments of :class:`rayhive.strategy.strategy.HivemindStrategy`: defaults and checks.

hivemind finds some of these mistakes at its start, some in the first round, and some never: the
weights then silently stay as they are.
"""

from __future__ import annotations

import inspect
import math
import platform
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hivemind.compression import CompressionBase
from hivemind.optim.optimizer import Optimizer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from rayhive.averaging.factory import factory_problems, takes_rules, with_our_averager
from rayhive.errors import ConfigError, Problem, unknown
from rayhive.membership import addresses
from rayhive.optim.factories import group_size_problems
from rayhive.optim.local_rule import local_steps_problems
from rayhive.optim.optimizer import RayhiveOptimizer
from rayhive.spec.moved import LOCAL_UPDATES
from rayhive.spec.swarm import AGGREGATIONS, DEFAULT_RULES, OUTLIER_FILTERS

#: Default addresses that a DHT listens on.
HOST_MADDRS = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic")

_DELAYS = (
    "delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging", "offload_optimizer",
)  # fmt: skip
_NETWORK_DEFAULTS: dict[str, Any] = {
    "use_ipfs": False,
    "wait_timeout": 3,
    "bootstrap_timeout": None,
    "use_relay": True,
    "use_auto_relay": False,
    "identity_path": None,
    "host_maddrs": None,
    "initial_peers": None,
}


class StrategyError(ConfigError, MisconfigurationException, ValueError):
    """The strategy, its trainer or its module cannot train as configured.

    It derives from Lightning's class for bad input, so that existing handlers catch it.
    """

    @classmethod
    def about(cls, key: str, value: object, allowed: str) -> StrategyError:
        """Return the error of a single problem."""
        return cls(Problem(key, value, allowed))


@dataclass(frozen=True)
class Settings:
    """Checked settings of a strategy.

    Attributes:
        scheduler_fn: A scheduler, or a function that makes one.
        initial_peers: Addresses to join at; None to begin a swarm.
        optimizer: Arguments of the swarm's optimizer.
        network: Arguments of the DHT.
    """

    scheduler_fn: Any
    initial_peers: list[str] | None
    optimizer: dict[str, Any]
    network: dict[str, Any]


def read_arguments(arguments: Mapping[str, Any]) -> Settings:
    """Return the settings for the arguments of the strategy.

    Args:
        arguments: The arguments that concern the network or the swarm's optimizer. Those without a
            meaning here go to the swarm's optimizer unchanged.

    Raises:
        StrategyError: With all mistakes in the arguments.
    """
    optimizer = as_local_steps(arguments)
    dht, batch_size, scheduler_fn = (
        optimizer.pop(name) for name in ("dht", "batch_size", "scheduler_fn")
    )
    network = {name: optimizer.pop(name) for name in _NETWORK_DEFAULTS}
    chosen = {name: value for name, value in network.items() if value != _NETWORK_DEFAULTS[name]}
    given_peers = network.pop("initial_peers")
    peers = None
    if dht is None or given_peers is not None:
        peers = addresses.initial_peers(given_peers)
    delays = resolve_delays({name: optimizer.pop(name) for name in _DELAYS})
    problems = [
        *check_delays(delays),
        *check_quorum_delays(delays, optimizer.get("min_peers")),
        *check_options(optimizer),
        *local_steps_problems({**optimizer, **delays}),
        *check_numbers({**optimizer, **network, "batch_size": batch_size}),
        *check_network(optimizer["run_id"], dht, chosen, peers, network["use_ipfs"]),
    ]
    if not (scheduler_fn is None or callable(scheduler_fn) or hasattr(scheduler_fn, "step")):
        problems.append(Problem("scheduler_fn", scheduler_fn, "callable(optimizer) -> scheduler"))
    if problems:
        raise StrategyError(problems)
    hosts = network["host_maddrs"]
    network["host_maddrs"] = list(HOST_MADDRS if hosts is None else hosts)
    network["ensure_bootstrap_success"] = True
    if "client_mode" in optimizer:  # the optimizer follows its DHT
        network["client_mode"] = bool(optimizer["client_mode"])
    return Settings(
        scheduler_fn=scheduler_fn,
        initial_peers=peers,
        optimizer={**optimizer, **delays, "batch_size_per_step": batch_size},
        network=network,
    )


def as_local_steps(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with hivemind's ``use_local_updates`` written as local steps.

    A round then sets the parameters to the mean of the local ones, weighted by samples. It is due
    after ``average_state_every`` batches of the swarm, has the codec of parameters, and is delayed
    where hivemind averages in the background.
    """
    found = dict(arguments)
    if found.get("local_steps") is not None or not found.pop("use_local_updates", False):
        return found  # both are told as a mistake
    mean = dict(LOCAL_UPDATES)
    every: Any = found.get("average_state_every")
    if _whole(every) and every >= 1:
        mean["local_steps"], found["average_state_every"] = every, "auto"
    found |= {name: value for name, value in mean.items() if found.get(name) is None}
    if found.get("grad_compression") is None and "state_averaging_compression" in found:
        found["grad_compression"] = found["state_averaging_compression"]
    if found.pop("average_opt_statistics", ()):
        found["inner_state"] = "average"
    found["offload_optimizer"] = None  # the outer parameters are on the host in any case
    if found["delay_state_averaging"]:
        found["delay_grad_averaging"] = True
    return found


def resolve_delays(given: Mapping[str, bool | None]) -> dict[str, bool]:
    """Return the flags of the delays by name, with defaults for those that are None.

    ``delay_optimizer_step`` follows ``delay_grad_averaging``. ``offload_optimizer`` is on as soon
    as anything is delayed, because the delays need it.
    """
    flags = dict(given)
    if flags["delay_optimizer_step"] is None:
        flags["delay_optimizer_step"] = flags["delay_grad_averaging"]
    if flags["offload_optimizer"] is None:
        flags["offload_optimizer"] = any(flags.values())
    return {name: bool(flag) for name, flag in flags.items()}


def check_delays(flags: Mapping[str, bool]) -> Iterator[Problem]:
    """Find combinations that hivemind cannot run; each problem names the flag to set."""
    later = next((n for n in ("delay_grad_averaging", "delay_optimizer_step") if flags[n]), None)
    if later == "delay_grad_averaging" and not flags["delay_optimizer_step"]:
        yield Problem("delay_optimizer_step", False, "True (or unset) with delay_grad_averaging")
    if later and not flags["delay_state_averaging"]:
        yield Problem("delay_state_averaging", False, f"True with {later}")
    if later and not flags["offload_optimizer"]:
        yield Problem("offload_optimizer", False, f"True (or unset) with {later}")


def check_quorum_delays(flags: Mapping[str, bool], min_peers: Any) -> Iterator[Problem]:
    """Find gradients in the background, which a missed round cannot give back."""
    if min_peers is not None and flags["delay_grad_averaging"]:
        yield Problem("min_peers", min_peers, "None with delay_grad_averaging")


#: Arguments of hivemind's optimizer that the strategy sets -> their sources.
_OWN = {
    "dht": "HivemindStrategy(dht=...)",
    "params": "configure_optimizers",
    "optimizer": "configure_optimizers",
    "scheduler": "HivemindStrategy(scheduler_fn=...)",
    "batch_size_per_step": "HivemindStrategy(batch_size=...)",
}
_AVERAGER_KEYS = (
    "allreduce_timeout", "auxiliary", "average_opt_statistics", "averaged_grads", "client_mode",
    "compression", "custom_gradients", "delta_rule_averaging", "dht", "extra_tensors",
    "min_matchmaking_time", "next_chunk_timeout", "offload_optimizer", "optimizer", "parameters",
    "params", "performance_ema_alpha", "prefix", "reuse_grad_buffers", "scheduler",
    "shutdown_timeout", "start", "state_compression", "status_loglevel",
)  # fmt: skip
_TRACKER_KEYS = (
    "client_mode", "dht", "performance_ema_alpha", "prefix", "start", "status_loglevel",
    "target_batch_size",
)  # fmt: skip
_CODECS = ("grad_compression", "state_averaging_compression", "load_state_compression")


def optimizer_options() -> list[str]:
    """Return the sorted names that ``HivemindStrategy(**optimizer_kwargs)`` takes."""
    lineage = RayhiveOptimizer.__mro__[: RayhiveOptimizer.__mro__.index(Optimizer) + 1]
    names = {
        name
        for ancestor in lineage
        if "__init__" in vars(ancestor)
        for name, parameter in inspect.signature(vars(ancestor)["__init__"]).parameters.items()
        if parameter.kind == parameter.KEYWORD_ONLY
    }
    return sorted(names - {"auxiliary", *_OWN})


def check_options(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find the problems in ``**optimizer_kwargs``."""
    known = optimizer_options()
    for name in options:
        if name in _OWN:
            yield Problem(name, options[name], f"absent: it comes from {_OWN[name]}")
        elif name == "auxiliary":
            yield Problem(name, options[name], "absent: an auxiliary peer does not train")
        elif name not in known:
            yield unknown(name, name, known)
    for name in _CODECS:
        codec = options.get(name)
        if codec is not None and not isinstance(codec, CompressionBase):
            yield Problem(name, codec, "an instance of a codec, for example Float16Compression()")
        elif name != "grad_compression" and getattr(codec, "of_gradients", False):
            allowed = "a codec of 8 bits or more, for example Float16Compression()"
            yield Problem(name, type(codec).__name__, allowed)
    yield from _check_rules(options)
    for name, keys in (("averager_opts", _AVERAGER_KEYS), ("tracker_opts", _TRACKER_KEYS)):
        for key in sorted(set(options.get(name) or ()) & set(keys)):
            yield Problem(
                f"{name}.{key}", options[name][key], "absent: it is set by an argument of its own"
            )
    yield from group_size_problems(options)


def _check_rules(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find unknown aggregation rules, and rules that the averager does not support."""
    rules = {"outlier_filter": OUTLIER_FILTERS, "aggregation": AGGREGATIONS}
    given = {name: options.get(name, DEFAULT_RULES[name]) for name in rules}
    unknowns = [unknown(n, v, rules[n]) for n, v in given.items() if v not in rules[n]]
    yield from unknowns
    if not unknowns:
        yield from factory_problems(options.get("grad_averager_factory"), **given)
    yield from _check_feedback(options, str(given["aggregation"]))
    yield from _check_quorum(options)


def _check_feedback(options: Mapping[str, Any], aggregation: str) -> Iterator[Problem]:
    """Find settings with which errors cannot be fed back."""
    feedback = options.get("error_feedback", False)
    if not isinstance(feedback, bool):
        yield Problem("error_feedback", feedback, "True or False")
    elif not feedback:
        return
    elif aggregation != "mean":
        yield Problem("error_feedback", True, f"False with aggregation {aggregation}")
    elif not takes_rules(with_our_averager(options.get("grad_averager_factory"))):
        yield Problem("error_feedback", True, "False with a grad_averager_factory of your own")


def _check_quorum(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find settings with which no round can begin without a peer."""
    quorum, grace = options.get("min_peers"), options.get("grace_s")
    if grace is not None and not (_number(grace) and 0 <= grace < math.inf):
        yield Problem("grace_s", grace, "a number of seconds, at least 0")
    if quorum is None:
        if grace is not None:
            yield Problem("grace_s", grace, "absent without min_peers")
        return
    if not (_whole(quorum) and quorum >= 2):
        yield Problem("min_peers", quorum, "a whole number, at least 2, or None to await all peers")
    if options.get("reuse_grad_buffers"):
        yield Problem("min_peers", quorum, "None with reuse_grad_buffers")
    if not takes_rules(with_our_averager(options.get("grad_averager_factory"))):
        yield Problem("min_peers", quorum, "None with a grad_averager_factory of your own")


def check_numbers(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find numbers out of their range, and numbers that contradict each other."""
    every = options.get("average_state_every")
    if every is not None and every != "auto" and not (_whole(every) and every >= 1):
        yield Problem("average_state_every", every, "auto, or a whole number, at least 1")
    for name in ("target_batch_size", "batch_size", "load_state_attempts"):
        value = options.get(name)
        if value is not None and not (_whole(value) and value >= 1):
            yield Problem(name, value, "a whole number, at least 1")
    for name in (
        "matchmaking_time", "averaging_timeout", "straggler_timeout", "allreduce_timeout",
        "next_chunk_timeout",
        "load_state_timeout", "shutdown_timeout", "wait_timeout", "bootstrap_timeout",
    ):  # fmt: skip
        value = options.get(name)
        if value is not None and not (_number(value) and value > 0):
            yield Problem(name, value, "a number of seconds greater than 0")
    alpha = options.get("performance_ema_alpha")
    if alpha is not None and not (_number(alpha) and 0 < alpha <= 1):
        yield Problem("performance_ema_alpha", alpha, "greater than 0 and at most 1")
    matchmaking, averaging = options["matchmaking_time"], options["averaging_timeout"]
    if not (_number(matchmaking) and _number(averaging)):
        return
    if 0 < averaging <= matchmaking:
        allowed = f"less than averaging_timeout ({averaging} s)"
        yield Problem("matchmaking_time", matchmaking, allowed)
    request = (options.get("averager_opts") or {}).get("request_timeout")
    if request is not None and not 0 < request < matchmaking:
        bounds = f"greater than 0 and less than matchmaking_time ({matchmaking} s)"
        allowed = f"{bounds}: otherwise two peers that ask each other deadlock"
        yield Problem("averager_opts.request_timeout", request, allowed)


def check_network(
    run_id: Any, dht: Any, given: Mapping[str, Any], initial_peers: Any, use_ipfs: bool
) -> Iterator[Problem]:
    """Find the problems in the settings of the network.

    Args:
        run_id: The name of the run.
        dht: A running DHT, or None.
        given: Settings of a new DHT that differ from their defaults.
        initial_peers: The addresses to join at, from the call or the environment.
        use_ipfs: Whether to find peers over IPFS.
    """
    if platform.system() != "Linux":
        yield Problem("platform", platform.system(), "Linux: hivemind runs nowhere else")
    if not isinstance(run_id, str) or not run_id or "." in run_id:
        yield Problem("run_id", run_id, "a name without a dot")
    if dht is not None:
        for name, value in given.items():
            yield Problem(name, value, "absent with dht: it is a setting of that DHT")
    elif use_ipfs and initial_peers:
        yield Problem("use_ipfs", True, "False with initial_peers (from the call or INITIAL_PEERS)")


def check_trainer(trainer: Any, local_steps: bool = False) -> None:
    """Refuse a trainer with settings that have no meaning, or another one, in a swarm.

    Args:
        trainer: The trainer.
        local_steps: Whether peers step on their own, for which Lightning may accumulate gradients.

    Raises:
        StrategyError: With all such settings.
    """
    problems = []
    scheduled = any(isinstance(item, GradientAccumulationScheduler) for item in trainer.callbacks)
    if (trainer.accumulate_grad_batches != 1 or scheduled) and not local_steps:
        batches = "scheduled" if scheduled else trainer.accumulate_grad_batches
        allowed = "1: gradients are accumulated up to target_batch_size already"
        problems.append(Problem("accumulate_grad_batches", batches, allowed))
    if trainer.num_nodes != 1:
        problems.append(Problem("num_nodes", trainer.num_nodes, "1: each peer is a trainer"))
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        problems.append(Problem("thread", thread.name, "the main thread: hivemind needs it"))
    if problems:
        raise StrategyError(problems)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
