"""Strategy for one device that several trainers can use, one after the other."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy

from rayhive.strategy.arguments import StrategyError


class ReusableStrategy(Strategy):
    """Strategy that takes device, accelerator and precision from each trainer anew.

    Lightning stores a trainer's settings in the attributes that hold the user's choice. The next
    trainer would refuse its own accelerator, and silently keep the old device and precision.
    """

    #: Set by each trainer.
    num_nodes: int = 1
    accelerator: Accelerator | None = None
    _device: torch.device | None = None
    _handed_precision: Precision | None = None

    @property
    def precision_plugin(self) -> Precision:
        """The precision of the present trainer."""
        return self._handed_precision if self._handed_precision is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._handed_precision = precision_plugin

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Always empty, so that each trainer sets its own device; see :attr:`root_device`."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[Any]) -> None:
        if len(devices) != 1:
            allowed = "one device a peer: Trainer(devices=1), and one process for each device"
            raise StrategyError.about("devices", [str(device) for device in devices], allowed)
        self._device = torch.device(devices[0])

    @property
    def root_device(self) -> torch.device:
        """The device of the present trainer."""
        return self._device if self._device is not None else torch.device("cpu")

    def model_to_device(self) -> None:
        """Move the module to the device."""
        assert self.model is not None
        self.model.to(self.root_device)
