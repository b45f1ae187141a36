"""How many samples an engine is given at once, beside those that it works on."""

from __future__ import annotations

__all__ = ["GIVEN_PER_SLOT"]

GIVEN_PER_SLOT = 2
"""Samples that the driver gives an engine for each of its slots, so that a freed slot is filled at
once. Of episodes as many are in flight, one at its turn while the other waits for its environment.
Plans, predictions and simulations count on what the driver does."""
