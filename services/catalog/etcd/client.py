"""A thin etcd v3 client on generated stubs: transactions, leases, one channel, no hidden retries.

Every call has a deadline and either returns what etcd committed or raises an `EtcdError`. A failed write is never
repeated here: after a lost reply only a new read can tell whether it was committed, and only the caller knows what that
means. Reads have no such problem but fail fast too, because the catalog's own callers hold a budget and a plan B.

The one thing repeated is a request that etcd rejected for a stale token *before* executing it: the client authenticates
again and sends it once more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from aetcd import rpc

from services.catalog.etcd import fast_reads, transaction
from services.catalog.etcd.errors import EtcdUnavailableError, token_is_stale, typed
from services.catalog.etcd.transaction import (
    MAX_OPERATIONS,
    Comparison,
    GetRange,
    KeyValue,
    Operation,
    Outcome,
    Read,
    prefix_end,
)
from services.catalog.parallel import gather

# A page of chunk facts, about 0.7 KB each, is taken apart in a few milliseconds: look-ups are answered in between.
SCAN_PAGE = 250

# What a stream's read() answers at its end; grpc's type stubs do not know it.
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # Redial 0.1 s after a loss, at most 1 s apart: gRPC's own defaults (1 s growing to 120 s) outlast any outage.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the time one connection attempt is given; 100 ms would not survive a lost SYN.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Finds a silently dead connection under an idle watch. etcd allows pings every 5 s, and only while a call is open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # Two clients in one process must not share a connection, or one's loss is the other's.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Tls:
    """PEM bytes. `certificate` and `key` only where etcd asks for client certificates."""

    ca: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Login:
    user: str
    password: str = field(repr=False)


class Observer(Protocol):
    """Told about every call: (operation, seconds, whether etcd answered)."""

    def __call__(self, operation: str, seconds: float, answered: bool) -> None: ...


@dataclass(frozen=True)
class Reads:
    """What several reads found, in their order, and the oldest revision among the transactions that read it."""

    found: tuple[tuple[KeyValue, ...], ...]
    revision: int


@dataclass(frozen=True)
class Fetched:
    """values: of each key, None where there is none; pairs: (key, value) of all under each prefix; revision: the oldest
    among the transactions that read it."""

    values: list[bytes | None]
    pairs: list[list[tuple[bytes, bytes]]]
    revision: int


class EtcdClient:
    """Owner of one channel to one etcd cluster. Create it inside the event loop; close it with `close()`.

    endpoint: host:port, or a gRPC name such as `dns:///etcd.default.svc:2379` that resolves to several members, over
    which gRPC then fails over. timeout_s: deadline of every single call.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 2.0,
        tls: Tls | None = None,
        login: Login | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._login = login
        self._token: str | None = None
        self._token_lock = asyncio.Lock()
        self._observe: Observer = observe or (lambda operation, seconds, answered: None)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
            self._channel = grpc.aio.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS)
        self._kv = rpc.KVStub(self._channel)
        # For requests that are serialized already.
        self._raw_transaction = self._channel.unary_unary(
            "/etcdserverpb.KV/Txn", request_serializer=None, response_deserializer=rpc.TxnResponse.FromString
        )
        self._lease = rpc.LeaseStub(self._channel)
        self._auth = rpc.AuthStub(self._channel)
        self._watch = rpc.WatchStub(self._channel)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def transact(
        self,
        *,
        compare: Sequence[Comparison] = (),
        success: Sequence[Operation] = (),
        failure: Sequence[Operation] = (),
    ) -> Outcome:
        """One atomic, linearizable transaction. ValueError if over MAX_OPERATIONS; EtcdError as etcd says."""
        request = transaction.request(tuple(compare), tuple(success), tuple(failure))
        return transaction.outcome(await self._call("transaction", self._kv.Txn, request))

    async def read(self, reads: Sequence[Read]) -> Reads:
        """Any number of reads, in parallel transactions of at most MAX_OPERATIONS (so not one snapshot of all)."""
        # No reads at all still ask once: the revision is part of the answer.
        blocks = [reads[i : i + MAX_OPERATIONS] for i in range(0, len(reads), MAX_OPERATIONS)] or [()]
        outcomes = await gather(self.transact(success=block) for block in blocks)
        found = tuple(read for outcome in outcomes for read in outcome.reads)
        return Reads(found, min(outcome.revision for outcome in outcomes))

    async def fetch(self, keys: Sequence[bytes], prefixes: Sequence[bytes] = ()) -> Fetched:
        """As `read` with a Get for each key and a GetPrefix for each prefix, at a fraction of the cost."""
        asked: list[tuple[Sequence[bytes], Sequence[bytes]]] = []
        for i in range(0, max(len(keys) + len(prefixes), 1), MAX_OPERATIONS):
            low = max(0, i - len(keys))
            high = max(0, i + MAX_OPERATIONS - len(keys))
            asked.append((keys[i : i + MAX_OPERATIONS], prefixes[low:high]))
        calls = [self._call("transaction", self._raw_transaction, fast_reads.request(*block)) for block in asked]
        replies = [await calls[0]] if len(calls) == 1 else await gather(calls)
        values: list[bytes | None] = []
        pairs: list[list[tuple[bytes, bytes]]] = []
        for (block, _), reply in zip(asked, replies, strict=True):
            values += fast_reads.values(reply, len(block))
            pairs += fast_reads.pairs(reply, len(block))
        return Fetched(values, pairs, min(int(reply.header.revision) for reply in replies))

    async def scan(
        self, prefix: bytes, *, at_revision: int = 0, after: bytes = b"", page: int = SCAN_PAGE
    ) -> AsyncGenerator[tuple[KeyValue, ...]]:
        """Every key that starts with `prefix` and is above `after`, ascending, in pages (none of them empty).

        at_revision: one snapshot of all; 0 = each page as it is when it is read.
        """
        end = prefix_end(prefix)
        start = after + b"\0" if after else prefix
        while True:
            outcome = await self.transact(success=(GetRange(start, end, page, at_revision=at_revision),))
            (found,) = outcome.reads
            if found:
                yield found
            if len(found) < page:
                return
            start = found[-1].key + b"\0"

    async def grant_lease(self, ttl_s: int) -> tuple[int, int]:
        """(lease id, granted time to live in s: etcd has a floor, 2 s with its default election timeout)."""
        reply = await self._call("grant lease", self._lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=ttl_s))
        return int(reply.ID), int(reply.TTL)

    async def extend_lease(self, lease: int) -> int:
        """Time to live in s; 0 = the lease has expired."""
        reply = await self._call("extend lease", self._extend_once, rpc.LeaseKeepAliveRequest(ID=lease))
        return max(0, int(reply.TTL))

    async def revoke_lease(self, lease: int) -> None:
        """Deletes the lease's keys with it. EtcdLeaseError if there is none."""
        await self._call("revoke lease", self._lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease))

    async def open_watch(self) -> Any:
        """A bare Watch stream, for `watch.py`. Cancelled by etcd when the member loses its leader."""
        metadata = (*await self._metadata(), ("hasleader", "true"))
        return self._watch.Watch(metadata=metadata)

    def forget_token(self) -> None:
        """The next call authenticates again. For streams, whose rejection surfaces outside `_call`."""
        self._token = None

    async def _extend_once(self, request: Any, *, timeout: float, metadata: Any) -> Any:
        """etcd has keepalive only as a stream: one request, one reply, end."""
        call = self._lease.LeaseKeepAlive(timeout=timeout, metadata=metadata)
        try:
            await call.write(request)
            reply = await call.read()
        except asyncio.InvalidStateError:  # the stream ended before the write: its status says why
            reply = END_OF_STREAM
        finally:
            call.cancel()
        if reply is END_OF_STREAM:
            raise EtcdUnavailableError(self.endpoint, f"lease stream ended: {await call.code()} {await call.details()}")
        return reply

    async def _call(self, operation: str, method: Callable[..., Any], request: Any) -> Any:
        began = time.monotonic()
        answered = True
        try:
            try:
                return await method(request, timeout=self.timeout_s, metadata=await self._metadata())
            except grpc.aio.AioRpcError as error:
                if self._login is None or not token_is_stale(error):
                    raise
            self.forget_token()
            return await method(request, timeout=self.timeout_s, metadata=await self._metadata())
        except grpc.aio.AioRpcError as error:
            failure = typed(error, self.endpoint)
            answered = not isinstance(failure, EtcdUnavailableError)
            raise failure from None
        except EtcdUnavailableError:
            answered = False
            raise
        finally:
            self._observe(operation, time.monotonic() - began, answered)

    async def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self._login is None:
            return ()
        async with self._token_lock:
            if self._token is None:
                request = rpc.AuthenticateRequest(name=self._login.user, password=self._login.password)
                try:
                    reply = await self._auth.Authenticate(request, timeout=self.timeout_s)
                except grpc.aio.AioRpcError as error:
                    raise typed(error, self.endpoint) from None
                self._token = str(reply.token)
            return (("token", self._token),)
