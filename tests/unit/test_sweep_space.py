from __future__ import annotations

import math
from random import Random

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.compression.payload import averaged_sizes
from rayhive.registry import CODECS
from rayhive.spec import Configuration, Range, Space
from rayhive.spec.axes.threshold import deciding_range
from rayhive.spec.rules import check_configuration
from rayhive.sweep.space import SearchSpace, Span, drawn, suggested
from tests.unit.sweep_fakes import SHAPES

WIDE = Space(
    codec=["none", "float16", "uniform8", "size_adaptive"],
    threshold=Range(low=8, high=262144, log=True),
    powersgd_rank=[None, 1, 2, 4],
    min_compression_ratio=Range(low=0.0, high=0.95),
    delay=["none", "state", "optimizer", "gradients"],
)
FINITE = Space(
    codec=["none", "size_adaptive"],
    threshold=[100, 1000],
    powersgd_rank=[None, 2],
    min_compression_ratio=[0.1, 0.5],
    delay=["none", "state"],
)


def assert_valid(configuration: Configuration) -> None:
    assert list(check_configuration(configuration)) == []
    adaptive = CODECS.get(configuration.codec).uses_threshold
    assert (configuration.threshold is not None) == adaptive
    assert (configuration.min_compression_ratio is None) == (configuration.powersgd_rank is None)


@given(seed=st.integers(0, 2**32), space=st.sampled_from([WIDE, FINITE]))
@settings(max_examples=200, deadline=None)
def test_every_draw_is_valid_and_conditional(seed: int, space: Space) -> None:
    assert_valid(SearchSpace(space, SHAPES).draw(drawn(Random(seed))))


@given(low=st.integers(1, 1000), more=st.integers(0, 10**6), log=st.booleans(), seed=st.integers())
@settings(deadline=None)
def test_numbers_stay_in_their_range(low: int, more: int, log: bool, seed: int) -> None:
    choose = drawn(Random(seed))
    whole = choose("x", Span(low, low + more, log))
    assert isinstance(whole, int) and low <= whole <= low + more
    assert low <= choose("x", Span(float(low), float(low + more), log)) <= low + more


def test_log_axes_are_uniform_in_the_logarithm() -> None:
    choose = drawn(Random(3))
    values = [choose("x", Span(1, 10_000, log=True)) for _ in range(4000)]
    below = sum(value < 100 for value in values) / len(values)
    assert below == pytest.approx(0.53, abs=0.04)  # log(99.5/0.5) / log(10000.5/0.5)


def test_constants_and_axes_that_do_not_apply_are_not_suggested() -> None:
    space = SearchSpace(Space(codec=["none"], delay=["none", "state"]), SHAPES)
    trial = optuna.create_study().ask()
    space.draw(suggested(trial))
    assert trial.params.keys() == {"delay"}


def test_optuna_is_asked_for_a_threshold_only_with_a_codec_that_has_one() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space, study = SearchSpace(WIDE, SHAPES), optuna.create_study()
    for _ in range(40):
        trial = study.ask()
        configuration = space.draw(suggested(trial))
        assert_valid(configuration)
        assert ("threshold" in trial.params) == (configuration.codec == "size_adaptive")
        assert ("min_compression_ratio" in trial.params) == (
            configuration.powersgd_rank is not None
        )
        study.tell(trial, 1.0)


@pytest.mark.parametrize("rank", [None, 1, 2])
def test_a_range_of_thresholds_is_narrowed_to_the_tensor_sizes(rank: int | None) -> None:
    axis = Range(low=8, high=262144, log=True)
    space = SearchSpace(
        Space(codec=["size_adaptive"], threshold=axis, powersgd_rank=[rank]), SHAPES
    )
    least, most = deciding_range(averaged_sizes(SHAPES, {"powersgd_rank": rank}))
    found = {space.draw(drawn(Random(seed))).threshold for seed in range(300)}
    assert min(found) >= max(8, least)
    assert max(found) <= most < 262144
    assert len({space.key(item) for item in _thresholds(space, found, rank)}) > 1


def _thresholds(space: SearchSpace, drawn: set[int], rank: int | None) -> list[Configuration]:
    ratio = None if rank is None else 0.5
    return [
        Configuration(
            codec="size_adaptive",
            threshold=threshold,
            powersgd_rank=rank,
            min_compression_ratio=ratio,
        )
        for threshold in drawn
    ]


@pytest.mark.parametrize(("low", "high", "kept"), [(10**6, 10**7, 10**6), (1, 3, 3)])
def test_a_range_of_equivalent_thresholds_is_one_point(low: int, high: int, kept: int) -> None:
    axis = Range(low=low, high=high)
    space = SearchSpace(Space(codec=["size_adaptive"], threshold=axis), SHAPES)
    assert {space.draw(drawn(Random(seed))).threshold for seed in range(20)} == {kept}


def test_a_finite_space_is_listed_once() -> None:
    space = SearchSpace(FINITE, SHAPES)
    everything = list(space.every() or ())
    assert len(everything) == len(set(everything))
    # codec and threshold: 1 + 2; rank and ratio: 1 + 2; delays: 2
    assert len(everything) == 18
    for configuration in everything:
        assert_valid(configuration)


def test_a_range_makes_a_space_that_cannot_be_listed() -> None:
    assert SearchSpace(WIDE, SHAPES).every() is None
    many = Space(codec=["size_adaptive"], threshold=list(range(1, 3000)))
    assert SearchSpace(many, SHAPES).every() is None
    constant = Space(min_compression_ratio=Range(low=0.5, high=0.5), powersgd_rank=[1])
    assert len(list(SearchSpace(constant, SHAPES).every() or ())) == 1


def test_a_range_of_whole_numbers_has_values() -> None:
    ranks = Space(powersgd_rank=Range(low=1, high=4), min_compression_ratio=[0.1])
    search = SearchSpace(ranks, SHAPES)
    assert [item.powersgd_rank for item in search.every() or ()] == [1, 2, 3, 4]
    steps = Space(local_steps=Range(low=1, high=10**12, log=True))
    assert SearchSpace(steps, SHAPES).every() is None, "too many to list"
    assert SearchSpace(steps, SHAPES).size() is None


def test_a_listed_range_is_drawn_from_as_a_range() -> None:
    steps = Range(low=1, high=1000, log=True)
    outer = {"outer_lr": [0.7], "outer_momentum": [0.0]}
    search, random = SearchSpace(Space(local_steps=steps, **outer), SHAPES), Random(0)
    found = [search.unseen(set(), random) for _ in range(101)]
    median = sorted(item.local_steps or 0 for item in found if item is not None)[50]
    assert 10 < median < 100, "half of them are below the middle of the logarithms, 32"
    left = {search.key(item) for item in search.every() or ()}
    last = left.pop()
    chosen = search.unseen(left, random)
    assert chosen is not None and search.key(chosen) == last


@pytest.mark.parametrize("space", [WIDE, FINITE])
def test_unseen_finds_every_key_and_then_none(space: Space) -> None:
    search, random = SearchSpace(space, SHAPES), Random(0)
    seen: set[str] = set()
    while (found := search.unseen(seen, random)) is not None:
        assert_valid(found)
        assert search.key(found) not in seen
        seen.add(search.key(found))
    if space is FINITE:
        assert seen == {search.key(item) for item in search.every() or ()}
    else:
        assert {search.key(search.draw(drawn(Random(seed)))) for seed in range(300)} <= seen


RANGES = Space(
    codec=["size_adaptive"],
    threshold=Range(low=8, high=262144),
    powersgd_rank=Range(low=1, high=8, log=True),
    min_compression_ratio=Range(low=0.1, high=0.9, log=True),
)


@given(seed=st.integers(0, 2**32), space=st.sampled_from([WIDE, RANGES, FINITE]))
@settings(max_examples=100, deadline=None)
def test_the_parameters_of_a_draw_lead_back_to_it(seed: int, space: Space) -> None:
    search = SearchSpace(space, SHAPES)
    configuration = search.draw(drawn(Random(seed)))
    study = optuna.create_study()
    study.enqueue_trial(search.parameters(configuration))
    trial = study.ask()
    assert search.parameters(configuration, trial) == trial.params
    again = search.draw(suggested(trial))
    assert again == configuration


def test_values_outside_the_space_are_not_parameters() -> None:
    search = SearchSpace(FINITE, SHAPES)
    foreign = Configuration(codec="float16", powersgd_rank=2, min_compression_ratio=0.7)
    assert search.parameters(foreign) == {"powersgd_rank": 2, "delay": "none"}
    far = Configuration(codec="float16", powersgd_rank=99, min_compression_ratio=0.95)
    assert SearchSpace(RANGES, SHAPES).parameters(far) == {}


def test_equivalent_configurations_have_the_same_key() -> None:
    search = SearchSpace(WIDE, SHAPES)
    huge = [Configuration(codec="size_adaptive", threshold=size) for size in (10**5, 10**6)]
    assert search.key(huge[0]) == search.key(huge[1]) != search.key(Configuration())
    assert math.prod(SHAPES[0]) < 10**5
