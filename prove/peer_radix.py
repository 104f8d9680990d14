"""Prefix matching by another project's index, run by the Python that has it: one JSON line of look-ups a second.

`peer_radix.py CHAINS` reads one JSON document: chains as lists of 64-bit hashes, and for each the workers that hold
it and how many of its blocks.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from dynamo._core import RadixTree

_ROUNDS = 7


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    chains, held = document["chains"], document["held"]
    tree = RadixTree()
    event = 0
    for chain, holders in zip(chains, held, strict=True):
        for worker, count in holders:
            event += 1
            blocks = [{"block_hash": name, "tokens_hash": name} for name in chain[:count]]
            stored = {"parent_hash": None, "blocks": blocks}
            tree.apply_event(worker, json.dumps({"event_id": event, "data": {"stored": stored}}).encode())
    rates = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for chain in chains:
            tree.find_matches(chain)
        rates.append(len(chains) / (time.perf_counter() - began))
    scores = tree.find_matches(chains[0]).scores
    print(json.dumps({"per_s": max(rates), "matched": len(scores)}))


if __name__ == "__main__":
    main()
