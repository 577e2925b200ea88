"""From a validated request to its choices."""
