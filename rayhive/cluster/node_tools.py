"""What a node's agent does to the machine and to processes on it."""

from __future__ import annotations


class NodeTools:
    """Limits, burdens and signals what runs on a node."""
