"""Request bodies: validation and conversion."""
