"""The contract of notice sources, over the registry."""

from __future__ import annotations

import asyncio

import pytest

from rayhive.cluster.node.notices.base import METADATA_VARIABLE, NoticeSource, SourceError
from rayhive.registry import NOTICE_SOURCES
from tests.fixtures.metadata_service import VALUES, metadata_service

SOURCES = [pytest.param(name, source, id=name) for name, source in NOTICE_SOURCES.items()]


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_a_source_describes_itself(name: str, source: type[NoticeSource]) -> None:
    assert issubclass(source, NoticeSource)
    assert source.about and "\n" not in source.about
    assert source.every_s > 0, "a service that answers at once must not be asked without a pause"
    assert isinstance(source.likely(), bool)


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_a_source_that_is_not_there_is_an_error_and_no_notice(
    name: str, source: type[NoticeSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, "http://127.0.0.1:9")  # nothing listens
    for call in (lambda made: made.identify(), lambda made: made.check()):
        with pytest.raises(SourceError):
            asyncio.run(call(source()))


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_a_source_does_not_take_the_service_of_another_cloud_for_its_own(
    name: str, source: type[NoticeSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cloud in VALUES.keys() - {name}:
        with metadata_service(cloud) as service:
            monkeypatch.setenv(METADATA_VARIABLE, service.url)
            with pytest.raises(SourceError):
                asyncio.run(source().identify())
