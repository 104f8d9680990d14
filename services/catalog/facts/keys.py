"""Where each fact lies in etcd, under a configurable prefix.

    models/<fingerprint>                      Model                              kept
    names/<served name>                       JSON list of fingerprints          kept
    workers/<id>/epoch                        decimal                            kept
    workers/<id>/endpoint                     Endpoint                           lease
    chunks/<fingerprint>/<hash>               Chunk                              kept until collected
    replicas/<fingerprint>/<hash>/<node>      JSON group → state, content id     no lease
    demands/<fingerprint>/<hash>/<node>       JSON priority, requester           lease
    pins/<fingerprint>/<hash>                 JSON who, why, when                kept
    uses/<fingerprint>/<hash>                 JSON day of last use, days of use  kept until collected
    decisions/<day>/<batch>                   JSON index of a sealed object      retention

and what collection has to remember:

    garbage/<fingerprint>/<hash>              JSON object key → unnamed since    until the bytes are gone
    removals/<node>/<fingerprint>/<hash>      owner                              until the directory confirms
    directories/<node>                        day of last claim                  retention
    retentions/<owner>                        JSON days                          kept
    locks/collection                          who collects                       lease

`Model`, `Endpoint` and `Chunk` are serialized protobuf messages of the public contract (a 128-node look-up parses
hundreds of them); the small values are compact canonical JSON, readable with `etcdctl get`.

A worker id and a node hold no '/', so every key parses back unambiguously; a served name is the last part and may.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from libs.continuation.errors import IdentityError
from libs.continuation.hashing import to_raw
from services.catalog.facts.errors import InvalidRequestError

Kind = Literal["chunks", "replicas", "pins", "uses", "garbage"]
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_NAME = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Builder of keys under `prefix` (ends in '/', e.g. `segue/`)."""

    prefix: str

    def model(self, fingerprint: str) -> bytes:
        return self._join("models", fingerprint)

    @property
    def models(self) -> bytes:
        return self._join("models", "")

    def name(self, name: str) -> bytes:
        return self._join("names", name)

    @property
    def names(self) -> bytes:
        return self._join("names", "")

    def epoch(self, worker: str) -> bytes:
        return self._join("workers", worker, "epoch")

    def endpoint(self, worker: str) -> bytes:
        return self._join("workers", worker, "endpoint")

    @property
    def workers(self) -> bytes:
        return self._join("workers", "")

    def chunk(self, fingerprint: str, hash: str) -> bytes:
        return self._join("chunks", fingerprint, hash)

    def replica(self, fingerprint: str, hash: str, node: str) -> bytes:
        return self._join("replicas", fingerprint, hash, node)

    def replicas(self, fingerprint: str, hash: str) -> bytes:
        """Prefix of one chunk's replicas: one range read finds those of every node."""
        return self._join("replicas", fingerprint, hash, "")

    def demand(self, fingerprint: str, hash: str, node: str) -> bytes:
        return self._join("demands", fingerprint, hash, node)

    @property
    def demands(self) -> bytes:
        return self._join("demands", "")

    def removal(self, node: str, fingerprint: str, hash: str) -> bytes:
        return self._join("removals", node, fingerprint, hash)

    def removals(self, node: str = "") -> bytes:
        """Prefix of one directory's removals, or of all."""
        return self._join("removals", node, "") if node else self._join("removals", "")

    def pin(self, fingerprint: str, hash: str) -> bytes:
        return self._join("pins", fingerprint, hash)

    def use(self, fingerprint: str, hash: str) -> bytes:
        return self._join("uses", fingerprint, hash)

    def of_model(self, kind: Kind, fingerprint: str = "") -> bytes:
        """Prefix of one model's facts of that kind, or of every model's."""
        return self._join(kind, fingerprint, "") if fingerprint else self._join(kind, "")

    def garbage(self, fingerprint: str, hash: str) -> bytes:
        return self._join("garbage", fingerprint, hash)

    def directory(self, node: str) -> bytes:
        return self._join("directories", node)

    @property
    def directories(self) -> bytes:
        return self._join("directories", "")

    def retention(self, owner: str) -> bytes:
        return self._join("retentions", owner)

    @property
    def retentions(self) -> bytes:
        return self._join("retentions", "")

    def decision(self, day: str, batch: str) -> bytes:
        return self._join("decisions", day, batch)

    @property
    def decisions(self) -> bytes:
        return self._join("decisions", "")

    def bucket(self, name: str) -> bytes:
        return self._join("buckets", name)

    @property
    def collection_lock(self) -> bytes:
        return self._join("locks", "collection")

    def relative(self, key: bytes) -> list[str]:
        """The parts of a key below the prefix, the kind first."""
        return key[len(self.prefix) :].decode().split("/")

    def _join(self, *parts: str) -> bytes:
        return (self.prefix + "/".join(parts)).encode()


def last_part(key: bytes) -> str:
    return key.rpartition(b"/")[2].decode()


def check_hex(value: str, field: str, size: int = 32) -> str:
    """`value` if it is 2 x size lowercase hex digits; InvalidRequestError if not."""
    try:
        to_raw(value, field, size)
    except IdentityError as error:
        raise InvalidRequestError(field, value, str(error)) from None
    return value


def check_worker(value: str) -> str:
    return _check(_WORKER, value, "worker", "1 to 253 letters, digits, '.', '_' or '-'")


def check_node(value: str) -> str:
    return _check(_NODE, value, "node", "the UUID in the chunk directory")


def check_name(value: str) -> str:
    return _check(_NAME, value, "name", "1 to 256 printable ASCII characters without spaces")


def _check(pattern: re.Pattern[str], value: str, field: str, expected: str) -> str:
    if not pattern.fullmatch(value):
        raise InvalidRequestError(field, value, f"expected {expected}")
    return value
