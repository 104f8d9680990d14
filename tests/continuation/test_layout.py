"""Groups, and the restore rules against a model that looks at every position on its own."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.continuation import layout as module
from libs.continuation.errors import IdentityError
from libs.continuation.layout import (
    LayerGroup,
    LayerSpec,
    Layout,
    longest_restorable,
    needed_chunks,
    parse_group_name,
)

GEMMA = Layout.from_layers(
    LayerSpec(index, None if index in (5, 11, 17) else 512, 1, 256, "float32") for index in range(18)
)


@dataclass(frozen=True)
class Piece:
    start: int
    end: int


specs = st.lists(
    st.tuples(st.sampled_from([None, 1, 3, 4, 9]), st.integers(1, 2), st.sampled_from(["float32", "bfloat16"])),
    min_size=1,
    max_size=5,
).map(lambda items: [LayerSpec(i, window, heads, 8, dtype) for i, (window, heads, dtype) in enumerate(items)])


@st.composite
def situations(draw):
    """A layout, small contiguous nodes, and for each node the groups that are there."""
    layout = Layout.from_layers(draw(specs))
    nodes, position = [], 0
    for size in draw(st.lists(st.integers(1, 5), max_size=6)):
        nodes.append(Piece(position, position + size))
        position += size
    names = [group.name for group in layout.groups]
    present = [draw(st.sets(st.sampled_from(names))) if draw(st.booleans()) else set(names) for _ in nodes]
    return layout, nodes, present


def held(nodes, present, group):
    return {
        position
        for node, groups in zip(nodes, present, strict=True)
        if group in groups
        for position in range(node.start, node.end)
    }


def naive_restorable(layout, nodes, present, boundary):
    for group in layout.groups:
        needed = range(boundary) if group.window is None else range(max(0, boundary - group.window), boundary)
        if not held(nodes, present, group.name).issuperset(needed):
            return False
    return True


@given(situations(), st.integers(0, 30))
def test_longest_restorable_equals_the_naive_model(situation, limit):
    layout, nodes, present = situation
    expected = max(p for p in range(limit + 1) if naive_restorable(layout, nodes, present, p))
    assert longest_restorable(layout, nodes, present, limit) == expected


def check_every_small_situation():
    """All presences of two groups over four nodes, for windows shorter than, equal to and longer than a node."""
    nodes = [Piece(0, 2), Piece(2, 5), Piece(5, 7), Piece(7, 8)]
    for window in (1, 2, 3, 4, 6, 9):
        layout = Layout.from_layers([LayerSpec(0, None, 1, 8, "float32"), LayerSpec(1, window, 1, 8, "float32")])
        full, windowed = (group.name for group in layout.groups)
        for choice in itertools.product([set(), {full}, {windowed}, {full, windowed}], repeat=len(nodes)):
            possible = [p for p in range(9) if naive_restorable(layout, nodes, choice, p)]
            for limit in range(9):
                expected = max(p for p in possible if p <= limit)
                assert longest_restorable(layout, nodes, choice, limit) == expected, (window, choice, limit)


def test_longest_restorable_in_every_small_situation():
    check_every_small_situation()


def test_a_forgotten_position_is_noticed(monkeypatch):
    """Planted bug: a windowed group asked for one position too few."""
    rule = LayerGroup.first_needed
    monkeypatch.setattr(LayerGroup, "first_needed", lambda self, p: rule(self, p) + (self.window is not None))
    with pytest.raises(AssertionError):
        check_every_small_situation()


def test_a_gap_taken_for_a_run_is_noticed(monkeypatch):
    """Planted bug: gaps between the objects of a group do not end a run."""
    whole = module._runs
    monkeypatch.setattr(module, "_runs", lambda *a: [(r[0][0], r[-1][1])] if (r := whole(*a)) else [])
    with pytest.raises(AssertionError):
        check_every_small_situation()


@given(situations(), st.integers(0, 30))
def test_needed_chunks_are_enough_and_none_is_spare(situation, boundary):
    layout, nodes, _ = situation
    if boundary > (nodes[-1].end if nodes else 0):
        with pytest.raises(IdentityError, match=str(boundary)):
            needed_chunks(layout, nodes, boundary)
        return
    needs = needed_chunks(layout, nodes, boundary)
    fetched = [{need.group for need in needs if need.node == index} for index in range(len(nodes))]
    assert naive_restorable(layout, nodes, fetched, boundary)
    for need in needs:
        fewer = [groups - ({need.group} if index == need.node else set()) for index, groups in enumerate(fetched)]
        assert not naive_restorable(layout, nodes, fewer, boundary)
    rows = sorted((need.group, position) for need in needs for position in range(need.start, need.end))
    ranges = layout.needed(boundary)
    assert rows == sorted((item.group, position) for item in ranges for position in range(item.start, item.end))
    sizes = {group.name: group.bytes_per_token for group in layout.groups}
    assert sum(sizes[group] for group, _ in rows) == layout.restore_bytes(boundary)


@given(specs)
def test_groups_hold_each_layer_once_with_its_shape(layers):
    layout = Layout.from_layers(reversed(layers))
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layers)))
    for group in layout.groups:
        assert layout.group(group.name) == group
        assert parse_group_name(group.name, group.layers) == group
        for index in group.layers:
            spec = layers[index]
            assert (spec.window, spec.kv_heads, spec.dtype) == (group.window, group.kv_heads, group.dtype)


def test_gemma_has_the_sizes_of_the_design():
    assert [group.name for group in GEMMA.groups] == ["w512-kv1-d256-float32", "full-kv1-d256-float32"]
    assert GEMMA.json == (
        '[["w512-kv1-d256-float32",[0,1,2,3,4,6,7,8,9,10,12,13,14,15,16]],["full-kv1-d256-float32",[5,11,17]]]'
    )
    assert GEMMA.bytes_per_token == 36 * 1024
    assert GEMMA.restore_bytes(2000) == pytest.approx(28e6, rel=0.01)
    assert GEMMA.restore_bytes(32768) == pytest.approx(0.217e9, rel=0.01)


def test_a_chunk_without_windowed_objects_serves_boundaries_far_behind_it():
    nodes = [Piece(i * 256, i * 256 + 256) for i in range(4)]
    window, full = (group.name for group in GEMMA.groups)
    present = [{full}, {full}, {full, window}, {full, window}]
    assert longest_restorable(GEMMA, nodes, present, 1024) == 1024
    assert longest_restorable(GEMMA, nodes, present, 1023) == 0
    assert longest_restorable(GEMMA, nodes, [{full, window}, *present[1:]], 1023) == 256
    assert longest_restorable(GEMMA, nodes, [{window}] * 4, 1024) == 0


def test_unfit_layouts_are_refused():
    full = LayerGroup(None, 1, 8, "float32", (0, 2))
    for groups in ((), (full, LayerGroup(4, 1, 8, "float32", (2,))), (LayerGroup(4, 1, 8, "float32", (3,)), full)):
        with pytest.raises(IdentityError):
            Layout(groups)
    for values in (
        (0, 1, 8, "float32", (0,)),
        (None, 0, 8, "float32", (0,)),
        (None, 1, 8, "int8", (0,)),
        (None, 1, 8, "float32", ()),
        (None, 1, 8, "float32", (1, 0)),
    ):
        with pytest.raises(IdentityError):
            LayerGroup(*values)
    with pytest.raises(IdentityError, match="w9"):
        GEMMA.group("w9-kv1-d256-float32")
    with pytest.raises(IdentityError, match="gap"):
        needed_chunks(GEMMA, [Piece(0, 256), Piece(512, 768)], 700)


@pytest.mark.parametrize("name", ["full", "w0-kv1-d8-float32", "full-kv01-d8-float32", "full-kv1-d8-f32", "../x"])
def test_foreign_group_names_are_refused(name):
    with pytest.raises(IdentityError):
        parse_group_name(name, (0,))
