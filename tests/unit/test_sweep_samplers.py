"""Samplers by name: all suggest valid configurations, and a grid tries them in order."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import optuna
import pytest

from rayhive.errors import ConfigError
from rayhive.spec import Configuration, Range, SamplerName, Space
from rayhive.sweep.resolve import WorkloadFacts, resolve
from rayhive.sweep.samplers import STARTUP_TRIALS, make_sampler
from rayhive.sweep.space import SearchSpace
from rayhive.sweep.trial_book import TrialBook

SHAPES = ((300, 500), (500,), (500, 10))
STUDY: dict[str, Any] = {"name": "samplers", "workload": {"name": "digits"}}
SPACE = Space(
    codec=["none", "float16", "size_adaptive"],
    threshold=Range(low=100, high=10_000, log=True),
    powersgd_rank=[None, 1, 2, 4],
    min_compression_ratio=Range(low=0.0, high=0.95),
    delay=["none", "state"],
)


@pytest.mark.parametrize("name", [name for name in get_args(SamplerName) if name != "grid"])
@pytest.mark.parametrize("objectives", [1, 2])
def test_a_sampler_suggests_valid_configurations_after_it_has_learned(
    name: SamplerName, objectives: int
) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["minimize"] * objectives, sampler=make_sampler(name, 0, 0)
    )
    book = TrialBook(study, SearchSpace(SPACE, SHAPES), seed=0)
    seen = set()
    for number in range(STARTUP_TRIALS + 4):
        record = book.next()
        assert record is not None
        seen.add(record.configuration)
        if number == 3:
            book.tell(record, None, "diverged")
        else:
            book.tell(record, [float(number), -float(number)][:objectives])
    assert len(seen) == STARTUP_TRIALS + 4


def test_enqueued_and_amended_trials_are_parents_of_the_next_generation() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    best = [Configuration(codec="float16"), Configuration(powersgd_rank=1)]
    book = TrialBook(
        study, SearchSpace(SPACE, SHAPES), enqueue=best, sampler=partial(make_sampler, "nsga2", 0)
    )
    for number in range(STARTUP_TRIALS):
        record = book.next()
        assert record is not None
        book.tell(record, None if number == 1 else [float(number)], lost=number == 1)
    (lost,) = [record for record in book.records if book.lost(record)]
    book.tell(lost, [0.5])
    sampler = study.sampler
    assert isinstance(sampler, optuna.samplers.NSGAIISampler)
    population = sampler.get_population(study, 0)
    assert sorted(trial.value or 0.0 for trial in population)[:3] == [0.0, 0.5, 2.0]
    assert len(population) == STARTUP_TRIALS


@pytest.mark.parametrize("name", get_args(SamplerName))
def test_samplers_repeat_with_a_seed_and_go_on_after_a_resumption(name: SamplerName) -> None:
    def draws(seed: int, trials: int) -> list[float]:
        study = optuna.create_study(sampler=make_sampler(name, seed, trials))
        return [study.ask().suggest_float("x", 0, 1) for _ in range(3)]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    assert draws(0, 0) == draws(0, 0)
    assert draws(0, 0) != draws(0, 3) != draws(1, 3)


def test_a_grid_tries_every_configuration_in_order_also_after_an_interruption() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = Space(codec=["float16", "none"], powersgd_rank=[2, None], delay=["none", "state"])
    study = optuna.create_study(sampler=make_sampler("grid", 0, 0))
    found = []
    for _ in range(2):  # a second driver goes on
        book = TrialBook(study, SearchSpace(space, SHAPES), in_order=True)
        while (record := book.next()) is not None:
            found.append(record.configuration)
            if len(found) == 3:
                break
    every = SearchSpace(space, SHAPES).every()
    assert every is not None
    assert found == list(every) and len(found) == 8
    assert book.duplicates == 0


def test_a_grid_of_a_range_or_of_too_many_points_is_refused() -> None:
    facts = WorkloadFacts(SHAPES, 32, "real")
    spaces: list[tuple[dict[str, Any], str]] = [
        (
            {"codec": "size_adaptive", "threshold": {"low": 1, "high": 9}},
            "threshold is a range",
        ),
        ({"powersgd_rank": list(range(1, 2100))}, "not of 2099"),
    ]
    for space, reason in spaces:
        with pytest.raises(ConfigError, match=reason):
            resolve({**STUDY, "space": space, "sampler": "grid"}, workload=facts)
    with pytest.raises(ConfigError, match="random"):
        resolve({**STUDY, "sampler": "randm"}, workload=facts)
    listed = {**STUDY, "space": {"codec": ["none", "float16"]}, "sampler": "grid"}
    assert resolve(listed, workload=facts).config.sampler == "grid"
