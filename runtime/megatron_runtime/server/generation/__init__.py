"""Generates the choices of a validated request."""
