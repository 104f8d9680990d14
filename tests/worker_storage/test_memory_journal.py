"""What a router hears of host memory is what lies there, whatever came and went in between."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.chunks.memory import HostMemory
from libs.continuation.errors import ContentMismatchError
from libs.continuation.layout import LayerGroup, Layout
from libs.controller.protocol import Gone, Heartbeat, Resident, Tier
from libs.controller.residency import ResidencyIndex
from services.worker.restore import memory_journal
from services.worker.restore.memory_journal import MemoryJournal
from tests.chunks.samples import sample

GROUPS = (LayerGroup(None, 1, 16, "float32", (0,)), LayerGroup(512, 1, 16, "float32", (1,)))
LAYOUT = Layout(GROUPS)
NAMES = [group.name for group in GROUPS]
# Four chunks, each as an object of either group.
MADE = [
    [sample(0, group=group, tokens=range(seed, seed + 16 * (1 + seed)))[0] for group in GROUPS] for seed in range(4)
]


def filled(cap: int = 1 << 20) -> tuple[HostMemory, MemoryJournal]:
    journal = MemoryJournal(LAYOUT)
    memory = HostMemory(cap, on_here=lambda key: journal.here(memory, key), on_gone=journal.gone)
    return memory, journal


def told(index: ResidencyIndex, journal: MemoryJournal, version: int | None) -> int:
    """As a heartbeat carries it to a router."""
    changes = journal.since(version)
    beat = Heartbeat(
        worker="w", epoch=1, sequence=1, snapshot=changes.snapshot,
        resident=tuple(
            Resident(name, held.end, Tier.RAM, held.fingerprint, groups=held.groups)
            for name, held in changes.came.items()
        ),
        gone=tuple(Gone(name, Tier.RAM) for name in changes.went),
    )  # fmt: skip
    index.apply(beat, 0.0, changes.snapshot)
    return changes.version


def agrees(index: ResidencyIndex, memory: HostMemory) -> bool:
    here = {(key.hash, key.group) for key in memory.objects()}
    return all(
        index.in_memory("w", pair[0].key.hash, name) is ((pair[0].key.hash, name) in here)
        for pair in MADE
        for name in NAMES
    )


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "remove", "damaged", "tell"]), st.integers(0, 3), st.integers(0, 1)),
        max_size=40,
    ),
    cap=st.sampled_from([8_000, 20_000, 1 << 20]),
)
def test_a_router_that_follows_knows_exactly_what_is_there(steps, cap) -> None:
    memory, journal = filled(cap)
    index, version = ResidencyIndex(), None
    for what, chunk, group in steps:
        encoded = MADE[chunk][group]
        if what == "put" and encoded.size <= cap:
            memory.put(encoded.key, encoded.parts, within=1)
        elif what == "remove":
            memory.remove(encoded.key, within=1)
        elif what == "damaged":
            memory.reject(encoded.key, ContentMismatchError("damaged"))
        elif what == "tell":
            version = told(index, journal, version)
            assert agrees(index, memory)
    told(index, journal, version)
    assert agrees(index, memory)


def test_whole_chunks_name_no_group_and_ends_are_their_own() -> None:
    memory, journal = filled()
    one, other = MADE[2]
    memory.put(one.key, one.parts, within=1)
    assert journal.since(None).came[one.key.hash].groups == (NAMES[0],)
    memory.put(other.key, other.parts, within=1)
    found = journal.since(None).came[one.key.hash]
    assert found.groups == () and found.end == 48 and found.fingerprint == one.key.fingerprint


def test_what_cannot_be_read_is_not_told() -> None:
    memory, journal = filled()
    memory.put(MADE[0][0].key, [memoryview(b"what is this")], within=1)
    assert not journal.since(None).came


def test_too_long_ago_is_a_snapshot(monkeypatch) -> None:
    monkeypatch.setattr(memory_journal, "_JOURNAL_LENGTH", 3)
    memory, journal = filled()
    first = journal.since(None).version
    for pair in MADE:
        memory.put(pair[0].key, pair[0].parts, within=1)
    assert journal.since(first).snapshot and len(journal.since(first).came) == 4
    last = journal.since(first).version
    assert not journal.since(last).snapshot and journal.since(last).came == {}
    # A version of another process's journal is nothing to go on from.
    assert journal.since(last + 100).snapshot
