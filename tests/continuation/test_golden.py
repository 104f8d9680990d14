"""golden.json, the reference and the library state one encoding. A red test here means: every cache would be lost."""

import json
from pathlib import Path

import pytest
from blake3 import blake3

from libs.continuation import chain, fingerprint, hashing, layout, objects, tenancy
from libs.continuation.object_format import ObjectMetadata
from tests.continuation import reference

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
INPUTS, IDS = GOLDEN["inputs"], GOLDEN["ids"]


def library_vectors(inputs: dict) -> dict:
    """Every id by the library, in the shape of golden.json."""
    tokens = [(7919 * i + 13) % 262144 for i in range(inputs["token_count"])]
    weights = fingerprint.weights(
        fingerprint.TensorIdentity(item["name"], item["dtype"], tuple(item["dims"]), item["blake3"])
        for item in inputs["tensors"]
    )
    groups = layout.Layout.from_layers(layout.LayerSpec(**layer) for layer in inputs["layers"])
    *parts, revision = inputs["variant"].split(".")
    variant = fingerprint.Variant(*parts, int(revision))
    print_id = fingerprint.fingerprint(weights, inputs["arch"], groups, variant)
    salt = tenancy.salt(inputs["tenant"], bytes.fromhex(inputs["secret"]))
    root = chain.root(print_id, salt)
    plan = chain.plan(root, tokens)
    encoded = {}
    for name, spec in inputs["objects"].items():
        shape = {key: spec[key] for key in ("window", "kv_heads", "head_dim", "dtype")}
        group = layout.LayerGroup(**shape, layers=tuple(spec["layers"]))
        node = plan.tails()[spec["tokens"] // 16 - 1]
        metadata = ObjectMetadata(
            print_id, node.parent, node.hash, tenancy.owner(salt), group.name, node.start, node.end
        )
        nbytes = spec["tokens"] * group.tensor_bytes_per_token
        keys = {layer: reference.tensor_bytes(f"k.{layer}", nbytes) for layer in group.layers}
        values = {layer: reference.tensor_bytes(f"v.{layer}", nbytes) for layer in group.layers}
        item = objects.encode_object(metadata, group, tokens[node.start : node.end], keys, values)
        header = bytes(item.parts[0])[8:].decode()
        encoded[name] = {
            "size": item.size,
            "header": header,
            "content_id": item.content_id,
            "key": item.key.text,
        }
    return {
        "weights": weights,
        "arch_json": fingerprint.canonical_json(inputs["arch"]),
        "layout_json": groups.json,
        "fingerprint": print_id,
        "salt": salt,
        "owner": tenancy.owner(salt),
        "root": root,
        "chunks": [node.hash for node in plan.chunks],
        "tails": [node.hash for node in plan.tails()],
        "tokens_sha256": hashing.tokens_sha256(tokens),
        "objects": encoded,
    }


def test_the_reference_gives_the_golden_ids():
    assert reference.vectors(INPUTS) == IDS


def test_the_library_gives_the_golden_ids():
    assert library_vectors(INPUTS) == IDS


@pytest.mark.parametrize("domain", ["weights", "fingerprint", "root", "chunk", "owner"])
def test_every_domain_hashes_as_the_reference(domain):
    fields = ("", "é", 0, 2**64 - 1, bytes(32), memoryview(b"abc"))
    raw = (b"", "é".encode(), bytes(8), b"\xff" * 8, bytes(32), b"abc")
    assert hashing.derive(domain, *fields) == reference.h(domain, *raw)


def test_blake3_is_the_published_one():
    """The modes used here, against BLAKE3's own test vectors (test_vectors.json, input length 0)."""
    keyed = blake3(b"", key=b"whats the Elvish word for friend").hexdigest()
    assert keyed == "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"
    derived = blake3(b"", derive_key_context="BLAKE3 2019-12-27 16:29:52 test vectors context").hexdigest()
    assert derived == "2cc39783c223154fea8dfb7c1b1660f2ac2dcbd1c1de8277b0b0dd39b7e50d7d"
