"""Restore: from chunk facts to filled pages, without touching event loop or device loop.

needs (what a plan asks for) → provider (bytes in place, verified, from the cheapest source) → uploader (fragments into
pages) → restorer (one plan, node by node). `local_chunks` serves peers, `measurements` tells what the tiers cost.
"""
