"""What is known of a testbed, in a folder that outlives who made it.

Nothing else is needed to look at a testbed, to change it or to remove it; processes are found by
the namespaces that they are in, and namespaces by their names.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from rayhive.cluster.node import process_group
from rayhive.cluster.testbed import namespaces
from rayhive.errors import ClusterError
from rayhive.files import write_atomically
from rayhive.spec import Link, Model

#: Where testbeds lie: short, for the sockets of Ray below, and the same for everybody.
BASE = Path("/tmp")
PREFIX = "rayhive-t"
#: In the folder of a testbed: what is known of it.
FILE = "testbed.json"
_NUMBERS = 200
#: Between making the folder and writing into it there is much less [s].
_MAKING_S = 60.0
_LAST = 254


class NodeState(Model):
    """One node.

    Attributes:
        index: Its number, from 0.
        node_class: Its class.
        namespace: Its network namespace.
        control_address: Its address for Ray.
        data_address: Its address for peers.
        labels: All of its Ray labels.
        num_cpus: CPUs that it claims to have.
        cpu_share: Cores' worth of time that it may use; None for no limit.
        link: The link that it was made with.
    """

    index: int
    node_class: str
    namespace: str
    control_address: str
    data_address: str
    labels: dict[str, str]
    num_cpus: int
    cpu_share: float | None
    link: Link


class TestbedState(Model):
    """One testbed.

    Attributes:
        number: Its number on this machine, of which names and addresses are made.
        name: What its user calls it.
        mtu: Largest packet on the data plane [bytes].
        netem: Whether the kernel delays and loses packets itself.
        nodes: Its nodes; the head is not one of them.
        head_port: Port of the head of its Ray cluster.
        groups: Control groups' folder for its nodes; None where there is none.
        owner: Pid and start of the process that it ends with; None if ``down`` ends it.
        environment: What the raylets are started with.
    """

    number: int
    name: str
    mtu: int
    netem: bool = False
    nodes: tuple[NodeState, ...]
    head_port: int = 0
    groups: str | None = None
    owner: tuple[int, int] | None = None
    environment: dict[str, str] = Field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where all its files are."""
        return folder_of(self.number)

    @property
    def prefix(self) -> str:
        """What the names of its namespaces and interfaces begin with."""
        return f"rht{self.number}-"

    @property
    def switch(self) -> str:
        """The namespace in which the data plane's links meet."""
        return f"{self.prefix}net"

    def control_address(self, host: int) -> str:
        """Return an address of the control plane."""
        return f"10.201.{self.number}.{host}"

    def data_address(self, host: int) -> str:
        """Return an address of the data plane."""
        return f"10.202.{self.number}.{host}"

    @property
    def head_address(self) -> str:
        """The address of the machine's own network on the control plane: of head and drivers."""
        return self.control_address(_LAST)

    @property
    def address(self) -> str:
        """Where the head listens."""
        return f"{self.head_address}:{self.head_port}"

    @property
    def data_gateway(self) -> str:
        """The address of the switch of the data plane, which links are measured against."""
        return self.data_address(_LAST)

    def node(self, index: int) -> NodeState:
        """Return one node.

        Raises:
            ClusterError: There is no such node.
        """
        if not 0 <= index < len(self.nodes):
            raise ClusterError(f"the testbed has nodes 0 to {len(self.nodes) - 1}, not {index}")
        return self.nodes[index]

    def save(self) -> None:
        """Write it into its folder, which others cannot read: it may hold a token."""
        write_private(self.folder / FILE, self.model_dump_json(indent=1))

    @property
    def abandoned(self) -> bool:
        """Whether the process that it should have ended with is gone."""
        return self.owner is not None and process_group.started(self.owner[0]) != self.owner[1]


def write_private(path: Path, text: str) -> None:
    """Replace a file that other users cannot read; it is of no use after a restart."""
    write_atomically(path, text, durable=False, mode=0o600)


def folder_of(number: int) -> Path:
    """Return the folder of the testbed of this number."""
    return BASE / f"{PREFIX}{number}"


def load(folder: str | Path) -> TestbedState:
    """Read what is known of a testbed.

    Raises:
        ClusterError: There is none in this folder.
    """
    try:
        text = (Path(folder) / FILE).read_text(encoding="utf-8")
        return TestbedState.model_validate_json(text)
    except (OSError, ValidationError) as error:
        raise ClusterError(f"no testbed in {folder}: {error}") from error


def numbers() -> list[int]:
    """Return the numbers of the testbeds of this machine, half-made and half-removed ones too."""
    names = [path.name for path in BASE.glob(f"{PREFIX}*")] + namespaces.named("rht")
    found = (re.fullmatch(rf"{PREFIX}(\d+)|rht(\d+)-\w+", name) for name in names)
    return sorted({int(match[1] or match[2]) for match in found if match is not None})


def testbeds() -> Iterator[TestbedState]:
    """Yield the testbeds of this machine."""
    for number in numbers():
        with contextlib.suppress(ClusterError):
            yield load(folder_of(number))


def claim() -> int:
    """Take a number that no testbed has, by making its folder.

    Raises:
        ClusterError: All are taken.
    """
    taken = numbers()
    for number in sorted(set(range(_NUMBERS)) - set(taken)):
        with contextlib.suppress(FileExistsError):
            folder_of(number).mkdir(mode=0o700)
            return number
    raise ClusterError(f"{_NUMBERS} testbeds are too many for one machine")


def stale(number: int) -> bool:
    """Return whether a testbed of which nothing is written is not just being made."""
    try:
        return time.time() - folder_of(number).stat().st_mtime > _MAKING_S
    except FileNotFoundError:
        return True
