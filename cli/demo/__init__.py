"""`segue demo`: a conversation whose worker is killed goes on elsewhere, token for token as if nothing had happened."""
