"""Fault kinds and the scenarios that plan them, one file each."""

from __future__ import annotations

from rayhive.faults.library import register_library
from rayhive.registry import FAULTS

FAULTS.register_lazy("rate", "rayhive.faults.kinds.rate:Rate")
FAULTS.register_lazy("delay", "rayhive.faults.kinds.delay:Delay")
FAULTS.register_lazy("loss", "rayhive.faults.kinds.loss:Loss")
FAULTS.register_lazy("partition", "rayhive.faults.kinds.partition:Partition")
FAULTS.register_lazy("flapping", "rayhive.faults.kinds.flapping:Flapping")

FAULTS.register_lazy("clock_skew", "rayhive.faults.kinds.clock_skew:ClockSkew")
FAULTS.register_lazy("corrupt_state", "rayhive.faults.kinds.corrupt_state:CorruptState")
FAULTS.register_lazy("nan_gradient", "rayhive.faults.kinds.nan_gradient:NanGradient")
FAULTS.register_lazy("scaled_gradient", "rayhive.faults.kinds.scaled_gradient:ScaledGradient")
FAULTS.register_lazy("sign_flip", "rayhive.faults.kinds.sign_flip:SignFlip")
FAULTS.register_lazy("stale_gradient", "rayhive.faults.kinds.stale_gradient:StaleGradient")

FAULTS.register_lazy("kill", "rayhive.faults.kinds.kill:Kill")
FAULTS.register_lazy("preempt", "rayhive.faults.kinds.preempt:Preempt")
FAULTS.register_lazy("pause", "rayhive.faults.kinds.pause:Pause")
FAULTS.register_lazy("kill_p2pd", "rayhive.faults.kinds.kill_p2pd:KillP2pd")
FAULTS.register_lazy("kill_averager", "rayhive.faults.kinds.kill_averager:KillAverager")
FAULTS.register_lazy("join", "rayhive.faults.kinds.join:Join")
FAULTS.register_lazy("leave", "rayhive.faults.kinds.leave:Leave")
FAULTS.register_lazy("kill_node", "rayhive.faults.kinds.kill_node:KillNode")
FAULTS.register_lazy("drain_node", "rayhive.faults.kinds.drain_node:DrainNode")
FAULTS.register_lazy("straggler", "rayhive.faults.kinds.straggler:Straggler")
FAULTS.register_lazy("memory_pressure", "rayhive.faults.kinds.memory_pressure:MemoryPressure")
FAULTS.register_lazy("disk_full", "rayhive.faults.kinds.disk_full:DiskFull")

register_library()
