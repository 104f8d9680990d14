"""Where each fact lies in etcd, under a configurable prefix.

    models/<fingerprint>                      Model                              kept
    names/<served name>                       JSON list of fingerprints          kept
    workers/<id>/epoch                        decimal                            kept
    workers/<id>/endpoint                     Endpoint                           lease
    chunks/<fingerprint>/<hash>               Chunk                              kept until collected
    replicas/<fingerprint>/<hash>/<node>      JSON group → state, content id     no lease

`Model`, `Endpoint` and `Chunk` are serialized protobuf messages of the public contract (a 128-node look-up parses
hundreds of them); the small values are compact canonical JSON, readable with `etcdctl get`.

A worker id and a node hold no '/', so every key parses back unambiguously; a served name is the last part and may.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from libs.continuation.errors import IdentityError
from libs.continuation.hashing import to_raw
from services.catalog.facts.errors import InvalidRequestError

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
