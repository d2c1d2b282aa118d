"""Fault kinds, one file each."""
