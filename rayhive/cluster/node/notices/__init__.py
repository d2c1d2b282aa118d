"""Sources of real preemption notices, one file each.

The name of a source is that of its file, and its class has the same name in CamelCase.
"""

from rayhive.registry import NOTICE_SOURCES

NOTICE_SOURCES.register_files(__name__)
