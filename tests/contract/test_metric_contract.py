"""Contract of every metric group; a group is tested as soon as it is registered."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from typing import Any, ClassVar

import pytest

from rayhive.columns import (
    BOUNDS,
    Column,
    ColumnType,
    Row,
    all_columns,
    find_column,
    in_group,
    is_metric,
    metric_columns,
)
from rayhive.events import Event
from rayhive.metrics import METRICS
from rayhive.metrics.aggregate import fold, rank_rows
from rayhive.metrics.folds import Mean, Reduced, Total, pool_times
from rayhive.metrics.group import MetricGroup
from rayhive.metrics.rows import timeline_row
from rayhive.spec import AXES, Link, NodeClass
from rayhive.timeline import Timeline
from tests.fixtures.faulted import ALL, Story, kill_and_restart
from tests.fixtures.logs import Log, make_spec, timeline_of

GROUPS = [pytest.param(group, id=name) for name, group in METRICS.items()]
#: Python types of the values of a column type; bool is an int, but no count.
TYPES: dict[ColumnType, tuple[type, ...]] = {
    "text": (str,),
    "count": (int,),
    "float": (int, float),
    "flag": (bool,),
}
OBJECTIVES = {"samples_per_s": "maximize"}


def faulted() -> Story:
    """A replicate whose events give a value to every column of a replicate."""
    story = kill_and_restart(code="abc", git_revision="abc1234")
    classes = {"fast": NodeClass(count=3, link=Link(rate_mbit=100, delay_ms=20))}
    swarm = story.spec.swarm.model_copy(update={"node_classes": classes})
    configuration = story.spec.configuration
    unset = {a.name: a.examples[0] for a in AXES if getattr(configuration, a.name) is None}
    configuration = configuration.model_copy(update=unset)
    story.spec = story.spec.model_copy(update={"swarm": swarm, "configuration": configuration})
    end = story.events.pop()
    for event in story.of("replicate_started"):
        event |= {"versions": {"rayhive": "0.1.0"}, "hardware": "2 x x86_64"}
    for moment, when in ((0.0, "start"), (13.0, "end")):
        nodes = {"n": {"tx_bytes": 1000 * (1 + int(moment))}}
        story.say(moment, "link_counted", when=when, nodes=nodes)
    story.say(5.0, "rejected", "peer-0", round=5, offender="peer-2", reason="norm", tensors="state")
    story.evaluate(13.5, ("peer-0", "peer-1.1", "peer-2"), loss=0.05, final=True)
    noticed = {"node": "n", "source": "aws", "what": "stop", "certain": True, "drained": True}
    story.say(12.9, "node_notice", **noticed, lives=["peer-2"])
    story.say(13.6, "invariant", name="no_orphans", ok=True, checked=3, violations=[])
    story.events.append(end)
    return story


def twin() -> Story:
    """The same without faults."""
    story = Story(code="abc", git_revision="abc1234")
    story.rounds(*(float(n) for n in range(1, 13)), peers=ALL)
    story.evaluate(13.0, ALL, loss=0.04, final=True)
    story.finish(13.0, ALL)
    story.end(14.0)
    return story


def of_a_baseline() -> Timeline:
    """A replicate of a baseline, which has the columns that only those have."""
    log = Log(make_spec(trial=None, baseline="ddp"))
    return timeline_of(log.spec, log.events())


def violations(group: type[MetricGroup], rows: tuple[Row, Row] | None = None) -> list[str]:
    """Return how a group differs from its declarations on events that give values to all columns.

    Args:
        group: The group.
        rows: Rows of the replicate and of its twin, without the columns of the group.
    """
    row, other = rows or (timeline_row(faulted().timeline), timeline_row(twin().timeline))
    computed = group().compute(faulted().timeline)
    compared = group().compare({**row, **computed}, {**other, **group().compute(twin().timeline)})
    declared = {column.name: column for column in group.columns if column.of_replicates}
    values = computed | compared
    found = [
        f"{name}: computed and not declared"
        for name in values
        if name not in declared and not is_metric(name)
    ]
    for name, column in declared.items():
        value = (compared if column.stage == "twin" else computed).get(name)
        if value is None and name == "baseline":
            value = group().compute(of_a_baseline()).get(name)
        if value is None:
            found.append(f"{name}: declared and not computed")
        elif not isinstance(value, TYPES[column.type]) or (
            isinstance(value, bool) and column.type != "flag"
        ):
            found.append(f"{name}: {value!r} is no {column.type}")
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_columns_are_computed_as_declared(group: type[MetricGroup]) -> None:
    assert violations(group) == []


def planted(values: dict[str, Any], *columns: Column) -> type[MetricGroup]:
    class Planted(MetricGroup):
        """A group with a mistake."""

        columns: ClassVar[tuple[Column, ...]] = ()

        def compute(self, timeline: Timeline) -> Row:
            return values

    Planted.columns = columns
    return Planted


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        (planted({}, Column("new", "About")), "new: declared and not computed"),
        (planted({"new": None}, Column("new", "About")), "new: declared and not computed"),
        (planted({"new": 1.0}), "new: computed and not declared"),
        (planted({"new": "a"}, Column("new", "About")), "new: 'a' is no float"),
        (planted({"new": 1.5}, Column("new", "About", type="count")), "new: 1.5 is no count"),
        (planted({"new": True}, Column("new", "About", type="count")), "new: True is no count"),
        (planted({"new": 1}, Column("new", "About", type="text")), "new: 1 is no text"),
        (
            planted({"new": 1.0}, Column("new", "About", stage="twin")),
            "new: declared and not computed",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_mistake_is_found(group: type[MetricGroup], problem: str) -> None:
    assert violations(group) == [problem]


def test_a_row_is_refused_if_a_group_computes_other_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = METRICS.get("weights")
    monkeypatch.setattr(weights, "compute", lambda self, timeline: {"other": 1})
    with pytest.raises(AssertionError, match=r"'weights' must compute .* other, weights_distance"):
        timeline_row(twin().timeline)


@pytest.mark.parametrize("group", GROUPS)
def test_every_folded_value_has_its_declared_type(group: type[MetricGroup]) -> None:
    """A run gives a value to every column; folding and ranking set exactly those declared."""
    rows = [*folded_run(), *fold([timeline_row(of_a_baseline())])]
    declared = [column for column in group.columns if column.of_configurations]
    for column in declared:
        found = [row[column.name] for row in rows if row[column.name] is not None]
        assert found, f"{column.name}: declared and not computed"
        for value in found:
            assert isinstance(value, TYPES[column.folded_type]), column.name
            assert isinstance(value, bool) == (column.folded_type == "flag"), column.name


def folded_run() -> list[Row]:
    """Return the rows of two configurations, each with faults and without, of two replicates.

    They differ in samples_per_s, unequally at the two seeds.
    """
    broken, calm = timeline_row(faulted().timeline), timeline_row(twin().timeline)
    for _, group in METRICS.items():
        broken |= group().compare(broken, calm)
    conditions = ("link", "configuration", *(axis.name for axis in AXES))
    calm |= {name: broken[name] for name in conditions}
    rates = {("a", 0): 100.0, ("a", 1): 110.0, ("b", 0): 90.0, ("b", 1): 120.0}
    rows = fold(
        row | {"replicate": n, "seed": n, "configuration": name, "samples_per_s": rate}
        for row in (broken, calm)
        for (name, n), rate in rates.items()
    )
    rank_rows(rows, OBJECTIVES)
    return rows


def test_rows_have_exactly_the_declared_columns() -> None:
    rows = folded_run()
    columns = (*all_columns(), *metric_columns(rows))
    assert find_column("metric.accuracy") in columns
    declared = {column.name for column in columns if column.of_configurations}
    bounds = {f"{column.name}{end}" for column in columns if column.interval for end in BOUNDS}
    for row in rows:
        assert row.keys() == declared | bounds


def test_no_two_columns_have_the_same_name() -> None:
    names = Counter(column.name for column in all_columns())
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("column", all_columns(), ids=lambda column: column.name)
def test_declarations_are_consistent(column: Column) -> None:
    assert column.about and not column.about.endswith(".")
    assert column.of_replicates or column.of_configurations
    assert column.exact <= column.interval, "exactness is about the interval"
    assert column.condition <= column.tells_apart, "rows are of one condition"
    if isinstance(column.fold, Mean):
        assert column.type in ("float", "count")
    if isinstance(column.fold, Total):
        assert column.type in ("flag" if column.fold.share else "count",)
    if column.fold == Reduced(pool_times):
        assert column.type == "text"


def test_an_unknown_group_of_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="column group 'comunication' must be one of"):
        in_group("comunication", Column("new", "About"))


# -- values ------------------------------------------------------------------------------------


def histories() -> dict[str, list[Event]]:
    whole = Log(losses=(1.0, math.nan), accuracies=(math.nan, math.inf)).events()
    head = Log().head()
    return {
        "no events": [],
        "started, then died": [*head, *Log(state="failed").tail()],
        "ready, then died": [e for e in whole if e["kind"] in ("replicate_started", "peer_ready")],
        "started to train, then died": [
            e for e in whole if e["kind"] in ("peer_ready", "training_started")
        ],
        "losses that are not finite": whole,
        **{f"torn after {count} events": whole[:count] for count in range(1, len(whole), 7)},
    }


@pytest.mark.parametrize("group", GROUPS)
def test_its_docstring_defines_every_column(group: type[MetricGroup]) -> None:
    text = inspect.getdoc(group) or ""
    axes = {axis.name for axis in AXES}  # defined by the axes of a study
    assert {column.name for column in group.columns if column.name not in text} <= axes


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("history", [pytest.param(v, id=k) for k, v in histories().items()])
def test_unknown_values_are_none(group: type[MetricGroup], history: list[Event]) -> None:
    row = group().compute(timeline_of(make_spec(), history))
    assert {name for name in row if not is_metric(name)} == set(group.names("replicate"))
    for name, value in row.items():
        assert value is None or isinstance(value, (str, bool, int, float)), name
        assert not isinstance(value, float) or math.isfinite(value), name
