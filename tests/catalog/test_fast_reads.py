"""What is written byte by byte for speed is what the generated messages write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd import fast_reads, transaction
from services.catalog.etcd.transaction import Get, GetPrefix, Put
from services.catalog.facts.replicas import merged, ready
from services.catalog.facts.values import field
from tests.catalog.rig import Rig


@given(
    keys=st.lists(st.binary(min_size=1, max_size=300), max_size=5),
    prefixes=st.lists(st.binary(min_size=1, max_size=300).filter(lambda p: any(b < 0xFF for b in p)), max_size=5),
)
def test_fast_requests_are_the_generated_messages_bytes(keys: list[bytes], prefixes: list[bytes]) -> None:
    reads = [*(Get(key) for key in keys), *(GetPrefix(prefix) for prefix in prefixes)]
    expected = transaction.request((), tuple(reads), ())
    assert type(expected).FromString(fast_reads.request(keys, prefixes)) == expected


@pytest.mark.parametrize(
    ("keys", "prefixes"), [(0, 0), (1, 0), (0, 1), (100, 0), (100, 1), (99, 3), (150, 170), (0, 250)]
)
async def test_fast_reads_find_what_reads_find(catalog: Rig, keys: int, prefixes: int) -> None:
    root = catalog.keys.prefix.encode()
    puts = [Put(b"%bk/%03d" % (root, i), b"v%d" % i) for i in range(0, 300, 3)]
    await catalog.etcd.transact(success=puts)
    wanted = [b"%bk/%03d" % (root, i) for i in range(keys)]
    under = [b"%bk/%02d" % (root, i % 30) for i in range(prefixes)]
    fetched = await catalog.etcd.fetch(wanted, under)
    found = (await catalog.etcd.read([*(Get(k) for k in wanted), *(GetPrefix(p) for p in under)])).found
    assert fetched.values == [kvs[0].value if kvs else None for kvs in found[:keys]]
    assert fetched.pairs == [[(kv.key, kv.value) for kv in kvs] for kvs in found[keys:]]
    assert fetched.revision > 0


@given(content=st.binary(max_size=40_000), number=st.integers(1, 15))
def test_fields_are_written_as_protobuf_does(content: bytes, number: int) -> None:
    written = field(number, content)
    tag, rest = written[0], written[1:]
    assert tag == number << 3 | 2
    length = 1 + sum(byte >= 0x80 for byte in rest[: max(0, len(rest) - len(content))])
    size = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(rest[:length]))
    assert (size, rest[length:]) == (len(content), content)


def test_ready_replicas_are_those_of_the_message() -> None:
    replicas = [
        pb.Replica(node="n", group="g" * 200, state=pb.REPLICA_STATE_READY, content_id="ab" * 32),
        pb.Replica(node="n", group="h", state=pb.REPLICA_STATE_COPYING, content_id="cd" * 32),
    ]
    value = merged(None, replicas)
    assert value is not None
    raw = ready([(b"p/n", value), (b"p/other", value)], {b"n"})
    assert list(pb.Node.FromString(raw).replicas) == replicas[:1]
