"""Checkpoint: completed ranges become durable beside the decode.

ledger (what is where on its way, pure) → capture (pages to staging) → mover (file, then object) → facts (catalog), run
by the checkpointer. `replicas` keeps the catalog's picture of this worker's chunk directory.
"""
