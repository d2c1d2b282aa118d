"""rayhive: what decentralised training settings are worth, measured."""

__version__ = "0.1.0"
