"""Codecs, one file each."""
