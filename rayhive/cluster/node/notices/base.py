"""Interface of the sources of preemption notices, and access to a cloud's metadata service."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import ClassVar

import aiohttp

#: Address of the metadata service of AWS, Azure and Google Cloud, reached from a machine only.
METADATA_URL = "http://169.254.169.254"
#: Variable that replaces :data:`METADATA_URL`, as for the service's IPv6 address.
METADATA_VARIABLE = "RAYHIVE_METADATA_URL"
#: Time limit of a request that is answered at once [s].
ANSWER_S = 5.0
_FIRMWARE = Path("/sys/class/dmi/id")


class SourceError(Exception):
    """A source does not answer, or not as documented."""


@dataclass(frozen=True)
class NodeNotice:
    """Announcement that a node will be taken away.

    Attributes:
        source: Name of the source.
        what: The announcement in the words of the source.
        left_s: Time until the node is taken away [s]; None if the source does not say it.
        certain: Whether the node will be taken away; False for a raised risk.
    """

    source: str
    what: str
    left_s: float | None = None
    certain: bool = True


class NoticeSource(ABC):
    """One source of preemption notices, asked on the node that they are about.

    Attributes:
        about: Description on one line.
        every_s: Time between two checks [s].
    """

    about: ClassVar[str]
    every_s: ClassVar[float] = 5.0

    @classmethod
    @abstractmethod
    def likely(cls) -> bool:
        """Return whether this node may have the source, without asking it over a network."""

    @abstractmethod
    async def identify(self) -> str:
        """Return a short description of the node by the source, which shows that it answers.

        Raises:
            SourceError: The source is not there.
        """

    @abstractmethod
    async def check(self) -> list[NodeNotice]:
        """Return the notices in force; the call may wait for a change.

        Raises:
            SourceError: The source does not answer.
        """


def firmware(field: str) -> str:
    """Return a field of the machine's firmware, as ``sys_vendor``; empty if it is unknown."""
    try:
        return (_FIRMWARE / field).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def seconds_until(when: datetime) -> float:
    """Return the time until a moment, 0 for one that is over [s]."""
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())


@dataclass(frozen=True)
class Answer:
    """Answer of a metadata service.

    Attributes:
        status: HTTP status.
        text: Body.
        headers: Headers; the case of their names does not matter.
    """

    status: int
    text: str
    headers: Mapping[str, str]


class MetadataService:
    """HTTP requests to the metadata service of a cloud, never through a proxy."""

    def __init__(self) -> None:
        self.url = os.environ.get(METADATA_VARIABLE, METADATA_URL).rstrip("/")

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        timeout: float = ANSWER_S,
    ) -> Answer:
        """Return the answer to a request.

        Args:
            method: HTTP method.
            path: Path below the address of the service.
            headers: Headers of the request.
            params: Query of the request.
            timeout: Longest wait [s].

        Raises:
            SourceError: There is no answer.
        """
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, trust_env=False) as session,
                session.request(
                    method, self.url + path, headers=headers, params=params, allow_redirects=False
                ) as response,
            ):
                return Answer(response.status, await response.text(), response.headers)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            why = str(error) or f"no answer within {timeout:g} s"
            raise SourceError(f"{self.url}{path}: {why}") from error

    async def get(
        self,
        path: str,
        headers: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        timeout: float = ANSWER_S,
    ) -> Answer:
        """Return the answer to a GET request that succeeded; the arguments are those above.

        Raises:
            SourceError: There is no answer, or its status is not 200.
        """
        answer = await self.request("GET", path, headers, params, timeout)
        if answer.status != 200:
            raise SourceError(f"{self.url}{path}: status {answer.status}")
        return answer
