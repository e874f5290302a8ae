"""Training that bends and does not break: the user's front door."""

__version__ = "0.1.0"
