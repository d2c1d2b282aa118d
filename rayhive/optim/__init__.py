"""The swarm's optimizer, its state synchronisation and its child processes."""
