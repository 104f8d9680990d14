"""Tenant separation: one tenant's chunks can be neither named nor found by another.

The salt enters the root of every chain, so equal prompts of two tenants have unrelated hashes. It is a keyed hash
of the tenant's stable id (never the API key, which rotates) under a 32-byte cluster secret, so that nobody outside
the cluster can compute the names of a tenant's prompts. The owner is a short one-way name of the salt, and may
stand in keys and logs.

FROZEN: salt = BLAKE3-256 keyed with the secret over the tenant id's UTF-8 bytes, taken exactly (no case folding or
Unicode normalisation); owner = the first 16 bytes of H("owner", salt).
"""

from blake3 import blake3

from libs.continuation.errors import IdentityError
from libs.continuation.hashing import derive, to_raw

DEFAULT_TENANT = "default"  # the only tenant of a cluster without API keys
SECRET_BYTES = 32
OWNER_BYTES = 16


def salt(tenant: str, secret: bytes) -> str:
    """The tenant's salt, 64 hex digits. Another secret or tenant id loses every cache of that tenant.

    Raises:
        IdentityError: an empty tenant id, or a secret that is not 32 bytes (its value is never in the message).
    """
    if not tenant:
        raise IdentityError(f"tenant id is empty: pass a stable id, or {DEFAULT_TENANT!r} where there are no API keys")
    if len(secret) != SECRET_BYTES:
        raise IdentityError(f"tenant secret has {len(secret)} bytes: set SEGUE_TENANT_SECRET to {SECRET_BYTES} bytes")
    return blake3(tenant.encode(), key=secret).hexdigest()


def owner(salt_hex: str) -> str:
    """The owner under which a tenant's objects are filed, listed and purged: 32 hex digits."""
    return derive("owner", to_raw(salt_hex, "salt"))[:OWNER_BYTES].hex()
