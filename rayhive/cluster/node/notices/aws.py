"""Notice source ``aws``: interruption notices and rebalance recommendations of EC2.

The paths, the session token and the fields are those of the pages "Use the Instance Metadata
Service", "Spot Instance interruption notices" and "EC2 instance rebalance recommendations" of the
Amazon EC2 User Guide.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone

from rayhive.cluster.node.notices.base import (
    MetadataService,
    NodeNotice,
    NoticeSource,
    SourceError,
    firmware,
    seconds_until,
)

_TOKEN_S = 21_600
#: Time before its expiry from which a token is not used any more [s].
_SPARE_S = 300.0
_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Aws(NoticeSource):
    """EC2's Instance Metadata Service, version 2. A spot interruption comes two minutes before."""

    about = "AWS EC2: spot interruption notices and rebalance recommendations"
    every_s = 5.0

    def __init__(self) -> None:
        self._service = MetadataService()
        self._token, self._expires = "", 0.0

    @classmethod
    def likely(cls) -> bool:
        """Return whether the firmware is that of EC2, on Nitro or on Xen."""
        return firmware("sys_vendor") == "Amazon EC2" or "amazon" in firmware("bios_version")

    async def identify(self) -> str:
        """Return the instance's id and its kind, such as ``spot``."""
        instance = await self._get("/latest/meta-data/instance-id")
        kind = await self._get("/latest/meta-data/instance-life-cycle")
        if instance is None:
            raise SourceError(f"{self._service.url}: it does not tell the instance's id")
        return f"{instance}, {kind or 'unknown life cycle'}"

    async def check(self) -> list[NodeNotice]:
        """Return the interruption and the recommendation, if there are any."""
        found = []
        action = _fields(await self._get(_INTERRUPTION))
        if action is not None:
            what = f"spot instance-action: {action.get('action')}"
            found.append(NodeNotice("aws", what, _left(action.get("time"))))
        advice = _fields(await self._get(_REBALANCE))
        if advice is not None:
            found.append(NodeNotice("aws", "rebalance recommendation", certain=False))
        return found

    async def _get(self, path: str) -> str | None:
        """Return a value; None if there is none now."""
        answer = await self._service.request("GET", path, await self._session())
        if answer.status == 401:  # the token was revoked, or the clock was set
            self._expires = 0.0
            answer = await self._service.request("GET", path, await self._session())
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise SourceError(f"{self._service.url}{path}: status {answer.status}")
        return answer.text

    async def _session(self) -> dict[str, str]:
        """Return the header with a valid session token."""
        if time.monotonic() >= self._expires - _SPARE_S:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            answer = await self._service.request("PUT", "/latest/api/token", lifetime)
            if answer.status != 200:
                raise SourceError(f"{self._service.url}: no session token: status {answer.status}")
            self._token, self._expires = answer.text, time.monotonic() + _TOKEN_S
        return {"X-aws-ec2-metadata-token": self._token}


def _fields(text: str | None) -> dict[str, object] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SourceError(f"not JSON: {text[:80]!r}") from error
    return found if isinstance(found, dict) else {}


def _left(moment: object) -> float | None:
    """Return the time until a moment such as ``2017-09-18T08:22:00Z`` [s]; None if it is none."""
    try:
        when = datetime.strptime(str(moment), "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return None
    return seconds_until(when.replace(tzinfo=timezone.utc))
