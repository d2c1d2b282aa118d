"""Averaging of gradients and parameters among the peers of a round."""
