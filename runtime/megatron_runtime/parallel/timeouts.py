"""Time-outs of ranks; this module needs no torch."""

from __future__ import annotations

COLLECTIVE_TIMEOUT = 60.0
"""Seconds that a rank may be behind: more than a forward pass takes. The end of a rank is detected at once."""
RENDEZVOUS_TIMEOUT = 300.0
"""Seconds within which all ranks have to join."""
LOAD_TIMEOUT = 1800.0
"""Seconds that a rank may take longer than others to load its part of the model."""
