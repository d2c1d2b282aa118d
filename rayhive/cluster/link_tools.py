"""What a node's agent does to the node's link."""

from __future__ import annotations


class LinkTools:
    """Shapes, delays and cuts the link of a node that has an interface of its own."""
