"""`segue top`: a router's tunnel pool, live."""
