"""Metric groups, one file each."""
