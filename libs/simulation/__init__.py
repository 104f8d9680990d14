"""The cluster under logical time: the same machines, declared costs."""
