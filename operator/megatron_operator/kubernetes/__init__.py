"""The adapter for a cluster: the only package that uses the API server."""
