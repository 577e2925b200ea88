"""How long ranks wait for each other; here, where one can ask without torch."""

from __future__ import annotations

COLLECTIVE_TIMEOUT = 60.0
"""Seconds that a rank may be behind; more than a forward pass takes. That one has died is noticed at once."""
RENDEZVOUS_TIMEOUT = 300.0
"""Seconds within which all ranks have to come together."""
LOAD_TIMEOUT = 1800.0
"""Seconds that a rank may take longer than others to load its part of the model."""
