"""Errors name the mistake, the allowed values and the closest valid one."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.errors import (
    ClusterError,
    ConfigError,
    NoAnswerError,
    PeerError,
    Problem,
    RayhiveError,
    ReplicateError,
    nearest,
    unknown,
)

RANK = Problem("space.powersgd_rank", 0, "an integer of at least 1")
CODEC = Problem("space.codec", "flaot16", "one of float16, none", nearest="float16")


def test_a_problem_names_key_value_and_allowed_values() -> None:
    assert str(RANK) == "space.powersgd_rank: 0 is not valid: an integer of at least 1"


def test_problem_offers_the_nearest_choice() -> None:
    assert str(CODEC).endswith("; did you mean 'float16'?")


def test_one_problem_without_a_source_is_one_line() -> None:
    assert str(ConfigError(RANK)) == str(RANK)


def test_all_problems_are_reported_at_once_with_their_source() -> None:
    error = ConfigError([RANK, CODEC], source="study.yaml")
    assert str(error) == f"2 problems in study.yaml:\n  - {RANK}\n  - {CODEC}"
    assert error.problems == (RANK, CODEC)


def test_one_problem_with_a_source_is_counted_in_the_singular() -> None:
    assert str(ConfigError(RANK, source="study.yaml")).startswith("1 problem in study.yaml:\n")


def test_problems_may_come_from_a_generator() -> None:
    assert ConfigError(problem for problem in (RANK, CODEC)).problems == (RANK, CODEC)


def test_config_error_survives_a_process_boundary() -> None:
    error = ConfigError([RANK, CODEC], source="study.yaml")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.problems, copy.source, str(copy)) == (error.problems, error.source, str(error))


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (RayhiveError, 1),
        (ReplicateError, 1),
        (PeerError, 1),
        (ClusterError, 1),
        (NoAnswerError, 1),
        (ConfigError, 2),
    ],
)
def test_exit_codes(kind: type[RayhiveError], code: int) -> None:
    assert issubclass(kind, RayhiveError)
    assert kind.exit_code == code


def test_nearest_is_none_when_nothing_is_close() -> None:
    assert nearest("zzz", ["float16", "none"]) is None


def test_unknown_lists_every_choice_in_order() -> None:
    assert unknown("workload", "digit", ["source_lm", "digits"]) == Problem(
        "workload", "digit", "one of digits, source_lm", "digits"
    )


def test_names_of_any_length_leave_a_message_readable() -> None:
    """Keys, values and choices may come from a damaged file."""
    name = "x" * 100_000
    assert len(str(unknown(name, name + "y", ["none", name]))) < 2000


def test_unknown_among_no_choices() -> None:
    assert unknown("fault", "kill", []).allowed == "one of none"


@given(st.text(), st.lists(st.text(min_size=1), max_size=5))
def test_nearest_is_one_of_the_choices_and_an_exact_match_wins(
    value: str, choices: list[str]
) -> None:
    assert nearest(value, choices) in {None, *choices}
    if value:
        assert nearest(value, [*choices, value]) == value
