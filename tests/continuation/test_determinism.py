"""The same names and bytes in every process, whatever seeds its dictionaries and sets."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json
from tests.continuation.test_golden import IDS, INPUTS, library_vectors
from tests.continuation.test_objects import ENCODED, GROUP, KEYS, TOKENS, VALUES
from libs.continuation.hashing import content_id
from libs.continuation.objects import encode_object
layers = set(map(str, GROUP.layers))  # its order follows the hash seed
keys, values = ({int(layer): source[int(layer)] for layer in layers} for source in (KEYS, VALUES))
again = encode_object(ENCODED.metadata, GROUP, TOKENS, keys, values)
print(library_vectors(INPUTS) == IDS, content_id(again.to_bytes()), ENCODED.content_id)
"""


def test_equal_across_hash_seeds():
    root = Path(__file__).parents[2]
    outputs = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=root, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    (output,) = outputs
    agrees, again, first = output.split()
    assert agrees == "True"
    assert again == first
