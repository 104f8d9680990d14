"""The worker's live side: tunnels and direct calls in, the controller machine's effects out."""
