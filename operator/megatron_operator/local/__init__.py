"""The adapter for this machine: the pods of a cluster, run as processes."""
