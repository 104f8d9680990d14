"""The chain: one name per prefix, the same by every way of getting there, and cheap."""

import time
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.continuation import chain
from libs.continuation.chain import Chain, Node, chunks_after, node_hash, plan, tails_after
from libs.continuation.errors import IdentityError
from tests.continuation import reference

ROOT = "5a" * 32
# Few distinct ids and lengths around the boundaries, so that drawn lists often share prefixes and end near an edge.
lengths = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 271, 272, 511, 512, 513, 767, 800]))


@st.composite
def token_lists(draw):
    length = draw(lengths)
    tokens = [0] * length
    for position in draw(st.lists(st.integers(0, max(0, length - 1)), max_size=2)):
        if length:
            tokens[position] = draw(st.integers(0, 2))
    return tokens


def shared_prefix(first, second):
    count = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        count += 1
    return count


def check_against_reference(tokens):
    built = plan(ROOT, tokens)
    chunks, tails = reference.chain(bytes.fromhex(ROOT), tokens)
    assert [node.hash for node in built.chunks] == [item.hex() for item in chunks]
    assert [node.hash for node in built.tails()] == [item.hex() for item in tails]
    assert built.tail == (built.tails()[-1] if tails else None)
    assert built.end == len(tokens)


@given(token_lists())
def test_plan_equals_the_reference(tokens):
    check_against_reference(tokens)


@given(token_lists())
def test_nodes_are_linked_and_leave_at_most_fifteen_tokens(tokens):
    parent, position = ROOT, 0
    nodes = plan(ROOT, tokens).nodes
    for node in nodes:
        assert (node.parent, node.start) == (parent, position)
        assert node.hash == node_hash(parent, tokens[node.start : node.end])
        assert node.is_tail == (node.end - node.start < 256) == (node is nodes[-1] and node.end % 256 != 0)
        parent, position = node.hash, node.end
    assert 0 <= len(tokens) - position <= 15


@given(token_lists(), token_lists())
def test_two_lists_share_exactly_the_chunks_of_their_common_prefix(first, second):
    common = shared_prefix(first, second) // 256
    one, two = plan(ROOT, first).chunks, plan(ROOT, second).chunks
    assert {node.hash for node in one} & {node.hash for node in two} == {node.hash for node in one[:common]}
    assert one[:common] == two[:common]


@given(token_lists(), token_lists())
def test_another_root_shares_nothing(first, second):
    one, two = plan(ROOT, first).nodes, plan("5b" * 32, second).nodes
    assert not {node.hash for node in one} & {node.hash for node in two}


@given(token_lists(), st.lists(st.integers(0, 800), max_size=4))
def test_extending_in_pieces_equals_planning_at_once(tokens, cuts):
    grown = Chain(ROOT)
    edges = sorted(min(cut, len(tokens)) for cut in cuts)
    for begin, end in zip([0, *edges], [*edges, len(tokens)], strict=True):
        grown = grown.extend(tokens[begin:end])
    assert grown == plan(ROOT, tokens)


@given(token_lists(), st.integers(0, 3))
def test_going_on_from_a_known_node_needs_only_what_follows(tokens, known):
    whole = plan(ROOT, tokens)
    known = min(known, len(whole.chunks))
    head, start = (whole.chunks[known - 1].hash, 256 * known) if known else (ROOT, 0)
    rest = tokens[start:]
    assert tuple(chunks_after(head, rest, start)) == whole.chunks[known:]
    assert Chain(head, start).extend(rest).nodes == whole.nodes[known:]


@given(token_lists())
def test_tails_under_a_broken_off_chain(tokens):
    """The tails of the first missing chunk: those that lists cut short at that place would have published."""
    tails = tails_after(ROOT, tokens)
    assert tails == tuple(plan(ROOT, tokens[:count]).tail for count in range(16, min(len(tokens), 255) + 1, 16))
    assert len(tails) <= 15


def test_hashing_is_lazy():
    nodes = chunks_after(ROOT, [1] * 256 * 3)
    assert [node.end for node in islice(nodes, 2)] == [256, 512]
    with pytest.raises(IdentityError):
        chunks_after("xx", [1])  # at the call, not at the first node


@pytest.mark.parametrize("count", [0, 1, 15, 17, 255, 257, 272])
def test_no_node_of_another_length(count):
    with pytest.raises(IdentityError, match=str(count)):
        node_hash(ROOT, [1] * count)


@pytest.mark.parametrize("start", [-256, 1, 16, 255])
def test_no_node_at_another_place(start):
    for make in (chunks_after, tails_after):
        with pytest.raises(IdentityError, match=str(start)):
            make(ROOT, [1], start)
    with pytest.raises(IdentityError, match=str(start)):
        Chain(ROOT, start)


def test_root_depends_on_model_and_tenant():
    roots = {chain.root(model, salt) for model in ("aa" * 32, "bb" * 32) for salt in ("aa" * 32, "bb" * 32)}
    assert len(roots) == 4


def test_a_plan_of_32k_tokens_takes_milliseconds():
    tokens = list(range(32768 + 255))
    times = []
    for _ in range(5):
        begin = time.process_time()
        nodes = plan(ROOT, tokens).nodes
        times.append(time.process_time() - begin)
    assert isinstance(nodes[-1], Node)
    assert len(nodes) == 129
    assert min(times) < 0.010


@pytest.mark.parametrize(("name", "value"), [("TAIL_TOKENS", 8), ("TAIL_TOKENS", 32), ("_CHUNK_BYTES", 512)])
def test_a_changed_granularity_is_noticed(monkeypatch, name, value):
    """Planted bugs: nodes that nobody else would look up."""
    monkeypatch.setattr(chain, name, value)
    with pytest.raises(AssertionError):
        check_against_reference([1] * (256 + 48 + 15))
