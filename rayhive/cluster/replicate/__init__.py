"""One running replicate: its supervisor, placement, peers and fault injection."""
