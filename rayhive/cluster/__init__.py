"""Ray: where replicates run. The only package that imports it, and not before it must."""
