"""One program per claim: `python -m prove 2-demo`, or a whole group, `python -m prove 2`."""
