"""Notice source ``gce``: preemption of a spot or preemptible VM of Google Compute Engine.

The key ``instance/preempted``, the header and the parameters of the wait are those of the pages
"About VM metadata", "View and query VM metadata" and "Spot VMs" of the Compute Engine
documentation.
"""

from __future__ import annotations

from rayhive.cluster.node.notices.base import (
    ANSWER_S,
    MetadataService,
    NodeNotice,
    NoticeSource,
    SourceError,
    firmware,
)

#: Time between the notice and the end of the VM, as far as it is kept [s].
NOTICE_S = 30.0
#: Longest wait of the service for a change [s].
_WAIT_S = 60
_FLAVOR = {"Metadata-Flavor": "Google"}
_ROOT = "/computeMetadata/v1/instance"


class Gce(NoticeSource):
    """Compute Engine's metadata server, which answers when the value changes."""

    about = "Google Compute Engine: preemption of spot VMs"
    every_s = 1.0  # the service itself waits

    def __init__(self) -> None:
        self._service = MetadataService()
        self._etag: str | None = None

    @classmethod
    def likely(cls) -> bool:
        """Return whether the firmware is that of Compute Engine."""
        return firmware("product_name") == "Google Compute Engine"

    async def identify(self) -> str:
        """Return the VM's id, and whether it can be preempted."""
        number = await self._service.get(f"{_ROOT}/id", _FLAVOR)
        if number.headers.get("Metadata-Flavor") != "Google":
            raise SourceError(f"{self._service.url}: not Google's metadata server")
        kind = await self._service.get(f"{_ROOT}/scheduling/preemptible", _FLAVOR)
        return f"{number.text}, {'preemptible' if kind.text == 'TRUE' else 'not preemptible'}"

    async def check(self) -> list[NodeNotice]:
        """Return the preemption; from the second call on, wait for a change of the value."""
        params: dict[str, str] = {}
        if self._etag is not None:
            params = {
                "wait_for_change": "true",
                "last_etag": self._etag,
                "timeout_sec": str(_WAIT_S),
            }
        patience = _WAIT_S + ANSWER_S if params else ANSWER_S
        answer = await self._service.get(f"{_ROOT}/preempted", _FLAVOR, params, patience)
        self._etag = answer.headers.get("ETag", "0")
        if answer.text.strip() != "TRUE":
            return []
        return [NodeNotice("gce", "preempted", NOTICE_S)]
