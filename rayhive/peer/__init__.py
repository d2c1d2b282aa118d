"""A peer: its strategy, optimizer and averagers, and the process that it lives in."""
