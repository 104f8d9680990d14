"""Objects: what is written comes back, in place; whatever is not what was asked for is refused."""

import dataclasses
import json
import mmap

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.continuation import objects
from libs.continuation.chain import node_hash
from libs.continuation.errors import (
    ContentMismatchError,
    IdentityError,
    MalformedObjectError,
    ObjectError,
    SwappedObjectError,
    TokenMismatchError,
    TruncatedObjectError,
)
from libs.continuation.keys import parse_key
from libs.continuation.layout import LayerGroup
from libs.continuation.object_format import ObjectMetadata
from libs.continuation.objects import encode_object, object_key, open_by_key, open_object, view_object

BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
NATIVE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def make(group, tokens, *, start=256, seed=0, **changes):
    parent = changes.pop("parent", "22" * 32)
    fields = {"fingerprint": "11" * 32, "parent": parent, "hash": node_hash(parent, tokens), "owner": "33" * 16}
    fields |= {"group": group.name, "start": start, "end": start + len(tokens)} | changes
    metadata = ObjectMetadata(**fields)
    random = np.random.default_rng(seed)
    shape = (len(tokens), group.kv_heads, group.head_dim)
    bits = BITS[group.dtype]

    def tensors():
        draw = {layer: random.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True) for layer in group.layers}
        return {layer: value.view(NATIVE[group.dtype]) for layer, value in draw.items()}

    keys, values = tensors(), tensors()
    return encode_object(metadata, group, tokens, keys, values), keys, values


GROUP = LayerGroup(512, 1, 2, "bfloat16", (0, 2, 10))
TOKENS = list(range(1000, 1016))
ENCODED, KEYS, VALUES = make(GROUP, TOKENS)
DATA = ENCODED.to_bytes()


def open_it(data, **changes):
    asked = {"metadata": ENCODED.metadata, "group": GROUP, "content": ENCODED.content_id, "tokens": TOKENS}
    return open_object(data, **{**asked, **changes})


groups = st.builds(
    LayerGroup,
    st.sampled_from([None, 1, 512]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from(list(BITS)),
    st.sets(st.integers(0, 120), min_size=1, max_size=4).map(sorted).map(tuple),
)
tokens_lists = st.sampled_from([16, 32, 240, 256]).flatmap(
    lambda count: st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)
)


@settings(deadline=None, max_examples=40)
@given(groups, tokens_lists, st.integers(0, 3), st.integers(0, 2**32))
def test_round_trip(group, tokens, chunk, seed):
    encoded, keys, values = make(group, tokens, start=256 * chunk, seed=seed)
    data = encoded.to_bytes()
    assert len(data) == encoded.size
    assert blake3(data).hexdigest() == encoded.content_id
    assert make(group, tokens, start=256 * chunk, seed=seed)[0].to_bytes() == data
    view = open_object(data, metadata=encoded.metadata, group=group, content=encoded.content_id, tokens=tokens)
    assert view.metadata == encoded.metadata
    assert view.group == group
    assert view.token_ids().tolist() == tokens
    for layer in group.layers:
        for name, expected in ((f"k.{layer}", keys[layer]), (f"v.{layer}", values[layer])):
            assert view.slot(name).dtype == group.dtype
            assert view.array(name).dtype == expected.dtype
            assert view.array(name).shape == expected.shape
            assert view.raw(name).tobytes() == view.array(name).tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=40)
@given(groups, tokens_lists)
def test_the_bytes_are_those_of_the_safetensors_library(group, tokens):
    encoded, keys, values = make(group, tokens)
    named = {f"{kind}.{layer}": tensors[layer] for kind, tensors in (("k", keys), ("v", values)) for layer in tensors}
    named["tokens"] = np.array(tokens, np.int32)
    specs = {
        name: safetensors.TensorSpec(
            dtype="int32" if name == "tokens" else group.dtype,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in named.items()
    }
    assert bytes(safetensors.serialize(specs, {"segue": encoded.metadata.json})) == encoded.to_bytes()


def test_the_library_reads_it():
    encoded, keys, _ = make(dataclasses.replace(GROUP, dtype="float32"), TOKENS)
    loaded = safetensors.numpy.load(encoded.to_bytes())
    assert set(loaded) == {"tokens", *(f"{kind}.{layer}" for kind in "kv" for layer in GROUP.layers)}
    assert loaded["k.10"].tobytes() == keys[10].tobytes()


def test_encoding_and_opening_copy_no_tensor(tmp_path):
    """The parts alias the caller's arrays; a view aliases the mmap, which closes once the view is released."""
    assert all(any(np.shares_memory(part, array) for array in [*KEYS.values(), *VALUES.values()])
               for part in map(np.asarray, ENCODED.parts[2:]))  # fmt: skip
    path = tmp_path / "chunk"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    base = np.frombuffer(mapped, np.uint8)
    view = open_it(mapped)
    array = view.array("k.2")
    assert np.shares_memory(array, base)
    assert array.ctypes.data == base.ctypes.data + view.slot("k.2").offset
    del base
    view.release()
    with pytest.raises(BufferError):
        mapped.close()
    assert array.tobytes() == KEYS[2].tobytes()
    del array
    mapped.close()


def test_a_refused_file_can_be_closed():
    for data in (bytearray(DATA[:-1]), bytearray(DATA[:-1] + b"\xff"), bytearray(DATA[:300]), bytearray(8)):
        with pytest.raises(ObjectError):
            open_it(data)
        data.append(0)  # BufferError while anything still exports the buffer


def check_every_flip_is_detected():
    for position in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(ObjectError):
            open_it(damaged)
        with pytest.raises(ObjectError):
            open_by_key(damaged, ENCODED.key)


def test_every_flipped_byte_is_detected():
    check_every_flip_is_detected()


def test_every_truncation_and_extension_is_detected():
    for length in range(len(DATA)):
        with pytest.raises(TruncatedObjectError, match=str(length)):
            open_it(DATA[:length])
    for extra in (b"\0", DATA):
        with pytest.raises(ContentMismatchError):
            open_it(DATA + extra)


def test_a_zeroed_file_is_detected():
    """What a power cut leaves of a file that was renamed before its data reached the disk."""
    for length in (8, 64, len(DATA)):
        with pytest.raises(ContentMismatchError):
            open_it(bytes(length))


def check_swaps_are_detected():
    """A sound file of anything else, even filed under a receipt that matches its bytes."""
    other_tokens = [*TOKENS[:-1], 7]
    swaps = {
        "fingerprint": make(GROUP, TOKENS, fingerprint="44" * 32)[0],
        "owner": make(GROUP, TOKENS, owner="44" * 16)[0],
        "parent": make(GROUP, TOKENS, parent="44" * 32)[0],
        "hash": make(GROUP, other_tokens)[0],
        "start": make(GROUP, TOKENS, start=512)[0],
        "group": make(dataclasses.replace(GROUP, window=None), TOKENS)[0],
        "layers": make(dataclasses.replace(GROUP, layers=(0, 2, 11)), TOKENS)[0],
    }
    for name, other in swaps.items():
        for content in (ENCODED.content_id, other.content_id):
            with pytest.raises(SwappedObjectError, match=name) as caught:
                open_it(other.to_bytes(), content=content)
            assert "quarantine" in str(caught.value)


def test_swapped_files_are_detected():
    check_swaps_are_detected()


def test_the_same_chunk_computed_elsewhere_is_another_object():
    other = make(GROUP, TOKENS, seed=1)[0]
    assert other.metadata == ENCODED.metadata
    assert other.content_id != ENCODED.content_id
    with pytest.raises(ContentMismatchError):
        open_it(other.to_bytes())


def forge(tokens=None, header=None):
    """A canonical-looking object with other tokens or a rewritten header, and its own true content id."""
    split = len(ENCODED.parts[0])
    text, body = DATA[8:split].decode(), bytearray(DATA[split:])
    if tokens is not None:
        body[: 4 * len(tokens)] = np.array(tokens, "<i4").tobytes()  # tokens lie first beside 16-bit tensors
    if header is not None:
        text = header(text)
    data = len(text).to_bytes(8, "little") + text.encode() + bytes(body)
    return data, blake3(data).hexdigest()


def test_other_token_ids_are_detected_under_a_matching_content_id():
    data, content = forge(tokens=[*TOKENS[:-1], 7])
    with pytest.raises(TokenMismatchError):
        open_it(data, content=content)
    with pytest.raises(TokenMismatchError):
        open_by_key(data, object_key(ENCODED.metadata, content))
    data, content = forge(tokens=[*TOKENS[:-1], -7])
    with pytest.raises(TokenMismatchError):
        open_by_key(data, object_key(ENCODED.metadata, content))
    with pytest.raises(TokenMismatchError):
        open_it(DATA, tokens=[*TOKENS[:-1], 7])
    with pytest.raises(TokenMismatchError):
        open_it(DATA, tokens=TOKENS[:-1])


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda text: text + " " * 8,
        lambda text: text.replace('"v.0":', '"v.1":'),
        lambda text: text.replace("BF16", "F16"),
        lambda text: text.replace('"__metadata__":{', '"__metadata__":{"a":"b",'),
        lambda text: text.replace('\\"v\\":1', '\\"v\\":2'),
        lambda text: text.replace('\\"v\\":1', '\\"v\\":1.0'),
        lambda text: text.replace('\\"start\\":256', '\\"start\\":true'),
        lambda text: text.replace('\\"start\\":256', '\\"start\\":1'),
        lambda text: text.replace('\\"v\\":1', '\\"v\\":1,\\"w\\":1'),
        lambda text: text.replace("11" * 32, "AA" * 32),
        lambda text: text.replace('"k.0":', '"k.0":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"k.0":'),
        lambda text: text.replace('"shape":[16,1,2]', '"shape":[16,2,1]'),
        lambda text: "[" * 5000,
        lambda text: "[]",
        lambda text: '{"__metadata__":null}',
        lambda text: '{"__metadata__":{"segue":"[]"}}',
    ],
)
def test_only_the_canonical_header_is_read(rewrite):
    data, content = forge(header=rewrite)
    assert data != DATA
    with pytest.raises(MalformedObjectError):
        view_object(data)
    with pytest.raises(MalformedObjectError):
        open_it(data, content=content)
    with pytest.raises(ContentMismatchError):
        open_it(data)


def test_an_absurd_header_length_is_refused_at_once():
    with pytest.raises(MalformedObjectError):
        view_object((2**63).to_bytes(8, "little") + DATA[8:])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(ObjectError):
        view_object(data)
    with pytest.raises(ObjectError):
        open_it(len(data).to_bytes(8, "little") + data)


def test_open_by_key_rebuilds_the_facts():
    key = parse_key(ENCODED.key.text)
    view = open_by_key(DATA, key)
    assert view.metadata == ENCODED.metadata
    assert view.group == GROUP
    for name, value in (("fingerprint", "44" * 32), ("owner", "44" * 16), ("hash", "44" * 32), ("group", "full")):
        with pytest.raises(SwappedObjectError, match=name):
            open_by_key(DATA, dataclasses.replace(key, **{name: value}))
    with pytest.raises(ContentMismatchError):
        open_by_key(DATA, dataclasses.replace(key, content_id="44" * 32))


def test_the_metadata_is_one_key_of_canonical_json():
    text = json.loads(bytes(ENCODED.parts[0])[8:])["__metadata__"]
    assert list(text) == ["segue"]
    values = {"v": 1, **dataclasses.asdict(ENCODED.metadata)}
    assert text["segue"] == json.dumps(values, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("changes", [{"start": 16}, {"end": 271}, {"end": 256}, {"owner": "33"}, {"hash": "zz" * 32}])
def test_metadata_no_node_has_is_refused(changes):
    with pytest.raises(IdentityError):
        dataclasses.replace(ENCODED.metadata, **changes)


def test_encoding_refuses_what_does_not_fit():
    good = KEYS[0]
    unfit = (good[:-1], good.view(np.uint32), good.view(np.float16), good.astype(">u2"), np.asfortranarray(
        np.zeros((16, 2), np.uint16)), good.tobytes()[:-1])  # fmt: skip
    for tensor in unfit:
        with pytest.raises(IdentityError, match=r"k\.0"):
            encode_object(ENCODED.metadata, GROUP, TOKENS, {**KEYS, 0: tensor}, VALUES)
    with pytest.raises(IdentityError, match="layers"):
        encode_object(ENCODED.metadata, GROUP, TOKENS, {0: good}, VALUES)
    with pytest.raises(IdentityError, match="group"):
        encode_object(ENCODED.metadata, dataclasses.replace(GROUP, window=9), TOKENS, KEYS, VALUES)
    with pytest.raises(IdentityError, match="hash"):
        encode_object(ENCODED.metadata, GROUP, [*TOKENS[:-1], 7], KEYS, VALUES)
    raw = {layer: array.tobytes() for layer, array in KEYS.items()}
    signed = {layer: array.view(np.int16) for layer, array in VALUES.items()}
    assert encode_object(ENCODED.metadata, GROUP, TOKENS, raw, signed).content_id == ENCODED.content_id


@pytest.mark.parametrize(
    ("disabled", "check"),
    [("_check_content", check_every_flip_is_detected), ("_check_same", check_swaps_are_detected)],
)
def test_a_dropped_verification_is_noticed(monkeypatch, disabled, check):
    """Planted bugs: each verification removed in turn."""
    monkeypatch.setattr(objects, disabled, lambda *arguments: None)
    with pytest.raises((pytest.fail.Exception, AssertionError, ObjectError)):
        check()
