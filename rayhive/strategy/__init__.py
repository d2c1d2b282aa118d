"""The Lightning strategy that makes a ``Trainer`` one peer of a swarm."""
