"""Notice source ``azure``: scheduled events that end a virtual machine of Azure.

The API version, the header and the fields are those of the page "Azure Metadata Service: Scheduled
Events for Linux VMs" of the Azure documentation.
"""

from __future__ import annotations

import json
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import Any

from rayhive.cluster.node.notices.base import (
    MetadataService,
    NodeNotice,
    NoticeSource,
    SourceError,
    firmware,
    seconds_until,
)

#: Types of events after which the machine is gone; after the other ones it continues.
ENDING = ("Preempt", "Terminate")
#: Longest wait for the events [s]: the first request activates the service.
_PATIENCE_S = 120.0
_HEADERS = {"Metadata": "true"}
#: Asset tag of the chassis of every virtual machine of Azure.
_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"


class Azure(NoticeSource):
    """Azure's scheduled events. A spot machine is evicted 30 seconds after its event at least.

    The events are not acknowledged: an acknowledgement makes the eviction come earlier.
    """

    about = "Azure: eviction of spot virtual machines"
    every_s = 2.0

    def __init__(self) -> None:
        self._service = MetadataService()
        self._name = ""

    @classmethod
    def likely(cls) -> bool:
        """Return whether the firmware is that of Azure."""
        return firmware("chassis_asset_tag") == _ASSET_TAG

    async def identify(self) -> str:
        """Return the name of the machine and its priority."""
        compute = await self._compute()
        return f"{compute['name']}, {compute.get('priority') or 'Regular'}"

    async def check(self) -> list[NodeNotice]:
        """Return the events that end this machine; a list has those of its neighbours, too."""
        if not self._name:
            self._name = str((await self._compute())["name"])
        found = await self._json("/metadata/scheduledevents", "2020-07-01", _PATIENCE_S)
        events = found.get("Events")
        return [
            NodeNotice("azure", f"scheduled event: {event.get('EventType')}", _left(event))
            for event in (events if isinstance(events, list) else ())
            if event.get("EventType") in ENDING
            and self._name.lower() in (str(name).lower() for name in event.get("Resources") or ())
        ]

    async def _compute(self) -> dict[str, Any]:
        found = await self._json("/metadata/instance/compute", "2021-02-01")
        if not found.get("name"):
            raise SourceError(f"{self._service.url}: it does not tell the machine's name")
        return found

    async def _json(self, path: str, version: str, timeout: float = 5.0) -> dict[str, Any]:
        query = {"api-version": version}
        answer = await self._service.get(path, _HEADERS, query, timeout)
        try:
            found = json.loads(answer.text)
        except ValueError as error:
            raise SourceError(f"{self._service.url}{path}: not JSON") from error
        if not isinstance(found, dict):
            raise SourceError(f"{self._service.url}{path}: not an object")
        return found


def _left(event: dict[str, Any]) -> float | None:
    """Return the time until an event may begin [s]: 0 if it has begun."""
    moment = event.get("NotBefore")
    if not moment:
        return 0.0 if event.get("EventStatus") == "Started" else None
    try:
        when = parsedate_to_datetime(str(moment))
    except ValueError:
        return None
    return seconds_until(when if when.tzinfo else when.replace(tzinfo=timezone.utc))
