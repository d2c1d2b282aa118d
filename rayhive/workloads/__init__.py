"""What a swarm trains: one file a workload, registered by name and imported when asked for.

Nothing heavy is imported here; :func:`rayhive.workloads.loading.load_workload` makes a workload
from its name, or from the import path of somebody's own.
"""

from __future__ import annotations

from rayhive.registry import WORKLOADS

WORKLOADS.register_lazy("digits", "rayhive.workloads.digits:Digits")
WORKLOADS.register_lazy("lstm_wikitext2", "rayhive.workloads.lstm_wikitext2:LstmWikitext2")
WORKLOADS.register_lazy("resnet18_cifar10", "rayhive.workloads.resnet18_cifar10:Resnet18Cifar10")
WORKLOADS.register_lazy("source_lm", "rayhive.workloads.source_lm:SourceLm")

__all__ = ["WORKLOADS"]
