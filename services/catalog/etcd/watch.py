"""A watch of one key prefix that misses nothing.

The stream is a snapshot of the prefix, then every later change in etcd's order. It survives lost connections, killed
servers and compaction; its consumer never has to ask whether it missed something:

- It always starts from a listing at a known revision R and asks for changes from R + 1, so nothing can fall between
  "list" and "watch", however long the stream takes to be created.
- After a loss it resumes at the `mod_revision` of the last event it handed out, plus one. Never at a reply's header
  revision: replies that catch up on history carry a newer header than the events in them.
- If etcd no longer has that revision (compaction), or the `created` reply says that etcd stands at an *older* revision
  than the listing (restored from a backup: it would otherwise wait silently for a future that never comes), it lists
  again and hands out a new snapshot, which replaces everything.
- Reconnects pause with full jitter.

etcd keeps all events of one revision in one reply, so a batch is always whole transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from aetcd import rpc

from services.catalog.etcd.backoff import Backoff
from services.catalog.etcd.client import END_OF_STREAM, EtcdClient
from services.catalog.etcd.errors import EtcdError, EtcdUnavailableError, token_is_stale, typed
from services.catalog.etcd.transaction import GetPrefix, KeyValue, key_value, prefix_end


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under the prefix at `revision`; replaces what came before."""

    found: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Key → its new state, or None where it was deleted, in etcd's order; complete up to `revision`."""

    events: tuple[tuple[bytes, KeyValue | None], ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream is down; it will be resumed. Facts already handed out may be stale from now on."""

    error: EtcdError


@dataclass(frozen=True, slots=True)
class Resumed:
    """The stream is up again (or for the first time)."""


WatchEvent = Snapshot | Changes | Lost | Resumed


async def watch_prefix(
    client: EtcdClient, prefix: bytes, *, backoff: Callable[[], Backoff] = Backoff
) -> AsyncGenerator[WatchEvent]:
    """Endless; ends only by cancellation (close it with `contextlib.aclosing`)."""
    pauses = backoff()
    next_revision: int | None = None
    while True:
        try:
            if next_revision is None:
                listing = await client.transact(success=(GetPrefix(prefix),))
                next_revision = listing.revision + 1
                yield Snapshot(listing.reads[0], listing.revision)
            call = await client.open_watch()
            compacted = False
            try:
                created = await _create(client, call, prefix, next_revision)
                if created is None or created + 1 < next_revision:
                    # A member that merely lags behind the one that answered the listing catches up within the pause.
                    next_revision = None
                    await pauses.pause()
                    continue
                pauses.reset()
                yield Resumed()
                while (reply := await call.read()) is not END_OF_STREAM:
                    if reply.canceled:
                        compacted = reply.compact_revision > 0
                        break
                    if reply.events:
                        revision = reply.events[-1].kv.mod_revision
                        yield Changes(tuple(_change(event) for event in reply.events), revision)
                        next_revision = revision + 1
            finally:
                call.cancel()
            if compacted:
                next_revision = None
                continue
            lost: EtcdError = EtcdUnavailableError(client.endpoint, "watch ended by etcd")
        except grpc.aio.AioRpcError as error:
            if token_is_stale(error):
                client.forget_token()
            lost = typed(error, client.endpoint)
        except EtcdError as error:
            lost = error
        yield Lost(lost)
        await pauses.pause()


async def _create(client: EtcdClient, call: Any, prefix: bytes, start_revision: int) -> int | None:
    """etcd's revision when the watch was created; None if it no longer has `start_revision`."""
    create = rpc.WatchCreateRequest(key=prefix, range_end=prefix_end(prefix), start_revision=start_revision)
    try:
        async with asyncio.timeout(client.timeout_s):
            # write(), not an async generator of requests: the generator's task would outlive a broken stream.
            await call.write(rpc.WatchRequest(create_request=create))
            reply = await call.read()
    except TimeoutError:
        raise EtcdUnavailableError(client.endpoint, f"no watch within {client.timeout_s:g} s") from None
    except asyncio.InvalidStateError:  # the stream ended before the write
        raise EtcdUnavailableError(client.endpoint, f"watch refused: {await call.details()}") from None
    if reply is END_OF_STREAM:
        raise EtcdUnavailableError(client.endpoint, "watch ended before it was created")
    if reply.canceled:
        if reply.compact_revision:
            return None
        client.forget_token()
        raise EtcdUnavailableError(client.endpoint, f"watch refused: {reply.cancel_reason}")
    return int(reply.header.revision)


def _change(event: Any) -> tuple[bytes, KeyValue | None]:
    deleted = event.type == rpc.Event.DELETE
    return event.kv.key, None if deleted else key_value(event.kv)
