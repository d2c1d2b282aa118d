"""The loader on thousands of damaged studies: each is refused in words, or is a valid study."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayhive.errors import ConfigError
from rayhive.spec import load_sweep
from rayhive.sweep.dry_run import make_plan
from rayhive.sweep.resolve import resolve


@dataclass(frozen=True)
class Raw:
    """YAML that is written unchanged."""

    text: str


#: Every part of a study, once.
STUDY: dict[str, Any] = {
    "name": "fuzz",
    "workload": {"name": "digits", "args": {"optimizer": "adam", "learning_rate": 0.01}},
    "swarm": {
        "peers": 3,
        "target_batch_size": 256,
        "batch_size": 32,
        "matchmaking_time": 5,
        "node_classes": {
            "fast": {"count": 1, "labels": {"zone": "a-1"}, "gpus": 0.5},
            "slow": {"count": 2, "cpu_share": 0.5, "link": {"rate_mbit": 20, "loss": 0.01}},
        },
    },
    "space": {
        "codec": ["none", "size_adaptive"],
        "threshold": {"low": 256, "high": 4096, "log": True},
        "powersgd_rank": [None, 2],
        "min_compression_ratio": 0.5,
        "delay": "none",
        "average_state_every": ["auto", 4],
        "state_codec": "none",
    },
    "enqueue": [{"codec": "float16"}, {"powersgd_rank": 2, "delay": "state"}],
    "scenarios": ["none", "kill-one", "preempt-notice"],
    "scenario_args": {"preempt-notice": {"notice_s": 2}},
    "across_scenarios": "worst",
    "replicates": 2,
    "objectives": {"time_to_target_s": "minimize"},
    "budget": {"trials": 4, "samples_per_replicate": 10240, "seconds_per_replicate": 300},
    "evaluation": {"every_samples": 512},
    "seed": 1,
    "storage": "sqlite:///fuzz.db",
}

#: What somebody's editor, script or malice may leave in the place of a value or a key.
HOSTILE = (
    *("[1]", "{a: b}", "[]", "{}", "null", "~", "''", "yes", "off", "true", "0", "-1", "1.5"),
    *("9" * 5000, "1" + "0" * 400, str(2**63), str(-(2**63)), str(2**31), "1e400", "1.0e+400"),
    *(".nan", ".inf", "-.inf", "1e-3", "1.0e-9", "1.0e+30", "5e-324", "0x_", "0b_", "1:90", "0o9"),
    *("*study", "&again [*again]", "[*study, *study]", "*nowhere", "!!binary aGk=", "!!binary x"),
    *("2001-01-01", "2001-13-45", "2001-01-01 10:00:00", "!!timestamp x", "!!int q", "!!bool q"),
    *("!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!null x", "!!float x", "!!str 5"),
    *("!!python/object/apply:os.system [exit]", "!unknown x", "[" * 400 + "]" * 400),
    *("{a: " * 60 + "1" + "}" * 60, "{a: 1, a: 2}", "{<<: 3}", "{<<: [*study]}", "{? [a] : 1}"),
    *('"\\ud800"', '"\\0"', '"\\x07"', '"a\\nb"', '"a b"', '"\\u2028"', '"\\x1b[31m"', "\x07"),
    *("../../etc/passwd", "/", "'/'", "nowhere/a.yaml", '"a\\0/b.yaml"', "x" * 5000 + "/"),
    *("x" * 100_000, "'%s %(x)s {0} $x'", "é", "'[bold]'", "digits", "none", "size_adaptive"),
    *("{low: 1, high: 1.0e+308}", "{low: 5, high: 1}", "{low: .nan, high: 1}", "{low: 1}"),
)  # fmt: skip
hostile = st.sampled_from(HOSTILE).map(Raw)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below ``node``."""
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(entries):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def emit(node: Any) -> str:
    """Return YAML in flow style; a mapping is a dict, or a list of pairs whose keys may repeat."""
    if isinstance(node, Raw):
        return node.text
    if isinstance(node, dict):
        return "{" + ", ".join(f"{emit(k)}: {emit(v)}" for k, v in node.items()) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(emit, node)) + "]"
    return json.dumps(node)


class Again(str):
    """A key that differs in Python and is equal in YAML."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A study with one to three of its values or keys replaced, removed, doubled or renamed."""
    study = deepcopy(STUDY)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(study))
        path = draw(st.sampled_from(found))
        holder, last = at(study, path[:-1]), path[-1]
        act = draw(st.sampled_from(("replace", "replace", "remove", "double", "rename", "swap")))
        if act == "replace":
            holder[last] = draw(hostile)
        elif act == "remove":
            del holder[last]
        elif act == "swap":
            holder[last] = deepcopy(at(study, draw(st.sampled_from(found))))
        elif isinstance(holder, list):
            holder.append(holder[last])
        elif act == "double":
            holder[Again(last) if isinstance(last, str) else Raw(last.text)] = draw(hostile)
        else:
            key = draw(hostile | st.sampled_from(("pears", "trails", "nam", "low")))
            holder[key] = holder.pop(last)
    return "&study " + emit(study) + "\n"


paths = [".".join(map(str, path)) for path in places(STUDY)]
overrides = st.lists(
    st.builds(
        "{}={}".format,
        st.sampled_from([*paths, "", ".", "a..b", "swarm.", "name.first", "enqueue.0.codec"]),
        st.sampled_from(HOSTILE),
    )
    | st.text(max_size=20),
    max_size=1,
)


@pytest.fixture(scope="module")
def digits_read_once() -> Iterator[None]:
    """Keep the workload's data between examples, which do not test it."""
    import sklearn.datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", cache(sklearn.datasets.load_digits))
        yield


def hold(text: str, given: list[str], file: Path) -> None:
    """Load a study; a valid one can also be stored and planned."""
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        study = resolve(file, given)
    except ConfigError as error:
        assert error.problems
        told = str(error)
        assert told.replace("\n", "").isprintable()
        assert len(told) < 20_000
    else:
        assert make_plan(study).trials >= 1
        resolved = file.with_suffix(".resolved.yaml")
        resolved.write_text(study.config.to_yaml(), encoding="utf-8")
        assert load_sweep(resolved) == study.config
        json.dumps(study.config.model_dump(mode="json"), allow_nan=False)


quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=200, suppress_health_check=quiet)
@given(text=damaged(), given=overrides)
@pytest.mark.usefixtures("digits_read_once")
def test_a_damaged_study_is_valid_or_refused_with_problems(
    text: str, given: list[str], tmp_path: Path
) -> None:
    hold(text, given, tmp_path / "study.yaml")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=10_000, suppress_health_check=quiet)
@given(text=damaged(), given=overrides)
@pytest.mark.usefixtures("digits_read_once")
def test_ten_thousand_damaged_studies(text: str, given: list[str], tmp_path: Path) -> None:
    hold(text, given, tmp_path / "study.yaml")


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("study", ["{text}", "name: fuzz\nworkload: {text}", "{text}: 1"])
def test_unreadable_files_are_refused_with_problems(text: str, study: str, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(study.replace("{text}", text))
    with pytest.raises(ConfigError):
        resolve(file)


def test_the_undamaged_study_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("&study " + emit(STUDY))
    assert yaml.safe_load(file.read_text()) == STUDY
    assert resolve(file).config.name == "fuzz"
