"""Description of a testbed, in a folder that outlives the process that created it.

The description is sufficient to inspect, change and remove a testbed. Its processes are found by
their namespaces, and the namespaces by their names.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from rayhive.cluster.node.processes import started
from rayhive.cluster.testbed import namespaces
from rayhive.cluster.testbed.config import TestbedNodes
from rayhive.errors import ClusterError
from rayhive.files import write_atomically
from rayhive.spec import Model

#: Folder of all testbeds of this machine: short, as paths of Ray's sockets must be.
BASE = Path("/tmp")
PREFIX = "rayhive-t"
#: File in the folder of a testbed with its description.
FILE = "testbed.json"
_NUMBERS = 200
#: Time after which a folder without a description is stale [s]; it is written within seconds.
_MAKING_S = 60.0
_LAST = 254


class NodeState(TestbedNodes):
    """One node of a testbed, with the fields of its class; the labels include the testbed's own.

    Attributes:
        index: Number of the node, from 0.
        node_class: Name of its class.
        namespace: Its network namespace.
        control_address: Its address for Ray.
        data_address: Its address for peers.
    """

    index: int
    node_class: str
    namespace: str
    control_address: str
    data_address: str


class TestbedState(Model):
    """One testbed.

    Attributes:
        number: Number on this machine; names and addresses contain it.
        name: Name that the user gave.
        mtu: Largest packet on the data plane [bytes].
        netem: Whether the kernel has netem, to delay and drop packets.
        nodes: Nodes, without the head.
        head_port: Port of the head of its Ray cluster.
        groups: Folder of the nodes' control groups; None without control groups.
        owner: Pid and start time of the process that it ends with; None if it stays until it is
            taken down.
        environment: Environment of the raylets.
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
        """Folder of all its files."""
        return folder_of(self.number)

    @property
    def prefix(self) -> str:
        """Prefix of the names of its namespaces and interfaces."""
        return f"rht{self.number}-"

    @property
    def switch(self) -> str:
        """Name of the namespace that connects the links of the data plane."""
        return f"{self.prefix}net"

    def control_address(self, host: int) -> str:
        """Return an address of the control plane."""
        return f"10.201.{self.number}.{host}"

    def data_address(self, host: int) -> str:
        """Return an address of the data plane."""
        return f"10.202.{self.number}.{host}"

    @property
    def head_address(self) -> str:
        """Address of the head and of drivers on the control plane."""
        return self.control_address(_LAST)

    @property
    def address(self) -> str:
        """Address of the Ray cluster."""
        return f"{self.head_address}:{self.head_port}"

    @property
    def data_gateway(self) -> str:
        """Address of the switch on the data plane, the other end of link measurements."""
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
        """Write the description; other users cannot read it, as it may hold a token."""
        write_private(self.folder / FILE, self.model_dump_json(indent=1))

    @property
    def abandoned(self) -> bool:
        """Whether its owner has ended without removing it."""
        return self.owner is not None and started(self.owner[0]) != self.owner[1]


def write_private(path: Path, text: str) -> None:
    """Replace a file that other users cannot read; it is of no use after a restart."""
    write_atomically(path, text, durable=False, mode=0o600)


def folder_of(number: int) -> Path:
    """Return the folder of the testbed of this number."""
    return BASE / f"{PREFIX}{number}"


def load(folder: str | Path) -> TestbedState:
    """Read the description of a testbed.

    Raises:
        ClusterError: The folder has no valid description.
    """
    try:
        text = (Path(folder) / FILE).read_text(encoding="utf-8")
        return TestbedState.model_validate_json(text)
    except (OSError, ValidationError) as error:
        raise ClusterError(f"no testbed in {folder}: {error}") from error


def numbers() -> list[int]:
    """Return the numbers of the testbeds of this machine, incomplete ones included."""
    names = [path.name for path in BASE.glob(f"{PREFIX}*")] + namespaces.named("rht")
    found = (re.fullmatch(rf"{PREFIX}(\d+)|rht(\d+)-\w+", name) for name in names)
    return sorted({int(match[1] or match[2]) for match in found if match is not None})


def testbeds() -> Iterator[TestbedState]:
    """Yield the descriptions of the testbeds of this machine."""
    for number in numbers():
        with contextlib.suppress(ClusterError):
            yield load(folder_of(number))


def owned() -> list[tuple[Path, int]]:
    """Return the folders of testbeds that end with a process that lives, and its pid."""
    found = [testbed for testbed in testbeds() if not testbed.abandoned]
    return [(each.folder, each.owner[0]) for each in found if each.owner is not None]


def claim() -> int:
    """Reserve a free number by creating its folder.

    Raises:
        ClusterError: All numbers are taken.
    """
    taken = numbers()
    for number in sorted(set(range(_NUMBERS)) - set(taken)):
        with contextlib.suppress(FileExistsError):
            folder_of(number).mkdir(mode=0o700)
            return number
    raise ClusterError(f"this machine has {_NUMBERS} testbeds already, the most that there can be")


def stale(number: int) -> bool:
    """Return whether a folder without a description is too old to be of a testbed in creation."""
    try:
        return time.time() - folder_of(number).stat().st_mtime > _MAKING_S
    except FileNotFoundError:
        return True
