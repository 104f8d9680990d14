"""Placement: what this worker's chunk directory is asked to hold, copied in the background; and what it used, told."""
