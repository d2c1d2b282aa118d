"""Description of how a peer rounds: peers with equal descriptions compute equal bits."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def arithmetic(device: torch.device) -> str:
    """Return, on one line, what decides how a peer rounds when it trains on a device."""
    parts = [
        f"torch {torch.__version__}",
        _processor(),
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",
    ]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join(parts)


def _processor() -> str:
    """Return the model of the processor; libraries choose their kernels by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
