"""Membership of the swarm: heartbeats, the membership view and the swarm's progress."""
