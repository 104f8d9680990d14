"""Chunk tiers: where the bytes of chunk objects lie, behind one small interface (`tier.Tier`).

`local.LocalDirectory` is the worker's chunk directory on its SSD, `object_store.ObjectStore` the bucket that survives
everything. Host memory and peers are further tiers of the same interface. A tier moves bytes and measures what that
costs; it never decides what is true: whatever it returns is checked against the content id by `verified.open_verified`
before anybody uses it. Everything here is synchronous and called from worker threads, never from an event loop.
"""
