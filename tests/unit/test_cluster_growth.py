"""Detection of an autoscaler from its reports to Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.cluster import capacity

MIRRORED = "node_8dd395950f073be402edd064b5fa5eb02596e552edeaaa022e55b6cd"


def first(**report: Any) -> dict[str, Any]:
    return {"monitor_pid": 1, "autoscaler_report": {"pending_nodes": [], **report}}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"monitor_pid": 1}, None),  # the monitor has just started
        (first(active_nodes={}, node_type_mapping=None), None),
        (first(active_nodes={MIRRORED: 1}, node_type_mapping={"a": MIRRORED}), False),
        (first(active_nodes={}, node_type_mapping={"a": "ray.head.default"}), True),
        (first(node_type_mapping={"a": MIRRORED}, pending_launches={"worker": 1}), True),
        (first(node_type_mapping={}, pending_nodes=[["a", "worker", "starting"]]), True),
    ],
)
def test_the_first_version_names_its_types(status: dict[str, Any], expected: bool | None) -> None:
    assert capacity.first_version_grows(status) is expected


@pytest.mark.parametrize(
    ("version", "types", "expected"),
    [
        ("0", ["worker"], None),  # nodes of a service that starts them, and no autoscaler
        (None, [], None),
        ("12", [MIRRORED], False),
        ("12", [MIRRORED, "workers"], True),
    ],
)
def test_the_second_version_counts_its_reports(
    version: str | None, types: list[str], expected: bool | None
) -> None:
    nodes = [SimpleNamespace(ray_node_type_name=name) for name in types]
    status = SimpleNamespace(
        stats=SimpleNamespace(autoscaler_version=version),
        idle_nodes=nodes,
        **dict.fromkeys(("active_nodes", "pending_nodes"), ()),
        **dict.fromkeys(("pending_launches", "failed_launches"), ()),
    )
    assert capacity.second_version_grows(status) is expected


def test_a_first_report_is_awaited_and_missing_internals_mean_no_autoscaler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([None, None, True])

    def broken() -> bool:
        raise AttributeError("no such internal")

    monkeypatch.setattr(capacity, "_POLL", 0.0)
    monkeypatch.setattr(capacity, "_SOURCES", (broken, lambda: next(answers)))
    assert capacity.grows(60.0)
    monkeypatch.setattr(capacity, "_SOURCES", (broken,))
    assert not capacity.grows()
