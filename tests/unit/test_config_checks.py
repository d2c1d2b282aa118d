from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import pytest

from rayhive.errors import Problem
from rayhive.spec import Configuration, SweepConfig
from rayhive.spec.axes.delay import DELAY_FLAGS, DelayName
from rayhive.spec.rules import check_sweep


def study(**fields: Any) -> SweepConfig:
    return SweepConfig.model_validate({"name": "a", "workload": {"name": "digits"}, **fields})


def keys(problems: Iterable[Problem]) -> list[str]:
    return [problem.key for problem in problems]


def test_delays_are_the_valid_combinations_of_flags() -> None:
    """The rule was measured over all combinations of hivemind's flags."""
    assert tuple(DELAY_FLAGS) == get_args(DelayName)
    for flags in DELAY_FLAGS.values():
        state, optimizer, gradients, offload = (
            flags.get(name, False)
            for name in (
                "delay_state_averaging",
                "delay_optimizer_step",
                "delay_grad_averaging",
                "offload_optimizer",
            )
        )
        assert (not gradients or optimizer) and (not optimizer or (offload and state))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"swarm": {"target_batch_size": 16, "batch_size": 17}}, "swarm.target_batch_size"),
        ({"swarm": {"matchmaking_time": 30}}, "swarm.matchmaking_time"),
        ({"budget": {"samples_per_replicate": 255}}, "swarm.target_batch_size"),
        ({"space": {"powersgd_rank": 2**60}}, "space.powersgd_rank"),
        ({"space": {"state_codec": "flote16"}}, "space.state_codec"),
        ({"space": {"state_codec": "size_adaptive"}}, "space.state_codec"),
        ({"space": {"average_state_every": "never"}}, "space.average_state_every"),
        ({"space": {"average_state_every": ["auto", 0]}}, "space.average_state_every"),
        ({"space": {"average_state_every": {"low": 1, "high": 4}}}, "space.average_state_every"),
        (
            {"swarm": {"aggregation": "trimmed_mean"}, "space": {"powersgd_rank": [None, 2]}},
            "space.powersgd_rank",
        ),
        (
            {"swarm": {"aggregation": "centered_clipping"}, "enqueue": [{"powersgd_rank": 2}]},
            "enqueue.0.powersgd_rank",
        ),
        ({"swarm": {"peers": 3, "node_classes": {"a": {"count": 2}}}}, "swarm.peers"),
        (
            {"swarm": {"gpus_per_peer": 1, "node_classes": {"a": {"count": 2}}}},
            "swarm.gpus_per_peer",
        ),
        ({"space": {"codec": []}}, "space.codec"),
        ({"space": {"codec": ["none", "none"]}}, "space.codec"),
        ({"space": {"codec": {"low": 1, "high": 2}}}, "space.codec"),
        ({"space": {"codec": [["none"]]}}, "space.codec"),
        ({"space": {"codec": [{"a": 1}]}}, "space.codec"),
        ({"space": {"codec": None}}, "space.codec"),
        ({"space": {"delay": "gradient"}}, "space.delay"),
        ({"space": {"codec": "size_adaptive", "threshold": 0}}, "space.threshold"),
        ({"space": {"codec": "size_adaptive", "threshold": 1.5}}, "space.threshold"),
        ({"space": {"codec": "float16", "threshold": 5}}, "space.threshold"),
        ({"space": {"powersgd_rank": 0}}, "space.powersgd_rank"),
        ({"space": {"powersgd_rank": True}}, "space.powersgd_rank"),
        ({"space": {"powersgd_rank": float("inf")}}, "space.powersgd_rank"),
        ({"space": {"powersgd_rank": float("nan")}}, "space.powersgd_rank"),
        ({"space": {"powersgd_rank": "2"}}, "space.powersgd_rank"),
        ({"space": {"powersgd_rank": {"low": 3, "high": 2}}}, "space.powersgd_rank"),
        ({"space": {"powersgd_rank": {"low": 1.5, "high": 2}}}, "space.powersgd_rank"),
        (
            {"space": {"powersgd_rank": 1, "min_compression_ratio": 1.0}},
            "space.min_compression_ratio",
        ),
        (
            {"space": {"powersgd_rank": 1, "min_compression_ratio": float("nan")}},
            "space.min_compression_ratio",
        ),
        (
            {
                "space": {
                    "powersgd_rank": 1,
                    "min_compression_ratio": {"low": 0, "high": 0.5, "log": True},
                }
            },
            "space.min_compression_ratio",
        ),
        ({"space": {"min_compression_ratio": 0.5}}, "space.min_compression_ratio"),
        ({"scenarios": ["none", "none"]}, "scenarios"),
        ({"scenarios": ["kill"]}, "scenarios"),
        ({"objectives": {"final_los": "minimize"}}, "objectives.final_los"),
        ({"objectives": {"rounds": "maximize"}}, "objectives.rounds"),
        ({"objectives": {"final_loss": "maximize"}}, "objectives.final_loss"),
        ({"objectives": {"retention": "maximize"}}, "objectives.retention"),
        (
            {
                "objectives": {"retention": "maximize"},
                "scenarios": ["kill-one"],
                "twins": False,
            },
            "objectives.retention",
        ),
        ({"objectives": {"samples_to_target": "minimize"}}, "budget.samples_per_replicate"),
        (
            {"objectives": {"final_loss": "minimize"}, "budget": {"stop_at_target": True}},
            "budget.stop_at_target",
        ),
        ({"enqueue": [{}, {}], "budget": {"trials": 1}}, "budget.trials"),
        ({"enqueue": [{"codec": "nne"}]}, "enqueue.0.codec"),
        ({"enqueue": [{"codec": "none", "threshold": 5}]}, "enqueue.0.threshold"),
        ({"enqueue": [{"min_compression_ratio": 0.5}]}, "enqueue.0.min_compression_ratio"),
        ({"enqueue": [{}, {"powersgd_rank": 0}]}, "enqueue.1.powersgd_rank"),
    ],
)
def test_each_violation_is_reported_once_under_its_key(fields: dict[str, Any], key: str) -> None:
    assert keys(check_sweep(study(**fields))) == [key]


def test_a_codec_without_its_dependency_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rayhive.registry import CODECS

    monkeypatch.setattr(CODECS.get("blockwise8"), "requires", "a_missing_package")
    (problem,) = check_sweep(study(space={"codec": "blockwise8"}))
    assert "install a_missing_package" in problem.allowed


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert check_sweep(study(space={"powersgd_rank": [1.0, 2]})) == []


def test_a_label_tells_configurations_apart() -> None:
    configurations = [
        Configuration(),
        Configuration(codec="float16"),
        Configuration(codec="size_adaptive", threshold=5),
        Configuration(codec="size_adaptive", threshold=6),
        Configuration(powersgd_rank=1, min_compression_ratio=0.25),
        Configuration(powersgd_rank=1, min_compression_ratio=0.5),
        Configuration(powersgd_rank=1, min_compression_ratio=0.5, delay="state"),
    ]
    assert len({configuration.label for configuration in configurations}) == len(configurations)
    default = Configuration(powersgd_rank=1)
    assert default.label == Configuration(powersgd_rank=1, min_compression_ratio=0.5).label
