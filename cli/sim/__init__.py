"""`segue sim`: the cluster's decisions under logical time."""
