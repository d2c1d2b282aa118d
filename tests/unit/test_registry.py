"""A registry looks names up, lazily where asked, and refuses unknown and double ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayhive.errors import ConfigError
from rayhive.registry import Registry


@pytest.fixture
def animals() -> Registry[type]:
    registry: Registry[type] = Registry("animal")

    @registry.register("cat")
    class Cat:
        pass

    registry.register_lazy("fraction", "fractions:Fraction")
    return registry


def test_the_decorator_returns_its_argument(animals: Registry[type]) -> None:
    class Dog:
        pass

    assert animals.register("dog")(Dog) is Dog
    assert animals.get("dog") is Dog


def test_lazy_entry_is_imported_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rayhive_lazy_probe.py").write_text("class Thing: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing")
    registry.register_lazy("thing", "rayhive_lazy_probe:Thing")
    assert "thing" in registry
    assert registry.names() == ("thing",)
    assert "rayhive_lazy_probe" not in sys.modules
    try:
        assert registry.get("thing") is sys.modules["rayhive_lazy_probe"].Thing
        assert registry.get("thing") is registry.get("thing")
    finally:
        sys.modules.pop("rayhive_lazy_probe", None)


def test_the_files_of_a_package_are_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "rayhive_files_probe").mkdir()
    (folder / "__init__.py").touch()
    (folder / "base.py").write_text("raise AssertionError\n")
    (folder / "two_words.py").write_text("class TwoWords: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing")
    registry.register_files("rayhive_files_probe")
    assert registry.names() == ("two_words",)
    assert "rayhive_files_probe.two_words" not in sys.modules
    try:
        assert registry.get("two_words").__name__ == "TwoWords"
    finally:
        for name in ("rayhive_files_probe", "rayhive_files_probe.two_words"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("taken", ["cat", "fraction"])
def test_duplicate_names_are_refused(animals: Registry[type], taken: str) -> None:
    with pytest.raises(ValueError, match=f"animal '{taken}' is registered twice"):
        animals.register(taken)(int)
    with pytest.raises(ValueError, match=f"animal '{taken}' is registered twice"):
        animals.register_lazy(taken, "fractions:Fraction")


def test_unknown_name_lists_the_known_ones_and_the_nearest(animals: Registry[type]) -> None:
    with pytest.raises(ConfigError) as caught:
        animals.get("fractoin")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.nearest) == ("animal", "fractoin", "fraction")
    assert problem.allowed == "one of cat, fraction"


def test_an_unknown_name_is_reported_under_its_key(animals: Registry[type]) -> None:
    with pytest.raises(ConfigError, match=r"^space\.animal: 'dog' is not valid"):
        animals.get("dog", key="space.animal")


def test_names_and_entries_are_sorted(animals: Registry[type]) -> None:
    animals.register("ant")(int)
    assert animals.names() == ("ant", "cat", "fraction")
    assert [name for name, _ in animals.items()] == ["ant", "cat", "fraction"]
    assert dict(animals.items())["ant"] is int
    assert "dog" not in animals
