"""Fault kinds, one file each; modules with a leading underscore are shared by several kinds."""
