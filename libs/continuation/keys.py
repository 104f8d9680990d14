"""Object keys: `v1/<fingerprint>/<owner>/<hash>/<group>/<content id>.safetensors`.

The same text is the key in the bucket and the path below a chunk directory. The content id in it makes put-if-absent
idempotent (the loser of a race is an orphan for garbage collection) and lets the catalog be rebuilt from a listing; the
owner before the hash lets one listing find all of a tenant's objects.

FROZEN: the order and spelling of the parts.
"""

import re
from dataclasses import dataclass

from libs.continuation.errors import IdentityError
from libs.continuation.hashing import to_raw
from libs.continuation.tenancy import OWNER_BYTES

KEY_VERSION = "v1"
SUFFIX = ".safetensors"
_GROUP = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The parts of a key; ids are hex.

    Raises:
        IdentityError: a malformed part. So no key can leave its directory, whatever it was parsed from.
    """

    fingerprint: str
    owner: str
    hash: str
    group: str
    content_id: str

    def __post_init__(self) -> None:
        to_raw(self.fingerprint, "fingerprint")
        to_raw(self.owner, "owner", OWNER_BYTES)
        to_raw(self.hash, "hash")
        to_raw(self.content_id, "content id")
        if not _GROUP.fullmatch(self.group):
            raise IdentityError(f"group is {self.group!r}: expected lowercase letters, digits and '-'")

    @property
    def text(self) -> str:
        """The key, parts joined by '/'."""
        return f"{key_prefix(self.fingerprint, self.owner, self.hash)}{self.group}/{self.content_id}{SUFFIX}"


def key_prefix(fingerprint: str, owner: str | None = None, node: str | None = None) -> str:
    """The prefix, ending in '/', of all keys of a model, of one owner in it, or of one node of that owner.

    Raises:
        IdentityError: a malformed id, or a node without its owner.
    """
    to_raw(fingerprint, "fingerprint")
    parts = [KEY_VERSION, fingerprint]
    if owner is not None:
        to_raw(owner, "owner", OWNER_BYTES)
        parts.append(owner)
    if node is not None:
        if owner is None:
            raise IdentityError(f"node {node} without an owner has no key prefix: pass the owner too")
        to_raw(node, "hash")
        parts.append(node)
    return "/".join(parts) + "/"


def parse_key(text: str) -> ObjectKey:
    """The parts of a key.

    Raises:
        IdentityError: not a key of this version; a listing skips and counts it.
    """
    parts = text.split("/")
    if len(parts) != 6 or parts[0] != KEY_VERSION or not parts[5].endswith(SUFFIX):
        raise IdentityError(f"{text!r} is no object key: expected v1/<fingerprint>/<owner>/<hash>/<group>/<id>{SUFFIX}")
    return ObjectKey(parts[1], parts[2], parts[3], parts[4], parts[5].removesuffix(SUFFIX))
