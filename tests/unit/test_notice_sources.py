"""Notice sources against a stand-in of each cloud's metadata service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from rayhive.cluster.node.notice_watch import NoticeWatch, found_sources
from rayhive.cluster.node.notices.aws import Aws
from rayhive.cluster.node.notices.azure import Azure
from rayhive.cluster.node.notices.base import METADATA_VARIABLE, NodeNotice, SourceError
from rayhive.cluster.node.notices.gce import NOTICE_S, Gce
from rayhive.errors import ConfigError
from tests.fixtures.metadata_service import (
    EVENTS,
    INTERRUPTION,
    PREEMPTED,
    REBALANCE,
    MetadataStandIn,
    metadata_service,
)

#: Time that a test may take between its clock and that of the source [s].
SLACK_S = 60.0


@pytest.fixture
def service(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MetadataStandIn]:
    with metadata_service(request.param) as found:
        monkeypatch.setenv(METADATA_VARIABLE, found.url)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not used
        yield found


def later(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def is_about(left_s: float | None, wanted: float) -> bool:
    return left_s is not None and wanted - SLACK_S <= left_s <= wanted


def interruption(seconds: float, action: str = "terminate") -> str:
    return json.dumps({"action": action, "time": later(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")})


def event(kind: str, resource: str, seconds: float) -> dict[str, object]:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [resource],
        "EventStatus": "Scheduled",
        "NotBefore": format_datetime(later(seconds), usegmt=True),
        "EventSource": "Platform",
    }


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_aws_tells_an_interruption_with_its_time_and_a_recommendation_as_a_risk(
    service: MetadataStandIn,
) -> None:
    async def run() -> None:
        source = Aws()
        assert await source.identify() == "i-0123456789abcdef0, spot"
        assert await source.check() == []
        service.set(REBALANCE, json.dumps({"noticeTime": "2026-11-05T08:22:00Z"}))
        assert await source.check() == [
            NodeNotice("aws", "rebalance recommendation", certain=False)
        ]
        service.set(INTERRUPTION, interruption(120.0, "stop"))
        first, _ = await source.check()
        assert (first.source, first.what, first.certain) == (
            "aws",
            "spot instance-action: stop",
            True,
        )
        assert is_about(first.left_s, 120.0)

    asyncio.run(run())
    assert service.requests.count(("PUT", "/latest/api/token")) == 1


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_aws_gets_another_token_when_the_first_is_refused(service: MetadataStandIn) -> None:
    async def run() -> None:
        source = Aws()
        await source.check()
        service.tokens.clear()
        service.set(INTERRUPTION, interruption(-5.0))
        (found,) = await source.check()
        assert found.left_s == 0.0, "a time that is over"

    asyncio.run(run())


@pytest.mark.parametrize("service", ["gce"], indirect=True)
def test_gce_answers_when_the_value_changes(service: MetadataStandIn) -> None:
    async def run() -> None:
        source = Gce()
        assert await source.identify() == "4711, preemptible"
        assert await source.check() == []
        waiting = asyncio.ensure_future(source.check())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done, "the service keeps the request until there is news"
        service.set(PREEMPTED, "TRUE")
        assert await waiting == [NodeNotice("gce", "preempted", NOTICE_S)]

    asyncio.run(run())


@pytest.mark.parametrize("service", ["azure"], indirect=True)
def test_azure_tells_the_end_of_this_machine_and_not_of_its_neighbours(
    service: MetadataStandIn,
) -> None:
    async def run() -> None:
        source = Azure()
        assert await source.identify() == "Spot_1, Spot"
        assert await source.check() == []
        harmless = [event("Preempt", "spot_2", 40.0), event("Freeze", "spot_1", 40.0)]
        service.set(EVENTS, json.dumps({"Events": harmless}))
        assert await source.check() == []
        service.set(EVENTS, json.dumps({"Events": [*harmless, event("Preempt", "spot_1", 40.0)]}))
        (found,) = await source.check()
        assert (found.source, found.what) == ("azure", "scheduled event: Preempt")
        assert is_about(found.left_s, 40.0)
        started = {**event("Terminate", "SPOT_1", 0.0), "NotBefore": "", "EventStatus": "Started"}
        service.set(EVENTS, json.dumps({"Events": [started]}))
        assert await source.check() == [NodeNotice("azure", "scheduled event: Terminate", 0.0)]

    asyncio.run(run())


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_a_watch_keeps_each_notice_once_and_survives_a_service_that_fails(
    service: MetadataStandIn,
) -> None:
    async def run() -> None:
        watch = NoticeWatch(pace=0.01)
        service.set(INTERRUPTION, "not JSON")
        watch.add(["aws"])
        watch.add(["aws"])
        assert await watch.notices(0, 0.3) == []
        service.set(INTERRUPTION, interruption(120.0))
        (found,) = await watch.notices(0, 60.0)
        assert is_about(found.left_s, 120.0)
        assert await watch.notices(1, 0.0) == []
        service.set(REBALANCE, "{}")
        (risk,) = await watch.notices(1, 60.0)
        assert not risk.certain
        assert [notice.certain for notice in await watch.notices(0, 0.0)] == [True, False]
        with pytest.raises(ConfigError, match="aws, azure, gce, ray"):
            watch.add(["gcp"])
        await watch.close()

    asyncio.run(run())


def test_a_machine_asks_only_the_sources_that_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def identify(self: object) -> str:
        asked.append(type(self).__name__)
        raise SourceError("a hop limit")

    for source in (Aws, Azure, Gce):
        monkeypatch.setattr(source, "identify", identify)
        monkeypatch.setattr(source, "likely", classmethod(lambda cls: cls is Azure))
    (found,) = asyncio.run(found_sources())
    assert (found.name, found.error) == ("azure", "a hop limit") and asked == ["Azure"]
