"""A MegatronInference on a cluster: the only package that talks to an API server."""
