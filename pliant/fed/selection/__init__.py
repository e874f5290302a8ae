"""Selects the clients that take part in a round, and those that test a model. Pure, and without torch."""
