"""Configuration of a testbed: its nodes by class, and their links."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, ValidationError

from rayhive.errors import ConfigError, Problem
from rayhive.spec import Link, Model, SwarmConfig
from rayhive.spec.loading import as_problem
from rayhive.spec.yaml_data import read_mapping

#: Environment variables of every process on a testbed: its folder, and the number of the node.
TESTBED_VARIABLE, NODE_VARIABLE = "RAYHIVE_TESTBED", "RAYHIVE_TESTBED_NODE"
#: Prefix of the labels that a testbed sets.
PREFIX = "rayhive.io/"
#: Label of a node: its address on the data plane, where peers listen.
DATA_ADDRESS_LABEL = "rayhive.io/data-address"
#: Label of a node: its class.
CLASS_LABEL = "rayhive.io/node-class"
#: Label of a node: its number in the testbed.
NUMBER_LABEL = "rayhive.io/testbed-node"
#: Labels of a node: the shape of its link, and its CPU quota.
LINK_LABEL, SHARE_LABEL = "rayhive.io/link", "rayhive.io/cpu-share"
_MOST_NODES = 64


def shape_labels(link: Link | None, cpu_share: float | None) -> dict[str, str]:
    """Return the labels for the shape of a node.

    Args:
        link: Shape of the link; None to leave the label out.
        cpu_share: CPU quota [cores]; None to leave the label out.
    """
    labels = {}
    if link is not None:
        rate = "unshaped" if link.rate_mbit is None else f"{link.rate_mbit:g}mbit"
        labels[LINK_LABEL] = f"{rate}_{link.delay_ms:g}ms_{link.loss:g}lost"
    if cpu_share is not None:
        labels[SHARE_LABEL] = f"{cpu_share:g}"
    return labels


class TestbedNodes(Model):
    """A class of equal nodes.

    Attributes:
        count: Number of nodes.
        labels: Ray node labels, in addition to the testbed's own.
        num_cpus: CPUs that each node declares to Ray.
        cpu_share: CPU time that each node may use [cores]; None for no limit.
        link: Shape of each node's link in each direction: a round trip between two nodes takes
            twice the sum of their delays.
    """

    __test__: ClassVar[bool] = False

    count: int = Field(default=1, ge=1)
    labels: dict[str, str] = Field(default_factory=dict)
    num_cpus: int = Field(default=1, ge=1)
    cpu_share: float | None = Field(default=None, gt=0)
    link: Link = Link()

    def labels_of(self, node_class: str, index: int, data_address: str) -> dict[str, str]:
        """Return all labels of one of the nodes.

        Args:
            node_class: Name of the class.
            index: Number of the node.
            data_address: Its address for peers.
        """
        own = {CLASS_LABEL: node_class, NUMBER_LABEL: str(index), DATA_ADDRESS_LABEL: data_address}
        return {**self.labels, **own, **shape_labels(self.link, self.cpu_share)}


class TestbedConfig(Model):
    """One testbed.

    Attributes:
        name: Name for ``rayhive testbed status`` and ``down``.
        node_classes: Nodes, by the name of their class.
        mtu: Largest packet on the links between peers [bytes]. Larger packets cost less CPU time;
            with 1500, lossy links behave more like the Internet.
    """

    __test__: ClassVar[bool] = False

    name: str = Field(default="testbed", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    node_classes: dict[str, TestbedNodes] = Field(min_length=1)
    mtu: int = Field(default=9000, ge=576, le=16000)

    @property
    def nodes(self) -> list[tuple[str, TestbedNodes]]:
        """Name and description of the class of each node, in order."""
        return [(name, item) for name, item in self.node_classes.items() for _ in range(item.count)]

    @classmethod
    def of_swarm(cls, swarm: SwarmConfig, name: str = "testbed", spare: int = 0) -> TestbedConfig:
        """Return a testbed with a node for each peer of a swarm, of the peer's node class.

        Args:
            swarm: The swarm.
            name: Name of the testbed.
            spare: Number of additional nodes of the last class, for peers that join later.
        """
        threads = swarm.threads_per_peer
        classes = {
            key: TestbedNodes(
                count=item.count,
                labels=dict(item.labels),
                num_cpus=threads,
                cpu_share=item.cpu_share * threads,
                link=item.link or Link(),
            )
            for key, item in (swarm.node_classes or {}).items()
        } or {"node": TestbedNodes(count=swarm.peers, num_cpus=threads)}
        last = list(classes)[-1]
        more = classes[last].model_copy(update={"count": classes[last].count + spare})
        return cls(name=name, node_classes={**classes, last: more})


def load_testbed(path: str | Path) -> TestbedConfig:
    """Read the configuration of a testbed from a YAML file.

    Raises:
        ConfigError: The file has mistakes; all of them are listed.
    """
    problems: list[Problem] = []
    data = read_mapping(Path(path), problems)
    try:
        config = TestbedConfig.model_validate(data)
    except ValidationError as error:
        problems += [as_problem(item, TestbedConfig) for item in error.errors()]
        raise ConfigError(problems, str(path)) from error
    problems += [
        Problem(f"node_classes.{name}.labels", label, "a label that the testbed does not set")
        for name, item in config.node_classes.items()
        for label in item.labels
        if label.startswith(PREFIX)
    ]
    if len(config.nodes) > _MOST_NODES:
        problems.append(
            Problem("node_classes", len(config.nodes), f"at most {_MOST_NODES} nodes in all")
        )
    if problems:
        raise ConfigError(problems, str(path))
    return config
