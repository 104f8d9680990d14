"""Fields cannot run into each other, and what cannot be encoded is refused rather than bent."""

import hashlib

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from libs.continuation.errors import IdentityError
from libs.continuation.hashing import content_id, derive, pack_tokens, to_raw, tokens_sha256

token_ids = st.integers(0, 2**31 - 1)


def check_boundaries_matter(hash_fields):
    """Two different lists of fields must differ in hash even where their concatenations are equal."""

    @given(data=st.binary(max_size=12), cuts=st.tuples(*[st.lists(st.integers(0, 12), max_size=4)] * 2))
    def differ(data, cuts):
        first, second = ([data[a:b] for a, b in zip([0, *c], [*c, 12], strict=True)] for c in map(sorted, cuts))
        assert (hash_fields(*first) == hash_fields(*second)) == (first == second)

    differ()


def test_field_boundaries_cannot_alias():
    check_boundaries_matter(lambda *fields: derive("chunk", *fields))


def test_the_check_catches_a_hash_without_lengths():
    with pytest.raises(AssertionError):
        check_boundaries_matter(lambda *fields: blake3(b"".join(fields)).digest())


def test_domains_separate_equal_fields():
    assert len({derive(domain, "x") for domain in ("weights", "fingerprint", "root", "chunk", "owner")}) == 5


@pytest.mark.parametrize("field", [-1, 2**64, True, 1.5, None, ["a"]])
def test_fields_without_an_encoding_are_refused(field):
    with pytest.raises(IdentityError):
        derive("chunk", field)


@given(st.lists(token_ids, max_size=40))
def test_tokens_pack_equally_from_every_container(tokens):
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert pack_tokens(tokens) == pack_tokens(tuple(tokens)) == expected
    for dtype in (np.int64, np.uint32, np.int32, ">i8"):
        assert pack_tokens(np.array(tokens, dtype=dtype)) == expected
    assert pack_tokens(np.array(tokens + tokens, dtype=np.int64)[: len(tokens)]) == expected
    assert np.frombuffer(pack_tokens(tokens), "<i4").tolist() == tokens
    assert tokens_sha256(tokens) == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**31],
        [2**32],
        [1.0],
        ["1"],
        b"\1\0\0\0",
        "12",
        np.array([1.0]),
        np.array([[1]]),
        np.array([-1]),
        np.array([2**31]),
        np.array([2**63 + 1], dtype=np.uint64),
    ],
)
def test_what_is_no_token_id_is_refused(tokens):
    with pytest.raises(IdentityError):
        pack_tokens(tokens)


@pytest.mark.parametrize("text", ["", "ab", "AB" * 32, "ab" * 31 + "g0", "ab" * 33, "ab" * 32 + "\n", b"ab" * 32])
def test_ids_have_one_spelling(text):
    with pytest.raises(IdentityError, match="fingerprint"):
        to_raw(text, "fingerprint")


@given(st.lists(st.binary(max_size=70)))
def test_content_id_is_that_of_the_concatenation(parts):
    assert content_id(*parts) == blake3(b"".join(parts)).hexdigest()
