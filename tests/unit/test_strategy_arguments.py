"""Every mistake in the arguments of the strategy is found before anything starts."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hivemind.compression import Float16Compression
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from lightning.fabric.utilities.exceptions import MisconfigurationException

from rayhive.errors import ConfigError
from rayhive.strategy.arguments import (
    StrategyError,
    check_delays,
    optimizer_options,
    resolve_delays,
)
from rayhive.strategy.strategy import HivemindStrategy

HALF = Float16Compression()


def refused(**arguments: Any) -> dict[str, str]:
    """Return the problems of the arguments by key; no DHT may have been started."""
    with mock.patch("hivemind.DHT") as dht, pytest.raises(StrategyError) as caught:
        HivemindStrategy(**{"target_batch_size": 64, **arguments})
    dht.assert_not_called()
    return {problem.key: problem.allowed for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("state", "optimizer", "gradients", "offload"),
    list(itertools.product([False, True], [None, False, True], [False, True], [None, False, True])),
)
def test_exactly_what_hivemind_can_run_is_accepted(
    state: bool, optimizer: bool | None, gradients: bool, offload: bool | None
) -> None:
    flags = {
        "delay_state_averaging": state,
        "delay_optimizer_step": optimizer,
        "delay_grad_averaging": gradients,
        "offload_optimizer": offload,
    }
    delays = resolve_delays(flags)
    step = gradients if optimizer is None else optimizer
    on_host = (state or step or gradients) if offload is None else offload
    valid = (not gradients or step) and (not step or (on_host and state))
    problems = list(check_delays(delays))
    assert valid == (not problems)
    # each problem names a flag, and setting those flags is enough
    fixed = {**flags, **{problem.key: True for problem in problems}}
    assert list(check_delays(resolve_delays(fixed))) == []


def test_the_documented_combinations_are_accepted() -> None:
    for arguments, offload in (
        ({"delay_state_averaging": True}, True),
        ({"delay_state_averaging": True, "delay_optimizer_step": False}, True),
        ({"delay_state_averaging": True, "offload_optimizer": False}, False),
        ({"delay_state_averaging": True, "delay_grad_averaging": True}, True),
        ({"offload_optimizer": True}, True),
        ({}, False),
    ):
        with mock.patch("hivemind.DHT", autospec=True):
            strategy = HivemindStrategy(64, **arguments)  # type: ignore[arg-type]
        assert strategy.settings.optimizer["offload_optimizer"] is offload


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"average_state_every": 4}, {"local_steps": 4}),
        ({"average_opt_statistics": ("exp_avg",)}, {"inner_state": "average"}),
        ({"delay_state_averaging": True}, {"delay_grad_averaging": True}),
        ({"offload_optimizer": True}, {"offload_optimizer": None}),
        ({"outer_lr": 0.7, "inner_state": "reset"}, {}),
        (
            {"state_averaging_compression": HALF},
            {"state_averaging_compression": HALF, "grad_compression": HALF},
        ),
    ],
)
def test_local_updates_are_local_steps(given: dict[str, Any], meant: dict[str, Any]) -> None:
    """hivemind's mode and its documented options, as the local steps that do the same."""
    replaced = {"average_state_every", "average_opt_statistics"}
    kept = {name: value for name, value in given.items() if name not in replaced}
    mean = {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    with mock.patch("hivemind.DHT", autospec=True):
        found = HivemindStrategy(64, use_local_updates=True, **given).settings.optimizer
        wanted = HivemindStrategy(64, **{**mean, **kept, **meant}).settings.optimizer
    assert {"average_state_every": "auto", **found} == {"average_state_every": "auto", **wanted}


def test_local_updates_exclude_what_local_steps_exclude() -> None:
    found = refused(
        use_local_updates=True, reuse_grad_buffers=True, min_peers=2, average_state_every=0
    )
    assert found.keys() == {"reuse_grad_buffers", "min_peers", "average_state_every"}
    assert refused(use_local_updates=True, local_steps=4).keys() == {"use_local_updates"}


def test_rules_of_aggregation_go_with_averagers_that_know_them() -> None:
    factorised = partial(PowerSGDGradientAverager, averager_rank=2)
    robust = {"aggregation": "trimmed_mean"}
    assert refused(outlier_filter="direktion").keys() == {"outlier_filter"}
    assert refused(aggregation="median").keys() == {"aggregation"}
    assert refused(aggregation=["mean"]).keys() == {"aggregation"}
    assert "PowerSGD" in refused(**robust, grad_averager_factory=factorised)["aggregation"]
    own = refused(**robust, outlier_filter="finite", grad_averager_factory=print)
    assert own.keys() == {"aggregation", "outlier_filter"}
    with mock.patch("hivemind.DHT", autospec=True):
        HivemindStrategy(64, grad_averager_factory=print)
        HivemindStrategy(64, outlier_filter="direction", grad_averager_factory=factorised)
        HivemindStrategy(64, **robust, grad_averager_factory=GradientAverager)


def test_all_mistakes_are_reported_together() -> None:
    found = refused(
        target_batch_size=0,
        run_id="a.b",
        batch_size=1.5,
        delay_optimizer_step=True,
        matchmaking_time=30,
        averaging_timeout=30,
        average_state_every=0,
        performance_ema_alpha=0,
        next_chunk_timeout=0,
        grad_compression=Float16Compression,
        straggler_timeout=0,
        averager_opts={"prefix": "x", "request_timeout": 40, "target_group_size": 4},
        tracker_opts={"start": False},
        delay_gradient_averaging=True,
        optimizer="Adam",
        auxiliary=True,
        use_ipfs=True,
        initial_peers="/ip4/127.0.0.1/tcp/1",
        scheduler_fn=3,
    )
    assert found.keys() == {
        "target_batch_size",
        "run_id",
        "batch_size",
        "delay_state_averaging",
        "matchmaking_time",
        "average_state_every",
        "performance_ema_alpha",
        "next_chunk_timeout",
        "grad_compression",
        "averager_opts.prefix",
        "straggler_timeout",
        "averager_opts.request_timeout",
        "averager_opts.target_group_size",
        "tracker_opts.start",
        "delay_gradient_averaging",
        "optimizer",
        "auxiliary",
        "use_ipfs",
        "scheduler_fn",
    }


def test_an_unknown_option_gets_a_suggestion() -> None:
    with pytest.raises(StrategyError, match="did you mean 'grad_compression'"):
        HivemindStrategy(64, gradient_compression=None)
    assert {"grad_averager_factory", "extra_tensors", "on_failure"} <= set(optimizer_options())
    assert not {"dht", "params", "kwargs", "self"} & set(optimizer_options())


def test_a_given_dht_brings_its_own_settings() -> None:
    dht = mock.Mock()
    found = refused(dht=dht, identity_path="key", initial_peers=["/ip4/127.0.0.1/tcp/1"])
    assert found.keys() == {"identity_path", "initial_peers"}
    dht.is_alive.return_value = False
    assert refused(dht=dht).keys() == {"dht"}


def test_the_error_is_bad_input_to_lightning_too() -> None:
    with pytest.raises(MisconfigurationException) as caught:
        HivemindStrategy(64, delay_grad_averaging=True)
    assert isinstance(caught.value, (ConfigError, ValueError))
    assert caught.value.exit_code == 2
    assert "delay_state_averaging" in str(caught.value)


def test_everything_reaches_the_dht_and_the_optimizer() -> None:
    compression = Float16Compression()
    with mock.patch("hivemind.DHT", autospec=True) as dht:
        strategy = HivemindStrategy(
            64,
            "name",
            8,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            wait_timeout=4,
            bootstrap_timeout=5.0,
            use_relay=False,
            use_auto_relay=True,
            identity_path="key",
            client_mode=True,
            grad_compression=compression,
            verbose=True,
        )
    assert dht.call_args.kwargs == {
        "start": True,
        "initial_peers": None,
        "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
        "ensure_bootstrap_success": True,
        "use_ipfs": False,
        "wait_timeout": 4,
        "bootstrap_timeout": 5.0,
        "use_relay": False,
        "use_auto_relay": True,
        "identity_path": "key",
        "client_mode": True,
    }
    expected = {
        "target_batch_size": 64,
        "run_id": "name",
        "batch_size_per_step": 8,
        "grad_compression": compression,
        "matchmaking_time": 5.0,
        "averaging_timeout": 30.0,
        "straggler_timeout": 60.0,
        "verbose": True,
        "client_mode": True,
    }
    assert expected.items() <= strategy.settings.optimizer.items()
    with mock.patch("hivemind.DHT", autospec=True) as dht:
        HivemindStrategy(64)
    default = ["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic"]
    assert dht.call_args.kwargs["host_maddrs"] == default
