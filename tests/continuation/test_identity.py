"""Fingerprint, tenancy and keys: everything that matters changes them, nothing else does."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.continuation import tenancy
from libs.continuation.canonical import canonical_json
from libs.continuation.errors import IdentityError
from libs.continuation.fingerprint import TensorIdentity, Variant, fingerprint, weights
from libs.continuation.keys import ObjectKey, key_prefix, parse_key
from libs.continuation.layout import LayerSpec, Layout

names = st.text(max_size=6)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
tensors = st.lists(
    st.builds(TensorIdentity, names, names, st.lists(st.integers(0, 2**40), max_size=3).map(tuple), hashes),
    min_size=1,
    max_size=5,
    unique_by=lambda tensor: tensor.name,
)
VARIANT = Variant("cpu", "float32", "none", "paged", "fp32", 1)
LAYOUT = Layout.from_layers([LayerSpec(0, None, 1, 8, "float32"), LayerSpec(1, 64, 1, 8, "float32")])


@given(tensors.flatmap(lambda items: st.tuples(st.just(items), st.permutations(items))))
def test_weights_do_not_depend_on_order(pair):
    items, shuffled = pair
    assert weights(iter(shuffled)) == weights(items)


@given(tensors, tensors)
def test_different_tensors_have_different_weights(first, second):
    def by_name(items):
        return sorted(items, key=lambda tensor: tensor.name)

    assert (weights(first) == weights(second)) == (by_name(first) == by_name(second))


def test_dims_cannot_pass_for_another_shape():
    shapes = [(), (6,), (2, 3), (3, 2), (1, 6), (6, 1), (0,), (0, 0)]
    assert len({weights([TensorIdentity("w", "F32", shape, "00" * 32)]) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize(
    "items",
    [
        [],
        [TensorIdentity("w", "F32", (), "00" * 32)] * 2,
        [TensorIdentity("w", "F32", (-1,), "00" * 32)],
        [TensorIdentity("w", "F32", (), "00")],
    ],
)
def test_unfit_tensors_are_refused(items):
    with pytest.raises(IdentityError):
        weights(items)


def test_each_part_changes_the_fingerprint():
    base = ("aa" * 32, {"hidden": 8}, LAYOUT, VARIANT)
    other = ("bb" * 32, {"hidden": 9}, Layout(LAYOUT.groups[:1]), dataclasses.replace(VARIANT, revision=2))
    mixes = itertools.product(*zip(base, other, strict=True))
    assert len({fingerprint(*mix) for mix in mixes}) == 16


def test_variant_text_is_resolved():
    assert VARIANT.text == "cpu.float32.none.paged.fp32.1"
    for change in ({"dtype": "auto"}, {"quant": ""}, {"device": "cuda.0"}, {"attention": "Paged"}, {"revision": -1}):
        with pytest.raises(IdentityError):
            dataclasses.replace(VARIANT, **change)


def test_canonical_json_ignores_order_and_keeps_types():
    assert canonical_json({"b": [1, 2.0], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.0]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert len({canonical_json(value) for value in (1, 1.0, True, "1", None)}) == 5


@pytest.mark.parametrize("value", [{1: 2}, {"a": [{None: 1}]}, float("nan"), [float("inf")], {"a": {1}}, b"a"])
def test_what_json_would_bend_is_refused(value):
    with pytest.raises(IdentityError):
        canonical_json(value)


@given(st.text(min_size=1), st.text(min_size=1), st.binary(min_size=32, max_size=32))
def test_tenants_have_their_own_salt_and_owner(first, second, secret):
    same = first == second
    assert (tenancy.salt(first, secret) == tenancy.salt(second, secret)) == same
    assert (tenancy.owner(tenancy.salt(first, secret)) == tenancy.owner(tenancy.salt(second, secret))) == same
    assert tenancy.salt(first, secret) != tenancy.salt(first, bytes(b ^ 1 for b in secret))


@pytest.mark.parametrize(("tenant", "secret"), [("", bytes(32)), ("a", b"short-secret"), ("a", bytes(33))])
def test_unfit_tenants_and_secrets_are_refused_without_showing_them(tenant, secret):
    with pytest.raises(IdentityError) as caught:
        tenancy.salt(tenant, secret)
    assert "short-secret" not in str(caught.value)


KEY = ObjectKey("ab" * 32, "cd" * 16, "ef" * 32, "w512-kv1-d256-float32", "01" * 32)


def test_keys_parse_back_and_have_their_prefixes():
    assert KEY.text == f"v1/{'ab' * 32}/{'cd' * 16}/{'ef' * 32}/w512-kv1-d256-float32/{'01' * 32}.safetensors"
    assert parse_key(KEY.text) == KEY
    for prefix in (
        key_prefix(KEY.fingerprint),
        key_prefix(KEY.fingerprint, KEY.owner),
        key_prefix(KEY.fingerprint, KEY.owner, KEY.hash),
    ):
        assert prefix.endswith("/")
        assert KEY.text.startswith(prefix)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("v1/", "v2/"),
        ("v1/", "/v1/"),
        (".safetensors", ".tmp"),
        (".safetensors", ".safetensors.safetensors"),
        ("w512-kv1", ".."),
        ("w512-kv1", "W512"),
        ("ab" * 32, "AB" * 32),
        ("ef" * 32, "../" + "ef" * 31),
        ("cd" * 16, "cd" * 15),
        ("float32/", "float32//"),
        ("float32/", "float32\n/"),
    ],
)
def test_foreign_keys_are_refused(old, new):
    with pytest.raises(IdentityError):
        parse_key(KEY.text.replace(old, new))
