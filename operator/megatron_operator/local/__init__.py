"""A MegatronInference on this machine: the same pods as on a cluster, run as processes."""
