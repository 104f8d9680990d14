"""The pieces on their own: fragments, the staging ring, the byte gate, local chunks for peers, break-even."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.chunks.cost import CostMeter, Price
from libs.chunks.gate import ByteGate
from libs.chunks.local import LocalDirectory
from libs.continuation.layout import LayerGroup, LayerSpec, Layout
from libs.continuation.object_format import ObjectMetadata, object_format
from libs.continuation.objects import encode_object, view_object
from libs.contracts.segue.v1 import worker_pb2
from libs.controller.protocol import PrefillCost, Tier
from services.worker.checkpoint.capture import Capturer, largest_header
from services.worker.checkpoint.kept import KeptObjects
from services.worker.handlers import GroupPages
from services.worker.restore.fragments import fragments
from services.worker.restore.local_chunks import PIECE_BYTES, ServedChunks
from services.worker.restore.measurements import MAX_TOKENS, StorageMeasurements, break_even
from services.worker.restore.upload import InPlace, PinnedRing, Uploader
from services.worker.restore.whole import WholeRestores
from services.worker.runtime.kv import KVStore
from tests.chunks.samples import sample
from tests.worker_storage.rig import LAYOUT, Model, PagesOf, Pool, draw_tokens

GEMMA = Layout.from_layers(
    LayerSpec(layer, None if layer in (5, 11, 17) else 512, 1, 256, "float32") for layer in range(18)
)


@given(
    layers=st.integers(1, 5),
    row_bytes=st.sampled_from([4, 64, 1024]),
    first=st.integers(0, 15),
    count=st.integers(1, 256),
    limit=st.integers(1, 40_000),
)
def test_fragments_cover_every_row_once_and_are_bounded(layers, row_bytes, first, count, limit):
    group = LayerGroup(None, 1, row_bytes // 4, "float32", tuple(range(layers)))
    start = 512 + 16 * first
    end = min(start + count, 768)
    pages = tuple(random.Random(count).sample(range(100), -(-(end - start) // 16)))
    seen: dict[tuple[str, int], list[int]] = {}
    for fragment in fragments(group, 512, GroupPages(group.name, start, end, pages), 16, limit):
        assert fragment
        assert sum(piece.nbytes for piece in fragment) <= limit or (len(fragment) == 1 and fragment[0].rows == 1)
        for piece in fragment:
            assert piece.nbytes == piece.rows * row_bytes
            for row in range(piece.rows):
                position = 512 + piece.row + row
                at = piece.slot + row
                assert piece.pages[at // 16] == pages[(position - start) // 16]
                assert at % 16 == (position - start) % 16
                seen.setdefault((piece.kind, piece.layer), []).append(position)
    assert seen == {(kind, layer): list(range(start, end)) for layer in range(layers) for kind in "kv"}


@pytest.mark.parametrize("fill", [(500, 516, 1), (512, 600, 5), (513, 529, 1), (512, 512, 1)])
def test_pages_that_do_not_hold_the_fill_are_refused(fill):
    start, end, count = fill
    with pytest.raises(ValueError, match="does not fit"):
        list(fragments(LAYOUT.groups[0], 512, GroupPages("g", start, end, tuple(range(count))), 16, 1 << 20))


def made(dtype: str, tokens: int = 256):
    group = LayerGroup(None, 2, 16, dtype, (0, 3))
    ids = draw_tokens(tokens, 1)
    model = Model(layout=Layout((group,)))
    node = model.chain(ids)[0]
    metadata = ObjectMetadata(model.fingerprint, node.parent, node.hash, "00" * 16, group.name, 0, tokens)
    draw = np.random.default_rng(1)
    kind = np.float32 if dtype == "float32" else np.uint16
    top = 2**31 if dtype == "float32" else 2**15
    raw = [
        {
            layer: draw.integers(0, top, (tokens, 2, 16), dtype=np.uint32).astype(np.uint32).view(np.float32)
            if kind is np.float32
            else draw.integers(0, 0x7F00, (tokens, 2, 16), dtype=np.uint16)
            for layer in group.layers
        }
        for _ in range(2)
    ]
    encoded = encode_object(metadata, group, ids, *raw)
    return group, encoded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stager", ["in place", "ring", "ring of one"])
@pytest.mark.parametrize("fragment_bytes", [100, 5_000, 1 << 20])
async def test_uploads_are_bit_exact(dtype, stager, fragment_bytes):
    group, encoded = made(dtype)
    kv = KVStore(Layout((group,)), {group.name: 40}, 16, torch.device("cpu"))
    uploader = Uploader(kv, fragment_bytes, 4)
    if stager != "in place":
        uploader._stager = PinnedRing(1 if "one" in stager else 3, fragment_bytes, pin=False)
    view = view_object(bytearray(encoded.to_bytes()))
    pages = tuple(random.Random(2).sample(range(40), 16))
    fill = GroupPages(group.name, 32, 250, pages[2:16])
    assert await uploader.start([(view, group, 0, fill)], threading.Event())
    uploader.close()
    for layer, (keys, values) in kv.read(group.name, fill.pages, 0, 218).items():
        for name, tensor in (("k", keys), ("v", values)):
            bits = tensor.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
            assert bits.tobytes() == view.array(f"{name}.{layer}")[32:250].tobytes()
    assert uploader.meter.price().samples == 1


async def test_an_aborted_upload_says_so_and_leaves_the_ring_whole():
    group, encoded = made("float32")
    kv = KVStore(Layout((group,)), {group.name: 16}, 16, torch.device("cpu"))
    uploader = Uploader(kv, 1_000, 4)
    uploader._stager = PinnedRing(3, 1_000, pin=False)
    abort = threading.Event()
    abort.set()
    view = view_object(bytearray(encoded.to_bytes()))
    fill = GroupPages(group.name, 0, 256, tuple(range(16)))
    assert not await uploader.start([(view, group, 0, fill)], abort)
    assert not kv.keys[0].any()
    abort.clear()
    assert await uploader.start([(view, group, 0, fill)], abort)
    assert kv.keys[0].numpy().tobytes() == bytes(view.raw("k.0"))
    uploader.close()


def test_in_place_copies_nothing():
    group, encoded = made("float32")
    view = view_object(bytearray(encoded.to_bytes()))
    fill = GroupPages(group.name, 0, 256, tuple(range(16)))
    base = np.frombuffer(view.data, np.uint8).ctypes.data
    for staged in InPlace().stream(view, fragments(group, 0, fill, 16, 1 << 20)):
        for piece, rows in staged:
            assert rows.data_ptr() == base + view.slot(piece.tensor).offset


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captures_are_what_was_in_the_pages(dtype):
    layout = Layout.from_layers([LayerSpec(0, 512, 2, 16, dtype), LayerSpec(1, None, 2, 16, dtype)])
    model = Model(layout=layout)
    pages = PagesOf(layout, filled=False)
    for tensor in (*pages.kv.keys.values(), *pages.kv.values.values()):
        tensor.copy_(torch.randn(tensor.shape))
    pool = Pool(pages)
    what = model.ranges(draw_tokens(256 + 48, 4))[1]
    pool.hold([what])
    capturer = Capturer(pages.kv, layout, pool, KeptObjects(None, None))
    captured = capturer.capture(what, ())
    assert {found.key.group for found in captured.objects} == {group.name for group in layout.groups}
    assert not pool.leased and captured.bytes <= capturer.size(what) <= captured.bytes * 1.2
    for found, held in zip(captured.objects, pool.where[what.hash], strict=True):
        view = view_object(found.data)
        for layer, (keys, _) in pages.rows(held, what.start, what.end).items():
            assert keys.view(torch.int16).numpy().tobytes() == bytes(view.raw(f"k.{layer}"))


@pytest.mark.parametrize("layout", [LAYOUT, GEMMA])
def test_the_bound_on_headers_holds(layout):
    model = Model(layout=layout)
    what = model.ranges(draw_tokens(256, 0))[0]
    for group in layout.groups:
        metadata = ObjectMetadata(what.fingerprint, what.parent, what.hash, what.owner, group.name, 0, 256)
        assert len(object_format(metadata, group).header) <= largest_header(group)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=40), st.randoms())
def test_the_gate_is_never_overdrawn_and_lets_everybody_through(wants, draw):
    async def run() -> None:
        gate = ByteGate(30)
        order: list[int] = []
        holding = 0

        async def one(index: int, size: int, turns: int) -> None:
            nonlocal holding
            await gate.acquire(size)
            holding += size
            order.append(index)
            assert holding <= gate.used and (gate.used <= 30 or gate.used == size)
            for _ in range(turns):
                await asyncio.sleep(0)
            holding -= size
            gate.release(size)

        tasks = [asyncio.create_task(one(index, *want)) for index, want in enumerate(wants)]
        await asyncio.sleep(0)
        cancelled = draw.sample(range(len(tasks)), len(tasks) // 4)
        cancelled = [index for index in cancelled if index not in order]
        for index in cancelled:
            tasks[index].cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.used == 0 and gate.waiting == 0
        assert order == [index for index in range(len(tasks)) if index not in cancelled]

    asyncio.run(run())


async def test_peers_get_pieces(tmp_path):
    directory = LocalDirectory(tmp_path, cap=1 << 30)
    group = LayerGroup(None, 1, 256, "float32", tuple(range(6)))
    encoded, _ = sample(1, group=group)
    directory.put(encoded.key, encoded.parts, within=5)
    chunks = ServedChunks(directory)
    key = encoded.key
    wanted = worker_pb2.FetchChunkRequest(
        fingerprint=key.fingerprint, owner=key.owner, hash=key.hash, group=key.group, content_id=key.content_id
    )
    pieces = [piece async for piece in chunks.open(wanted)]
    assert len(pieces) > 1 and all(len(piece.data) <= PIECE_BYTES for piece in pieces)
    assert b"".join(piece.data for piece in pieces) == encoded.to_bytes()
    assert all(piece.size == encoded.size for piece in pieces)
    wanted.offset, wanted.length = 1_000, PIECE_BYTES + 5
    part = [piece async for piece in chunks.open(wanted)]
    assert b"".join(piece.data for piece in part) == encoded.to_bytes()[1_000 : 1_005 + PIECE_BYTES]
    wanted.offset = encoded.size + 1
    assert [piece async for piece in chunks.open(wanted)] == []
    wanted.content_id = "00" * 32
    with pytest.raises(KeyError):
        await anext(chunks.open(wanted))
    # A reader that goes away in the middle gives its lease back.
    wanted.content_id, wanted.offset, wanted.length = key.content_id, 0, 0
    reading = chunks.open(wanted)
    await anext(reading)
    assert directory.counts.leases == 1
    await reading.aclose()
    assert directory.counts.leases == 0
    assert chunks.disk().used == encoded.size and chunks.node == directory.node
    await chunks.aclose()
    directory.close()


async def test_without_a_directory_there_is_nothing():
    chunks = ServedChunks(None)
    with pytest.raises(KeyError):
        await anext(chunks.open(worker_pb2.FetchChunkRequest(hash="ab")))
    await chunks.aclose()


def test_break_even():
    prefill = [PrefillCost(512, 4.0), PrefillCost(4_096, 5.0)]
    upload = Price(0.1, 5e6, 1)
    near, far = Price(1.0, 8e5, 3), Price(200.0, 1e5, 3)
    assert break_even(GEMMA, near, upload, []) == 0
    assert break_even(GEMMA, near, upload, prefill) == 16
    tokens = break_even(GEMMA, far, upload, prefill)
    assert 16 < tokens < 512
    for count, better in ((tokens, True), (tokens - 16 * max(1, tokens // 8 // 16), False)):
        size = GEMMA.restore_bytes(count)
        assert (far.ms(size) + upload.ms(size) < 4.0 * count) is better
    hopeless = Price(1.0, 1.0, 3)
    assert break_even(GEMMA, hopeless, upload, prefill) == MAX_TOKENS


def test_only_what_was_measured_is_reported():
    ssd, store, upload = (CostMeter(Price(1.0, 1e5)) for _ in range(3))
    measurements = StorageMeasurements(GEMMA, WholeRestores({Tier.OBJECT: store, Tier.SSD: ssd}, upload), list)
    assert measurements.tiers() == []
    store.observe(1_000_000, 20.0)
    ssd.observe(1_000_000, 2.0)
    upload.observe(1_000_000, 1.0)
    assert [cost.tier for cost in measurements.tiers()] == [Tier.GPU, Tier.SSD, Tier.OBJECT]
    assert all(cost.break_even_tokens == 0 for cost in measurements.tiers())


def test_what_whole_restores_took_is_told_while_it_is_fresh():
    now = 0.0
    ram, upload = CostMeter(Price(0.1, 1e7)), CostMeter(Price(0.1, 1e6))
    own = {Tier.RAM: ram, Tier.OBJECT: CostMeter(Price(1.0, 1e6))}
    restores = WholeRestores(own, upload, lambda: now)
    ram.observe(1_000_000, 0.2)
    upload.observe(1_000_000, 1.0)
    alone = restores.price(Tier.RAM)
    assert alone == ram.price() and alone.ms(4_000_000) < 2
    for chunks in (1, 4, 8, 2, 16, 4):  # five milliseconds a chunk of 250 kB, whatever the bytes cost
        size = 250_000 * chunks
        restores.observe({Tier.RAM: size}, 5.0 * chunks + upload.price().ms(size))
    assert restores.price(Tier.RAM).ms(2_000_000) == pytest.approx(40.0, rel=0.1)
    restores.observe({Tier.SSD: 1_000_000}, 5.0)  # of a tier that is not there
    # Of two tiers the farther one takes what the nearer one's part does not explain.
    half = 1_000_000
    for _ in range(8):
        restores.observe({Tier.RAM: half, Tier.OBJECT: half}, 20.0 + 50.0 + upload.price().ms(2 * half))
    assert restores.price(Tier.OBJECT).ms(half) == pytest.approx(50.0, rel=0.15)
    assert restores.price(Tier.RAM).ms(2_000_000) == pytest.approx(40.0, rel=0.1)
    now = 121.0
    assert restores.price(Tier.RAM) == ram.price(), "or a price that is too high would never be tried again"
