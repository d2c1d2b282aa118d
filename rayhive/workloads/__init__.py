"""Workloads, one file each: a module, its data and its target.

A workload is registered by name and imported on first use.
:func:`rayhive.workloads.loading.load_workload` makes one from its name or from an import path.
"""

from __future__ import annotations

from rayhive.registry import WORKLOADS

WORKLOADS.register_lazy("digits", "rayhive.workloads.digits:Digits")
WORKLOADS.register_lazy("lstm_wikitext2", "rayhive.workloads.lstm_wikitext2:LstmWikitext2")
WORKLOADS.register_lazy("resnet18_cifar10", "rayhive.workloads.resnet18_cifar10:Resnet18Cifar10")
WORKLOADS.register_lazy("source_lm", "rayhive.workloads.source_lm:SourceLm")

__all__ = ["WORKLOADS"]
