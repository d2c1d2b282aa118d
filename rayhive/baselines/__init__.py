"""Baselines: other ways to train a workload, measured under the same conditions as the swarm.

One file and one registration line each.
"""

from rayhive.registry import BASELINES

BASELINES.register_lazy("single", "rayhive.baselines.single:Single")
BASELINES.register_lazy("ddp", "rayhive.baselines.ddp:Ddp")
BASELINES.register_lazy("ddp-fp16", "rayhive.baselines.ddp_fp16:DdpFp16")
BASELINES.register_lazy("ddp-powersgd", "rayhive.baselines.ddp_powersgd:DdpPowersgd")
BASELINES.register_lazy("elastic", "rayhive.baselines.elastic:Elastic")
BASELINES.register_lazy("hivemind", "rayhive.baselines.hivemind:Hivemind")
BASELINES.register_lazy("local-sgd", "rayhive.baselines.local_sgd:LocalSGD")
