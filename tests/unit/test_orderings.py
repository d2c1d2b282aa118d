"""The studies of published orderings pair what ``docs/orderings.md`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.compression.fragments import split
from rayhive.spec import Configuration
from rayhive.sweep.resolve import ResolvedStudy, resolve

FOLDER = Path(__file__).parents[2] / "experiments" / "orderings"
STUDIES = ("local_steps", "low_bit", "gossip", "sign", "quorum")


def study(name: str) -> ResolvedStudy:
    return resolve(FOLDER / f"{name}.yaml")


def changes(one: Configuration, other: Configuration) -> dict[str, tuple[object, object]]:
    """Return the axes in which two configurations differ, with both values."""
    sides = one.model_dump(), other.model_dump()
    return {key: (old, sides[1][key]) for key, old in sides[0].items() if old != sides[1][key]}


def test_there_is_no_other_study_of_orderings() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.yaml")) == sorted(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_is_measured_with_five_common_seeds_and_equal_samples(name: str) -> None:
    found = study(name)
    config = found.config
    keys = {found.space.key(item) for item in config.enqueue}
    assert len(keys) == len(config.enqueue) == config.budget.trials
    assert len(set(found.seeds)) == config.replicates >= 5
    assert config.budget.samples_per_replicate
    assert config.budget.samples_per_replicate % config.evaluation.every_samples == 0


def test_each_row_of_the_local_steps_differs_from_its_partner_by_one_statement() -> None:
    found = study("local_steps")
    diloco, averaging, streaming, sparse, forgetful = found.config.enqueue
    assert changes(diloco, averaging) == {"outer_lr": (0.7, 1.0), "outer_momentum": (0.9, 0.0)}
    assert changes(diloco, streaming) == {"fragments": (1, 4)}
    assert changes(averaging, sparse) == {
        "codec": ("none", "topk"),
        "top_k": (None, 64),
        "error_feedback": (None, True),
    }
    assert changes(sparse, forgetful) == {"error_feedback": (True, False)}


def test_a_fragment_is_about_a_quarter_of_the_parameters() -> None:
    found = study("local_steps")
    sizes = [1] * len(found.workload.shapes)
    for index, shape in enumerate(found.workload.shapes):
        for length in shape:
            sizes[index] *= length
    largest = max(sum(sizes[i] for i in each) for each in split(sizes, 4))
    assert 0.25 <= largest / sum(sizes) < 0.26


def test_pairs_have_the_momentum_of_their_authors_and_a_partner_that_has_it_too() -> None:
    diloco, pairs, groups = study("gossip").config.enqueue
    assert changes(groups, pairs) == {"group_size": ("all", 2)}
    assert changes(diloco, groups) == {"outer_momentum": (0.9, 0.5)}


def test_the_rows_of_few_bits_differ_by_their_codec() -> None:
    diloco, four, two = study("low_bit").config.enqueue
    assert changes(diloco, four) == {
        "codec": ("none", "blockwise4"),
        "error_feedback": (None, False),
    }
    assert changes(four, two) == {
        "codec": ("blockwise4", "blockwise2"),
        "error_feedback": (False, True),
    }


def test_signs_differ_by_feedback_and_rounds_by_the_quorum_alone() -> None:
    assert changes(*study("sign").config.enqueue) == {"error_feedback": (False, True)}
    quorum = study("quorum").config
    assert changes(*quorum.enqueue) == {"min_peers": (None, 3), "grace_s": (None, 0.1)}
    assert "straggler" in quorum.scenarios
