"""Figures, policies and record of a running job: what is told, decided, done and written down; what others are shown."""
