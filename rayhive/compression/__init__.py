"""Codecs, PowerSGD, and the bytes of a round, predicted from shapes.

Importing this package registers every codec by name and imports nothing heavy: torch and hivemind
are imported by :meth:`rayhive.compression.codecs.base.Codec.build`.
"""

from __future__ import annotations

from rayhive.registry import CODECS

CODECS.register_lazy("none", "rayhive.compression.codecs.none:Plain")
CODECS.register_lazy("float16", "rayhive.compression.codecs.float16:Float16")
CODECS.register_lazy("scaled_float16", "rayhive.compression.codecs.scaled_float16:ScaledFloat16")
CODECS.register_lazy("uniform8", "rayhive.compression.codecs.uniform8:Uniform8")
CODECS.register_lazy("quantile8", "rayhive.compression.codecs.quantile8:Quantile8")
CODECS.register_lazy("blockwise8", "rayhive.compression.codecs.blockwise8:Blockwise8")
CODECS.register_lazy("size_adaptive", "rayhive.compression.codecs.size_adaptive:SizeAdaptive")
CODECS.register_lazy("blockwise4", "rayhive.compression.codecs.blockwise4:Blockwise4")
CODECS.register_lazy("blockwise2", "rayhive.compression.codecs.blockwise2:Blockwise2")
CODECS.register_lazy("sign", "rayhive.compression.codecs.sign:Sign")
CODECS.register_lazy("topk", "rayhive.compression.codecs.topk:Topk")
