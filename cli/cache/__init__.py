"""`segue cache`: what is stored where, how big, whose, how often used; and what keeps it in order.

Each command is a thin shell over the catalog's calls. `verify` alone reads the bucket itself.
"""
