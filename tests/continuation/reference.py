"""A second implementation of the frozen encodings, written from the design and sharing no code with libs.continuation.

It is slow and literal on purpose. `vectors` turns the inputs of golden.json into every id, so that golden.json, this
file and the library are three independent statements of one encoding; a change of any one of them shows.
"""

import hashlib
import json
import struct

from blake3 import blake3

SPELLING = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}


def h(domain: str, *fields: bytes) -> bytes:
    message = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return blake3(message, derive_key_context="segue v1 " + domain).digest()


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def packed(tokens: list[int]) -> bytes:
    return b"".join(struct.pack("<I", token) for token in tokens)


def compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def weights(tensors: list[dict]) -> bytes:
    fields = []
    for tensor in sorted(tensors, key=lambda item: item["name"].encode()):
        fields += [tensor["name"].encode(), tensor["dtype"].encode(), u64(len(tensor["dims"]))]
        fields += [u64(dim) for dim in tensor["dims"]]
        fields.append(bytes.fromhex(tensor["blake3"]))
    return h("weights", *fields)


def group_name(layer: dict) -> str:
    scope = "full" if layer["window"] is None else "w" + str(layer["window"])
    return f"{scope}-kv{layer['kv_heads']}-d{layer['head_dim']}-{layer['dtype']}"


def layout(layers: list[dict]) -> list[list]:
    groups: list[list] = []
    for layer in layers:
        for group in groups:
            if group[0] == group_name(layer):
                group[1].append(layer["index"])
                break
        else:
            groups.append([group_name(layer), [layer["index"]]])
    return groups


def chain(root: bytes, tokens: list[int]) -> tuple[list[bytes], list[bytes]]:
    """Hashes of the full chunks, and of every tail after the last of them."""
    chunks, parent = [], root
    while len(tokens) >= 256:
        parent = h("chunk", parent, packed(tokens[:256]))
        chunks.append(parent)
        tokens = tokens[256:]
    tails = [h("chunk", parent, packed(tokens[:count])) for count in range(16, 256, 16) if count <= len(tokens)]
    return chunks, tails


def tensor_bytes(name: str, nbytes: int) -> bytes:
    """Values for golden objects: reproducible, different for each tensor."""
    return blake3(name.encode()).digest(nbytes)


def object_bytes(
    metadata: dict, layers: list[int], kv_heads: int, head_dim: int, dtype: str, tokens: list[int]
) -> bytes:
    nbytes = len(tokens) * kv_heads * head_dim * WIDTH[dtype]
    state = [
        (f"{kind}.{layer}", SPELLING[dtype], [len(tokens), kv_heads, head_dim], tensor_bytes(f"{kind}.{layer}", nbytes))
        for kind in "kv"
        for layer in layers
    ]
    state.sort()
    ids = [("tokens", "I32", [len(tokens)], packed(tokens))]
    tensors = state + ids if dtype == "float32" else ids + state
    header, offset = '{"__metadata__":{"segue":' + json.dumps(compact({"v": 1, **metadata})) + "}", 0
    for name, spelling, shape, data in tensors:
        header += f',"{name}":{{"dtype":"{spelling}","shape":{compact(shape)},'
        header += f'"data_offsets":[{offset},{offset + len(data)}]}}'
        offset += len(data)
    header += "}"
    header += " " * (-len(header) % 8)
    return u64(len(header)) + header.encode() + b"".join(data for *_, data in tensors)


def vectors(inputs: dict) -> dict:
    """Every id of the inputs, as golden.json has them."""
    tokens = [(7919 * i + 13) % 262144 for i in range(inputs["token_count"])]
    weights_id = weights(inputs["tensors"])
    layout_json = compact(layout(inputs["layers"]))
    arch_json = compact(inputs["arch"])
    fields = (b"weights", weights_id, b"arch", arch_json.encode(), b"layout", layout_json.encode(), b"variant")
    fingerprint = h("fingerprint", *fields, inputs["variant"].encode())
    salt = blake3(inputs["tenant"].encode(), key=bytes.fromhex(inputs["secret"])).digest()
    owner = h("owner", salt)[:16]
    root = h("root", fingerprint, u64(256), salt)
    chunks, tails = chain(root, tokens)
    objects = {}
    for name, spec in inputs["objects"].items():
        group = group_name(spec)
        start = 256 * len(chunks)
        end = start + spec["tokens"]
        metadata = {
            "fingerprint": fingerprint.hex(),
            "parent": chunks[-1].hex(),
            "hash": tails[spec["tokens"] // 16 - 1].hex(),
            "owner": owner.hex(),
            "group": group,
            "start": start,
            "end": end,
        }
        shape = (spec["kv_heads"], spec["head_dim"], spec["dtype"])
        data = object_bytes(metadata, spec["layers"], *shape, tokens[start:end])
        content = blake3(data).hexdigest()
        key = f"v1/{fingerprint.hex()}/{owner.hex()}/{metadata['hash']}/{group}/{content}.safetensors"
        header_end = 8 + int.from_bytes(data[:8], "little")
        header = data[8:header_end].decode()
        objects[name] = {"size": len(data), "header": header, "content_id": content, "key": key}
    return {
        "weights": weights_id.hex(),
        "arch_json": arch_json,
        "layout_json": layout_json,
        "fingerprint": fingerprint.hex(),
        "salt": salt.hex(),
        "owner": owner.hex(),
        "root": root.hex(),
        "chunks": [chunk.hex() for chunk in chunks],
        "tails": [tail.hex() for tail in tails],
        "tokens_sha256": hashlib.sha256(packed(tokens)).hexdigest(),
        "objects": objects,
    }
