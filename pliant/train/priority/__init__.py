"""Sums that travel by priority: what travels by itself, how much at once, and parameters whose update is under way."""
