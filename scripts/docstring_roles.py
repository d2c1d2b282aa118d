"""Griffe extension: Sphinx roles of docstrings as Markdown, for the page of the Python API."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":\w+:(`+)~?([\w.]+)`+")


class DocstringRoles(Extension):
    """Replaces ``:class:`name``` by the name as code."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(r"`\2`", obj.docstring.value)
