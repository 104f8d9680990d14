"""Worker epochs and endpoints.

An epoch is the identity of a worker *process*: max(stored + 1, unix ms), written in the same transaction that compares
the stored one, so it grows over lost leases, etcd restarts, leader changes and a restore from a backup (the clock
carries it past epochs that the backup has forgotten). The endpoint lies under a lease; losing the lease removes
discovery only, and the process attaches again under its epoch, unless a larger one exists.

One transaction writes epoch, endpoint, models and names: a listed endpoint's models are always known.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import ServiceError
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.errors import EtcdError
from services.catalog.etcd.transaction import Delete, Get, KeyValue, Operation, Put, Unchanged
from services.catalog.facts.errors import DuplicateWorkerError, InvalidRequestError, NotListedError
from services.catalog.facts.keys import Keys, check_name, check_node, check_worker
from services.catalog.facts.models import check_model, model_writes, name_writes
from services.catalog.facts.races import attempts
from services.catalog.facts.uses import day_of
from services.catalog.facts.values import pack, pack_number, unpack, unpack_number

# One transaction reads an epoch and, per model, the model and its name.
MAX_MODELS = 32
_FAMILIES = ("", "ipv4", "ipv6")


@dataclass(frozen=True, slots=True)
class Registration:
    epoch: int
    lease: int
    ttl_s: int
    revision: int


@dataclass(frozen=True, slots=True)
class Liveness:
    ttl_s: int
    latest_epoch: int
    revision: int


class Workers:
    """Registers, keeps and removes workers. now_ms: unix milliseconds."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, lease_ttl_s: int, now_ms: Callable[[], int]) -> None:
        self._etcd, self._keys = etcd, keys
        self._lease_ttl_s, self._now_ms = lease_ttl_s, now_ms

    async def register(
        self, endpoint: pb.Endpoint, models: Sequence[pb.Model], names: Sequence[str], epoch: int
    ) -> Registration:
        """A new process (epoch 0) or a re-attachment (its epoch).

        Raises InvalidRequestError, ModelMismatchError, DuplicateWorkerError, ContendedError.
        """
        _check_registration(endpoint, models, names)
        lease, ttl_s = await self._etcd.grant_lease(self._lease_ttl_s)
        try:
            async for _ in attempts(f"registration of {endpoint.worker}"):
                registered = await self._try_register(endpoint, models, names, epoch, lease)
                if registered is not None:
                    return Registration(registered[0], lease, ttl_s, registered[1])
        except ServiceError:
            # Only tidiness: it would expire by itself. (After an EtcdError there is nobody to ask.)
            with suppress(EtcdError):
                await self._etcd.revoke_lease(lease)
            raise
        raise AssertionError("attempts() raises when it ends")

    async def _try_register(
        self, endpoint: pb.Endpoint, models: Sequence[pb.Model], names: Sequence[str], asked: int, lease: int
    ) -> tuple[int, int] | None:
        """(epoch, revision), or None if others wrote the same keys in between."""
        keys, behind = self._keys, _behind_names(models, names)
        epoch_key = keys.epoch(endpoint.worker)
        reads = [epoch_key, *(keys.model(m.fingerprint) for m in models), *(keys.name(name) for name in behind)]
        found = [kvs[0] if kvs else None for kvs in (await self._etcd.read([Get(key) for key in reads])).found]
        stored = unpack_number(found[0].value) if found[0] else 0
        if asked and stored > asked:
            raise DuplicateWorkerError(endpoint.worker, asked, stored)
        # A stored epoch *below* the asked one is etcd restored from a backup: the process is still the newest.
        epoch = asked or max(stored + 1, self._now_ms())

        of_models, of_names = found[1 : 1 + len(models)], found[1 + len(models) :]
        parts = [model_writes(keys, m, kv) for m, kv in zip(models, of_models, strict=True)]
        parts += [name_writes(keys, n, f, kv) for (n, f), kv in zip(behind.items(), of_names, strict=True)]
        listed = pb.Endpoint()
        listed.CopyFrom(endpoint)
        listed.epoch = epoch
        listed.models[:] = [model.fingerprint for model in models]
        operations: list[Operation] = [Put(keys.endpoint(endpoint.worker), pack(listed), lease)]
        if stored != epoch:
            operations.append(Put(epoch_key, pack_number(epoch)))
        if endpoint.node:
            # Collection forgets what lies in directories that nobody has claimed for long.
            operations.append(Put(keys.directory(endpoint.node), pack_number(day_of(self._now_ms()))))
        outcome = await self._etcd.transact(
            compare=[_unchanged(epoch_key, found[0]), *(c for part in parts for c in part.compare)],
            success=[*operations, *(o for part in parts for o in part.operations)],
        )
        return (epoch, outcome.revision) if outcome.succeeded else None

    async def keep_alive(self, worker: str, epoch: int, lease: int) -> Liveness:
        """Extends the lease of a listed worker. Raises NotListedError.

        A caller whose epoch was succeeded is answered, not refused: the larger `latest_epoch` tells it to fence itself.
        """
        check_worker(worker)
        _check_epoch(epoch)
        ttl_s = await self._etcd.extend_lease(lease)
        facts = await self._etcd.read([Get(self._keys.epoch(worker)), Get(self._keys.endpoint(worker))])
        stored, listed = facts.found
        latest = unpack_number(stored[0].value) if stored else 0
        if latest <= epoch and not ttl_s:
            raise NotListedError(worker, epoch, f"lease {lease} has expired")
        if latest <= epoch and (not listed or listed[0].lease != lease):
            raise NotListedError(worker, epoch, f"no endpoint under lease {lease}")
        return Liveness(ttl_s, latest, facts.revision)

    async def deregister(self, worker: str, epoch: int) -> tuple[bool, int]:
        """(whether an endpoint of that epoch was removed, revision). Another epoch's endpoint is left alone."""
        check_worker(worker)
        _check_epoch(epoch)
        key = self._keys.endpoint(worker)
        async for _ in attempts(f"deregistration of {worker}"):
            reads = await self._etcd.read([Get(key)])
            (found,) = reads.found
            if not found or unpack(pb.Endpoint, found[0].value).epoch != epoch:
                return False, reads.revision
            outcome = await self._etcd.transact(compare=[Unchanged(key, found[0].mod_revision)], success=[Delete(key)])
            if outcome.succeeded:
                return True, outcome.revision
        raise AssertionError("attempts() raises when it ends")


def _behind_names(models: Sequence[pb.Model], names: Sequence[str]) -> dict[str, list[str]]:
    behind: dict[str, list[str]] = {}
    for model, name in zip(models, names, strict=True):
        behind.setdefault(name, []).append(model.fingerprint)
    return behind


def _unchanged(key: bytes, stored: KeyValue | None) -> Unchanged:
    return Unchanged(key, stored.mod_revision if stored else 0)


def _check_epoch(epoch: int) -> None:
    if epoch == 0:
        raise InvalidRequestError("epoch", epoch, "expected the epoch that Register answered")


def _check_registration(endpoint: pb.Endpoint, models: Sequence[pb.Model], names: Sequence[str]) -> None:
    check_worker(endpoint.worker)
    _check_address(endpoint.address)
    if endpoint.family not in _FAMILIES:
        raise InvalidRequestError("family", endpoint.family, "expected ipv4, ipv6 or empty")
    if endpoint.node:
        check_node(endpoint.node)
    if len(models) > MAX_MODELS or len(names) != len(models):
        raise InvalidRequestError(
            "names", len(names), f"expected one name per model, at most {MAX_MODELS} ({len(models)} models)"
        )
    for model in models:
        check_model(model)
    for name in names:
        check_name(name)
    fingerprints = [model.fingerprint for model in models]
    if len(set(fingerprints)) != len(fingerprints):
        raise InvalidRequestError("models", fingerprints, "expected each fingerprint once")
    if endpoint.models and set(endpoint.models) != set(fingerprints):
        raise InvalidRequestError(
            "endpoint.models", list(endpoint.models), "expected the fingerprints of `models`, or none"
        )


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        if bracketed:
            ipaddress.IPv6Address(host[1:-1])
        if host and (bracketed or ":" not in host) and port.isdigit() and 0 < int(port) < 65_536:
            return
    except ValueError:
        pass
    raise InvalidRequestError("address", address, "expected host:port or [v6]:port")
