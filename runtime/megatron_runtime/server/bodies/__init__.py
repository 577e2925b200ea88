"""Request bodies: their fields, and what becomes of them."""
