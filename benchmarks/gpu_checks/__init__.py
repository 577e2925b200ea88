"""Checks and measurements of `gpu.py`."""
