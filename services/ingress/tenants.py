"""Who is asking: API keys, tenants and their salts.

A keys file maps API keys to tenant ids, as TOML or JSON, either at its top or in a table `keys`. Without a file
everybody is the one tenant `default`. A tenant's salt, the root of its chunk chains, is derived from its id under the
cluster's secret (libs.continuation.tenancy); it is never logged and never leaves towards a client.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from libs.continuation.tenancy import DEFAULT_TENANT, salt
from libs.service.errors import StartError
from services.ingress.errors import ApiError


@dataclass(frozen=True)
class Tenant:
    """Who a request is for."""

    id: str
    salt: str = field(repr=False)


class Tenants:
    """Finds the tenant of an Authorization header."""

    def __init__(self, secret: bytes, keys: Mapping[str, str] | None) -> None:
        """`keys`: API key → tenant id; None = no keys. Raises IdentityError for a secret that is not 32 bytes."""
        self._default = Tenant(DEFAULT_TENANT, salt(DEFAULT_TENANT, secret))
        # Looked up by digest, so that the time of a look-up says nothing about how much of a guess is right.
        self._by_key = (
            None if keys is None else {_digest(key): Tenant(name, salt(name, secret)) for key, name in keys.items()}
        )

    def of(self, authorization: str | None) -> Tenant:
        """Raises ApiError (401). Without a keys file any header is fine: clients insist on sending one."""
        if self._by_key is None:
            return self._default
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self._by_key.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            given = "is not known" if authorization else "is missing"
            raise ApiError(401, f"The API key {given}: send it as `Authorization: Bearer KEY`.", code="invalid_api_key")
        return tenant


def read_keys(path: Path) -> dict[str, str]:
    """Raises StartError; the message never holds a key."""
    remedy = "give a TOML or JSON file of API key = tenant id"
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not valid"
        raise StartError(f"keys file {path} cannot be read ({reason})", remedy=remedy) from None
    keys = content.get("keys", content) if isinstance(content, dict) else None
    if not isinstance(keys, dict) or not keys:
        raise StartError(f"keys file {path} holds no keys", remedy=remedy)
    if not all(key and isinstance(name, str) and name for key, name in keys.items()):
        raise StartError(f"keys file {path} has an entry that is not a key with a tenant id", remedy=remedy)
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
