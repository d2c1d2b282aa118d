from __future__ import annotations

import pytest

from rayhive.errors import ConfigError
from rayhive.workloads.args import parse_args
from rayhive.workloads.digits import DigitsArgs
from rayhive.workloads.source_lm import SourceLmArgs


def test_every_mistake_is_reported_at_once() -> None:
    given = {"target": 1.5, "width": "32", "optimizer": "adamw", "learning_rat": 0.1}
    with pytest.raises(ConfigError) as caught:
        parse_args(DigitsArgs, given)
    problems = {problem.key: problem for problem in caught.value.problems}
    assert problems.keys() == {f"workload.args.{name}" for name in given}
    assert problems["workload.args.optimizer"].nearest == "adam"
    assert problems["workload.args.optimizer"].allowed == "one of adam, sgd"
    assert problems["workload.args.learning_rat"].nearest == "learning_rate"
    assert problems["workload.args.target"].value == 1.5
    assert "less than or equal to 1" in problems["workload.args.target"].allowed


@pytest.mark.parametrize("value", [True, "0.1", float("nan"), float("inf"), 0, -1.0, [0.1]])
def test_a_learning_rate_is_a_positive_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"workload\.args\.learning_rate"):
        parse_args(DigitsArgs, {"learning_rate": value})


def test_numbers_that_yaml_takes_for_text_are_read() -> None:
    assert parse_args(DigitsArgs, {"learning_rate": "1e-3"}).learning_rate == 0.001
    assert parse_args(SourceLmArgs, {"corpus_bytes": "1e6"}).corpus_bytes == 1_000_000


def test_a_rule_between_two_arguments_names_the_one_to_change() -> None:
    with pytest.raises(ConfigError, match=r"workload\.args\.heads: 3 .* divisor of width \(128\)"):
        parse_args(SourceLmArgs, {"heads": 3})
