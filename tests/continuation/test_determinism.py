"""The same names and bytes in every process, whatever seeds its dictionaries and sets."""

from tests.fixtures.hash_seeds import printed

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
    (output,) = printed(PROGRAM, ("0", "1", "4242"))
    agrees, again, first = output.split()
    assert agrees == "True"
    assert again == first
