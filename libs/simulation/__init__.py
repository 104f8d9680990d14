"""The simulator: the controller's own machines under logical time. See README.md."""
