"""Recorded traces replayed against workers with declared costs, under a named routing policy."""
