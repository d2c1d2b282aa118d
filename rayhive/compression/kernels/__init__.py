"""Kernels of the codecs: vectorised and compiled inner loops."""
