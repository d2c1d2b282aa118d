"""The peer process: one Lightning trainer, from its spec to its last event."""
