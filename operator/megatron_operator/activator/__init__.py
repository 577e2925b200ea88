"""The activator: an HTTP service that holds requests for models that were stopped because they were idle."""
