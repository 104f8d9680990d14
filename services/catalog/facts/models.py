"""Models and served names.

A model's identity (everything but what an operator may choose per start: `max_context` and the chat template) never
changes under its fingerprint; a registration that says otherwise is refused. A name lists fingerprints in order of
preference; registrations append, `set_name` replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.continuation.chain import CHUNK_TOKENS
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import (
    Comparison,
    Delete,
    Exists,
    Get,
    GetPrefix,
    KeyValue,
    Operation,
    Put,
    Unchanged,
)
from services.catalog.facts.errors import InvalidRequestError, ModelMismatchError, UnknownModelError, UnknownNameError
from services.catalog.facts.keys import Keys, check_hex, check_name
from services.catalog.facts.values import pack, pack_list, unpack, unpack_list

MAX_NAME_MODELS = 64  # SetName compares them all in one transaction
_IDENTITY = ("groups", "chunk_tokens", "weights", "variant", "vocab_size")
_CACHED_MODELS = 1_024


def check_model(model: pb.Model) -> None:
    """Raises InvalidRequestError."""
    check_hex(model.fingerprint, "fingerprint")
    if model.chunk_tokens != CHUNK_TOKENS:
        raise InvalidRequestError(
            "chunk_tokens", model.chunk_tokens, f"expected {CHUNK_TOKENS}: chains are hashed in that size"
        )
    names = [group.name for group in model.groups]
    if len(set(names)) != len(names) or not all(names):
        raise InvalidRequestError("groups", names, "expected distinct, non-empty group names")


@dataclass(frozen=True, slots=True)
class Writes:
    """Part of a transaction: what must be unchanged, and what to put."""

    compare: tuple[Comparison, ...]
    operations: tuple[Operation, ...]


def model_writes(keys: Keys, model: pb.Model, stored: KeyValue | None) -> Writes:
    """What registers `model` over what is stored. Raises ModelMismatchError."""
    key, value = keys.model(model.fingerprint), pack(model)
    if stored is not None:
        known = unpack(pb.Model, stored.value)
        for field in _IDENTITY:
            if getattr(known, field) != getattr(model, field):
                raise ModelMismatchError(model.fingerprint, field)
    compare = (Unchanged(key, stored.mod_revision if stored else 0),)
    return Writes(compare, () if stored is not None and stored.value == value else (Put(key, value),))


def name_writes(keys: Keys, name: str, fingerprints: Sequence[str], stored: KeyValue | None) -> Writes:
    """What appends `fingerprints` to the name, where they are not in it yet."""
    key = keys.name(name)
    known = unpack_list(stored.value) if stored else []
    wanted = list(dict.fromkeys([*known, *fingerprints]))
    if len(wanted) > MAX_NAME_MODELS:
        raise InvalidRequestError(
            "name", name, f"expected at most {MAX_NAME_MODELS} models behind it; prune it with SetName"
        )
    compare = (Unchanged(key, stored.mod_revision if stored else 0),)
    return Writes(compare, () if wanted == known else (Put(key, pack_list(wanted)),))


class Models:
    """Reads and writes of models and names. Keeps a bounded cache of models, by the part that never changes."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._groups: dict[str, Mapping[str, pb.LayerGroup]] = {}

    async def groups(self, fingerprint: str) -> Mapping[str, pb.LayerGroup]:
        """The model's layer groups by name. Raises UnknownModelError."""
        known = self._groups.get(fingerprint)
        if known is None:
            (found,) = (await self._etcd.read([Get(self._keys.model(fingerprint))])).found
            if not found:
                raise UnknownModelError([fingerprint])
            known = {group.name: group for group in unpack(pb.Model, found[0].value).groups}
            if len(self._groups) >= _CACHED_MODELS:
                self._groups.pop(next(iter(self._groups)))
            self._groups[fingerprint] = known
        return known

    async def resolve(self, name: str) -> tuple[list[pb.Model], int]:
        """The models behind a name, in order, and etcd's revision. Raises UnknownNameError."""
        check_name(name)
        (found,) = (await self._etcd.read([Get(self._keys.name(name))])).found
        if not found:
            raise UnknownNameError(name)
        reads = await self._etcd.read([Get(self._keys.model(f)) for f in unpack_list(found[0].value)])
        return [unpack(pb.Model, kvs[0].value) for kvs in reads.found if kvs], reads.revision

    async def set_name(self, name: str, fingerprints: Sequence[str]) -> int:
        """Replaces the name's list; empty removes the name. Returns the revision. Raises UnknownModelError."""
        check_name(name)
        if len(fingerprints) > MAX_NAME_MODELS or len(set(fingerprints)) != len(fingerprints):
            raise InvalidRequestError(
                "fingerprints", list(fingerprints), f"expected at most {MAX_NAME_MODELS}, each once"
            )
        models = [self._keys.model(check_hex(f, "fingerprint")) for f in fingerprints]
        key = self._keys.name(name)
        write: Operation = Put(key, pack_list(list(fingerprints))) if fingerprints else Delete(key)
        outcome = await self._etcd.transact(
            compare=[Exists(model) for model in models], success=[write], failure=[Get(model) for model in models]
        )
        if not outcome.succeeded:
            raise UnknownModelError([f for f, kvs in zip(fingerprints, outcome.reads, strict=True) if not kvs])
        return outcome.revision

    async def list(self) -> tuple[list[pb.ServedName], list[pb.Model], int]:
        """Every name (by name) and every model (by fingerprint) at one revision."""
        outcome = await self._etcd.transact(success=[GetPrefix(self._keys.names), GetPrefix(self._keys.models)])
        names, models = outcome.reads
        start = len(self._keys.names)
        served = [pb.ServedName(name=kv.key[start:].decode(), fingerprints=unpack_list(kv.value)) for kv in names]
        return served, [unpack(pb.Model, kv.value) for kv in models], outcome.revision
