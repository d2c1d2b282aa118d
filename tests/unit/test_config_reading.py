from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayhive.errors import ConfigError, Problem
from rayhive.spec import Configuration, Range, SweepConfig, load_sweep, validate_sweep

BASE: dict[str, Any] = {"name": "study", "workload": {"name": "digits"}}


def problems(data: Any, *overrides: str, tmp_path: Path | None = None) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        if tmp_path is None:
            validate_sweep({**BASE, **data}, "a.yaml")
        else:
            file = tmp_path / "a.yaml"
            file.write_text(yaml.safe_dump({**BASE, **data}))
            load_sweep(file, overrides)
    return {problem.key: problem for problem in caught.value.problems}


def test_defaults_are_a_valid_study() -> None:
    config = validate_sweep(BASE)
    assert config.swarm.peers == 2
    assert config.space.codec == ("none",)


@pytest.mark.parametrize(
    ("given", "close"),
    [("cels.yaml", "cells.yaml"), ("cells.yml", "cells.yaml"), ("nope.yaml", None)],
)
def test_a_file_that_is_not_there_suggests_one_of_a_similar_name(
    given: str, close: str | None, tmp_path: Path
) -> None:
    for name in ("cells.yaml", "mkdocs.yml"):
        (tmp_path / name).write_text("name: study")
    with pytest.raises(ConfigError) as caught:
        load_sweep(tmp_path / given)
    (problem,) = caught.value.problems
    assert problem.nearest == (None if close is None else str(tmp_path / close))


def test_an_axis_is_a_constant_a_list_or_a_range() -> None:
    space = {
        "codec": "size_adaptive",
        "threshold": {"low": 256, "high": 1024, "log": True},
        "powersgd_rank": [None, 2],
    }
    config = validate_sweep({**BASE, "space": space})
    assert config.space.codec == ("size_adaptive",)
    assert config.space.threshold == Range(low=256, high=1024, log=True)
    assert config.space.powersgd_rank == (None, 2)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"space": {"codec": ["none", "size_adaptive"], "threshold": [100, 200]}},
        {"space": {"powersgd_rank": [1, None], "min_compression_ratio": {"low": 0, "high": 0.9}}},
        {"enqueue": [{"codec": "size_adaptive", "threshold": 5, "delay": "state"}]},
        {"workload": {"import": "a.b:C", "args": {"x": [1, 2]}}, "storage": "sqlite:///x.db"},
    ],
)
def test_the_resolved_study_reads_back_as_itself(data: dict[str, Any], tmp_path: Path) -> None:
    config = validate_sweep({**BASE, **data})
    file = tmp_path / "resolved.yaml"
    file.write_text(config.to_yaml())
    again = load_sweep(file)
    assert again == config
    assert again.to_yaml() == config.to_yaml()


def test_overrides_replace_single_fields(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: study\nworkload: {name: digits}\nswarm:\n")
    config = load_sweep(
        file, ["swarm.peers=4", "budget.trials=7", "space.codec=[none, float16]", "storage=null"]
    )
    assert (config.swarm.peers, config.budget.trials) == (4, 7)
    assert config.space.codec == ("none", "float16")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("replicates", "--set"),
        ("=3", "--set"),
        ("name.first=x", "--set name.first"),
        ("replicates=[", "--set replicates"),
        ("replicats=3", "replicats"),
        ("swarm.peers=0", "swarm.peers"),
    ],
)
def test_bad_overrides_are_reported(override: str, key: str, tmp_path: Path) -> None:
    assert set(problems({}, override, tmp_path=tmp_path)) == {key}


@pytest.mark.parametrize(
    ("data", "key", "nearest"),
    [
        ({"swram": {}}, "swram", "swarm"),
        ({"swarm": {"peer": 2}}, "swarm.peer", "peers"),
        ({"budget": {"trails": 2}}, "budget.trails", "trials"),
        ({"workload": {"nam": "digits"}}, "workload.nam", "name"),
        ({"workload": {"improt": "a:b"}}, "workload.improt", "import"),
        ({"enqueue": [{"codec": "none"}, {"codek": "none"}]}, "enqueue.1.codek", "codec"),
        ({"space": {"threshold": {"low": 1, "hgih": 2}}}, "space.threshold.hgih", "high"),
        (
            {"swarm": {"node_classes": {"a": {"count": 2, "link": {"rate": 1}}}}},
            "swarm.node_classes.a.link.rate",
            "rate_mbit",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(data: dict[str, Any], key: str, nearest: str) -> None:
    found = problems(data)
    assert found[key].nearest == nearest
    assert nearest in found[key].allowed


@pytest.mark.parametrize(
    ("data", "key", "allowed"),
    [
        ({"name": "a b"}, "name", "letters, digits"),
        ({"name": None}, "name", "string"),
        ({"workload": "digits"}, "workload", "a mapping of keys to values"),
        ({"swarm": 3}, "swarm", "a mapping of keys to values"),
        ({"swarm": {"peers": "two"}}, "swarm.peers", "integer"),
        ({"swarm": {"peers": 1.5}}, "swarm.peers", "integer"),
        ({"scenarios": "none"}, "scenarios", "a list"),
        ({"scenarios": []}, "scenarios", "at least one entry"),
        ({"scenarios": [3]}, "scenarios.0", "string"),
        ({"objectives": {}}, "objectives", "at least one entry"),
        ({"objectives": {"final_loss": "down"}}, "objectives.final_loss", "'minimize'"),
        ({"budget": {"seconds_per_replicate": float("inf")}}, None, "finite"),
        ({"space": {"threshold": {"low": 3}}}, "space.threshold.high", "required"),
        ({"space": {"threshold": {"low": "a", "high": 3}}}, "space.threshold.low", "number"),
        ({"enqueue": [3]}, "enqueue.0", "a mapping of keys to values"),
        ({"enqueue": [{"delay": "gradient"}]}, "enqueue.0.delay", "'gradients'"),
        ({1: 2}, "1", "string"),
        # a number is not read out of a truth value or text, a truth value not out of a number
        ({"swarm": {"peers": True}}, "swarm.peers", "an integer"),
        ({"swarm": {"peers": "2"}}, "swarm.peers", "an integer"),
        ({"swarm": {"matchmaking_time": True}}, "swarm.matchmaking_time", "a number"),
        ({"swarm": {"trusted_network": 1}}, "swarm.trusted_network", "true or false"),
        ({"swarm": {"trusted_network": "yes"}}, "swarm.trusted_network", "true or false"),
        ({"swarm": {"target_batch_size": 1e30}}, "swarm.target_batch_size", "at most 64 bits"),
        ({"budget": {"seconds_per_replicate": 1e-9}}, None, "greater than or equal to 0.1"),
        ({"budget": {"seconds_per_replicate": "1e-9"}}, None, "greater than or equal to 0.1"),
        ({"replicates": 10_000_000}, "replicates", "less than or equal to 1000"),
        ({"seed": 2**63}, "seed", "64 bits"),
        ({"seed": 10**5000}, "seed", "64 bits"),
        ({"storage": "a\0b"}, "storage", "without control characters"),
        ({"storage": "\ud800"}, "storage", "without control characters"),
        ({"workload": {"name": "digits", "args": {"x": b"y"}}}, "workload.args.x", "not bytes"),
        ({"workload": {"args": {"x": date(2001, 1, 1)}}}, "workload.args.x", "in quotes"),
        ({"workload": {"args": {"x": {2: 1}}}}, "workload.args.x.2", "in quotes"),
        (
            {"swarm": {"node_classes": {"a": {"count": 2, "labels": {"zone": "a\nb"}}}}},
            "swarm.node_classes.a.labels.zone",
            "letters, digits",
        ),
        (
            {"swarm": {"node_classes": {"a": {"count": 2, "labels": {"the zone": "a"}}}}},
            "swarm.node_classes.a.labels.the zone",
            "letters, digits",
        ),
    ],
)
def test_structural_mistakes_are_reported_under_their_keys(
    data: Any, key: str | None, allowed: str
) -> None:
    found = problems(data)
    assert len(found) == 1 and key in (None, *found)
    assert allowed in next(iter(found.values())).allowed


@pytest.mark.parametrize("name", ["a b", "a\n", "", "-a", "a" * 64])
def test_a_node_class_has_a_name_that_a_label_can_carry(name: str) -> None:
    found = problems({"swarm": {"peers": 2, "node_classes": {name: {"count": 2}, "b": {}}}})
    assert any("letters, digits" in p.allowed or "printable" in p.allowed for p in found.values())


def test_numbers_with_an_exponent_are_numbers_and_labels_may_be_as_rays_are() -> None:
    labels = {"ray.io/accelerator-type": "A100", "zone": "eu-west_1.b", "empty": ""}
    classes = {"fast-1": {"count": 2, "labels": labels}}
    config = validate_sweep(
        {**BASE, "swarm": {"matchmaking_time": "1e-1", "node_classes": classes}}
    )
    assert config.swarm.matchmaking_time == 0.1
    assert config.swarm.node_classes is not None
    assert config.swarm.node_classes["fast-1"].labels == labels


def test_data_that_contains_itself_is_refused_under_its_key() -> None:
    args: dict[str, Any] = {"deep": []}
    args["deep"].append(args)
    assert list(problems({"workload": {"name": "digits", "args": args}})) == [
        "workload.args.deep.0"
    ]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    (problem,) = problems({"enqueue": deep}).values()
    assert "levels" in problem.allowed
    many: list[Any] = [0] * 10
    for _ in range(12):  # 10 ** 13 values, for who counts each place of an alias
        many = [many] * 10
    assert any("values" in p.allowed for p in problems({"enqueue": many}).values())


def test_an_override_of_one_alias_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: a\nworkload: {name: digits}\nswarm:\n  peers: 3\n"
        "  node_classes: {a: &one {count: 1}, b: *one}\n"
    )
    config = load_sweep(file, ["swarm.node_classes.b.count=2"])
    assert config.swarm.node_classes is not None
    assert [item.count for item in config.swarm.node_classes.values()] == [1, 2]


def test_a_message_stays_short_and_on_its_line() -> None:
    told = str(problems({"storage": "x" * 10**6 + "\x1b[31m\n"})["storage"])
    assert len(told) < 400 and told.isprintable()


def test_a_missing_name_and_workload_do_not_hide_the_rest() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_sweep({"swarm": {"peers": 0}, "replicates": 0, "space": {"codec": "nnone"}})
    keys = [problem.key for problem in caught.value.problems]
    assert sorted(keys) == ["name", "replicates", "space.codec", "swarm.peers", "workload"]


def test_structural_and_other_mistakes_are_reported_together() -> None:
    found = problems(
        {
            "swarm": {"peers": -1, "matchmaking_time": 60},
            "enqueue": [{"codec": "nonne"}, 3, {"powersgd_rank": 0}],
            "scenarios": ["none", "kill"],
        }
    )
    assert set(found) == {
        "swarm.peers",
        "swarm.matchmaking_time",
        "enqueue.0.codec",
        "enqueue.1",
        "enqueue.2.powersgd_rank",
        "scenarios",
    }


def test_a_repeated_key_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: a\nworkload: {name: digits}\nswarm:\n  peers: 2\n  peers: 3\nname: b\n"
        "space: {codec: none}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_sweep(file)
    told = [(problem.key, problem.value) for problem in caught.value.problems]
    assert sorted(told) == [("name", "line 6"), ("peers", "line 5")]


def test_merge_keys_of_yaml_are_no_repetition(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: a\nworkload: {name: digits}\n"
        "swarm: {peers: 4, threads_per_peer: 1}\n"
        "enqueue:\n  - &one {codec: float16, delay: state}\n  - {<<: *one, codec: none}\n"
    )
    assert load_sweep(file).enqueue[1] == Configuration(codec="none", delay="state")


def test_further_checks_add_their_problems() -> None:
    def check(config: SweepConfig) -> list[Problem]:
        return [Problem("workload", config.workload.label, "another one")]

    with pytest.raises(ConfigError) as caught:
        validate_sweep({**BASE, "replicates": 0}, checks=[check])
    assert [problem.key for problem in caught.value.problems] == ["replicates", "workload"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["low", "high", "codec", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(
    data=st.fixed_dictionaries(
        {},
        optional={
            name: values
            for name in (*SweepConfig.model_fields, "space", "workload", "enqueue", "other")
        },
    )
    | st.fixed_dictionaries(
        {},
        optional={
            "space": st.dictionaries(
                st.sampled_from(
                    ["codec", "threshold", "powersgd_rank", "average_state_every", "y"]
                ),
                values,
            ),
            "swarm": st.dictionaries(
                st.sampled_from(["peers", "straggler_timeout", "node_classes", "batch_size"]),
                values,
            ),
            "enqueue": st.lists(
                st.dictionaries(st.sampled_from(["codec", "powersgd_rank", "threshold"]), values)
            ),
        },
    )
)
def test_any_content_of_a_file_is_a_study_or_a_list_of_problems(data: dict[str, Any]) -> None:
    try:
        config = validate_sweep({**BASE, **data})
    except ConfigError as error:
        assert error.problems and str(error)
    else:
        assert validate_sweep(yaml.safe_load(config.to_yaml())) == config
