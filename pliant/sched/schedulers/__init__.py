"""Policies: which job gets which devices, one file for each family. Pure; the simulator and the live scheduler ask the same ones."""
