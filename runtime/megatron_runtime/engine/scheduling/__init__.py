"""Schedules sequences and allocates KV blocks. Pure: no tensor, no event loop."""
