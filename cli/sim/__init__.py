"""`segue sim`: the controller's machines under logical time."""
