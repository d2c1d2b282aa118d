"""Process group of the members of a baseline: how they meet, agree, and what they send."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from rayhive.baselines.base import REASONS
from rayhive.errors import PeerError


def interface_of(host: str) -> str:
    """Return the name of the network interface with an IPv4 or IPv6 address.

    Raises:
        PeerError: This machine has no such address.
    """
    families = socket.AF_INET, socket.AF_INET6
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family in families and each.address == host for each in addresses):
            return name
    raise PeerError(f"no network interface has the address {host}")


def listening_store(host: str, members: int, timeout_s: float) -> tuple[TCPStore, str]:
    """Return a new store of a process group, and its address.

    Args:
        host: Address of this member.
        members: Number of members.
        timeout_s: Longest wait for a member [s].
    """
    store = TCPStore(host, 0, members, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    return store, f"tcp://{f'[{host}]' if ':' in host else host}:{store.port}"


def store_at(address: str, members: int, timeout_s: float) -> TCPStore:
    """Return the store at an address; see :func:`listening_store`."""
    place = urlsplit(address)
    return TCPStore(
        str(place.hostname), int(place.port or 0), members, False, timedelta(seconds=timeout_s)
    )


def use_interface(host: str) -> None:
    """Have gloo and nccl use the link of an address."""
    name = interface_of(host)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def ring_bytes(size: int, members: int) -> int:
    """Return what a member sends in an all-reduce around a ring [B]: 2(N-1)/N of the tensor.

    Gloo and nccl reduce around a ring (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations").

    Args:
        size: Size of the tensor [B].
        members: Number N of members.
    """
    return round(2 * (members - 1) * size / members)


class Traffic:
    """Bytes and times of the all-reduces of each round.

    It replaces ``torch.distributed.all_reduce`` in this process: torch's communication hooks call
    it with the tensors as they are sent, whatever they made of the gradients.

    Args:
        clock: Monotonic time [s].
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._reduce = clock, dist.all_reduce
        self._round_began = clock()
        self._begin()

    def _begin(self) -> None:
        self._sizes: list[int] = []
        self._first = self._last = self._ended = 0.0

    def install(self) -> None:
        """Count the all-reduces from now on."""
        dist.all_reduce = self._counted

    def remove(self) -> None:
        """Count no further all-reduces."""
        dist.all_reduce = self._reduce

    def _counted(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._sizes.append(tensor.numel() * tensor.element_size())
        return self._reduce(tensor, *args, **kwargs)

    def restart(self) -> None:
        """Begin the first round now."""
        self._round_began = self._clock()
        self._begin()

    def bucket_ready(self) -> None:
        """Take note that the gradients of a bucket are there."""
        self._last = self._clock()
        self._first = self._first or self._last

    def backward_ended(self) -> None:
        """Take note of the end of a backward pass."""
        self._ended = self._clock()

    def round_fields(self, members: int) -> dict[str, Any]:
        """Return bytes and times of the round that ends, and begin the next one.

        The peer *waits* from the last bucket, when its own gradients are complete, to the end of
        the backward pass, which ends with the last all-reduce. The averaging lasts from the first
        bucket on, partly beside the backward pass.

        Args:
            members: Number of members.
        """
        sent = sum(ring_bytes(size, members) for size in self._sizes)
        fields: dict[str, Any] = {"sent_bytes": sent, "received_bytes": sent}
        if self._first:
            fields |= {
                "accumulating_s": self._last - self._round_began,
                "waited_s": self._ended - self._last,
                "averaging_s": self._ended - self._first,
            }
        self.restart()
        return fields


class Agreement:
    """Agreement of all members on the round after which they stop.

    A member that stopped alone would leave the others in a collective. Each round ends with an
    all-reduce of the members' reasons that runs in the background; its result counts at the end of
    the next round, when it has arrived long since.

    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._reduce = dist.all_reduce
        self._pending: tuple[Any, torch.Tensor] | None = None

    def after_round(self, reason: str | None) -> str | None:
        """Return the reason to stop that the members had at the end of the round before.

        Args:
            reason: Reason of this member; None to go on.
        """
        agreed = self.settle()
        known = reason if reason in REASONS else "stop"
        code = torch.tensor([0 if reason is None else 1 + REASONS.index(known)])
        work = self._reduce(code, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = work, code
        return agreed

    def limit(self, timeout: timedelta) -> None:
        """Set the longest wait for a member, from the next exchange on; at first it is torch's."""
        _set_pg_timeout(timeout, self._group)

    def meet(self) -> None:
        """Wait for all members."""
        dist.barrier(group=self._group)

    def settle(self) -> str | None:
        """Wait for the last exchange, and return its result."""
        if self._pending is None:
            return None
        work, code = self._pending
        self._pending = None
        work.wait()
        number = int(code.item())
        return REASONS[number - 1] if number else None
