"""What every metric group has to keep; a new one is tested as soon as it is registered."""

from __future__ import annotations

import inspect
import math
from collections import Counter

import pytest

from rayhive.columns import BY_NAME, COLUMNS, REPLICATE_COLUMNS
from rayhive.events import Event
from rayhive.metrics import METRICS
from rayhive.metrics.group import MetricGroup
from rayhive.metrics.timeline import Timeline
from tests.fixtures.logs import Log, make_spec

GROUPS = [pytest.param(group, id=name) for name, group in METRICS.items()]


def histories() -> dict[str, list[Event]]:
    whole = Log(losses=(1.0, math.nan), accuracies=(math.nan, math.inf)).events()
    head = Log().head()
    return {
        "nothing at all": [],
        "started, then died": [*head, *Log(state="failed").tail()],
        "ready, then died": [e for e in whole if e["kind"] in ("replicate_started", "peer_ready")],
        "started to train, then died": [
            e for e in whole if e["kind"] in ("peer_ready", "training_started")
        ],
        "numbers that are none": whole,
        **{f"torn after {count} events": whole[:count] for count in range(1, len(whole), 7)},
    }


@pytest.mark.parametrize("group", GROUPS)
def test_its_columns_are_known(group: type[MetricGroup]) -> None:
    assert group.columns
    assert set(group.columns) <= BY_NAME.keys()
    assert not set(group.replicate_columns) & (BY_NAME.keys() | set(REPLICATE_COLUMNS))


@pytest.mark.parametrize("group", GROUPS)
def test_its_docstring_defines_every_column_that_it_can_fill(group: type[MetricGroup]) -> None:
    filled = group().compute(Timeline(make_spec(), Log().events()))
    text = inspect.getdoc(group) or ""
    missing = [name for name, value in filled.items() if value is not None and name not in text]
    assert not missing


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("history", [pytest.param(v, id=k) for k, v in histories().items()])
def test_it_says_none_where_it_cannot_know(group: type[MetricGroup], history: list[Event]) -> None:
    row = group().compute(Timeline(make_spec(), history))
    assert row.keys() == {*group.columns, *group.replicate_columns}
    for name, value in row.items():
        assert value is None or isinstance(value, (str, bool, int, float)), name
        assert not isinstance(value, float) or math.isfinite(value), name


def test_no_two_groups_claim_a_column_and_none_is_forgotten() -> None:
    claims = Counter(name for _, group in METRICS.items() for name in group.columns)
    assert not [name for name, count in claims.items() if count > 1]
    folded = {"n", "n_failed", "n_lost", "pareto", "worst_case", "worst_retention", "regret"}
    configuration = {column.name for column in COLUMNS if column.group == "configuration"}
    assert claims.keys() | folded | configuration == BY_NAME.keys()
