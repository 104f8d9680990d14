"""Settings of the ingress; see libs.service.settings for where they may be given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ByteSize, Field, SecretStr

from libs.continuation.tenancy import SECRET_BYTES
from libs.service.settings import Address, ServiceSettings


def _check_pair(value: str) -> str:
    name, separator, path = value.partition("=")
    if not (separator and name and path):
        raise ValueError("expected NAME=PATH, such as gemma=/models/gemma-3-270m")
    return value


def _check_secret(value: SecretStr) -> SecretStr:
    try:
        size = len(bytes.fromhex(value.get_secret_value()))
    except ValueError:
        size = -1
    if size != SECRET_BYTES:
        raise ValueError(
            f"expected {SECRET_BYTES} bytes as {2 * SECRET_BYTES} hex digits, such as `openssl rand -hex 32` prints"
        )
    return value


Pair = Annotated[str, AfterValidator(_check_pair)]
"""NAME=PATH."""


def pairs(values: tuple[str, ...]) -> dict[str, Path]:
    """NAME=PATH settings as a mapping; a later one of the same name wins."""
    return {name: Path(path) for name, _, path in (value.partition("=") for value in values)}


class IngressSettings(ServiceSettings):
    """The OpenAI-compatible HTTP API of a Segue cluster."""

    service: ClassVar[str] = "ingress"
    SHARED: ClassVar[frozenset[str]] = ServiceSettings.SHARED | {"tenant_secret"}

    listen: Address = Field("127.0.0.1:8000", description="Address of the HTTP API; port 0 takes any free one")
    routers: tuple[Address, ...] = Field(
        min_length=1, description="Routers as HOST:PORT; every address of every name gets a tunnel of its own"
    )
    catalog: Address = Field(description="Catalog as HOST:PORT")
    models: tuple[Pair, ...] = Field(
        min_length=1,
        description="Served names and the folders of their tokenizer.json and config files, as NAME=FOLDER",
    )
    chat_template: tuple[Pair, ...] = Field(
        (), description="Chat templates that override the models' own, as NAME=FILE (Jinja)"
    )
    tenant_secret: Annotated[SecretStr, AfterValidator(_check_secret)] = Field(
        description="The cluster's secret behind all tenants' salts, 64 hex digits; another one loses every cache"
    )
    keys_file: Path | None = Field(
        None, description="TOML or JSON file of API key = tenant id; unset: everybody is the tenant `default`"
    )
    request_deadline_s: float = Field(600.0, gt=0, le=86_400, description="Longest time a request may take, in seconds")
    default_max_tokens: int = Field(
        1_024, ge=1, description="Budget of a chat that names none, in tokens (less where the context is shorter)"
    )
    max_requests: int = Field(1_024, ge=1, description="Requests served at once; more are answered 429")
    max_body_bytes: ByteSize = Field(ByteSize(8 << 20), ge=1_024, description="Largest request body, in bytes")
    client_stall_s: float = Field(
        30.0,
        gt=0,
        le=3_600,
        description="Seconds a client may take no byte of its stream before its request is given up",
    )
    memo_bytes: ByteSize = Field(
        ByteSize(8 << 20), ge=0, description="Turn memo of each tenant and model, in bytes (4 a token); 0: none"
    )
    memo_tenants: int = Field(
        256, ge=1, description="Tenant-model pairs with a turn memo; the least recently used goes first"
    )
    models_refresh_s: float = Field(
        3.0, gt=0, le=300, description="Seconds between two looks at the catalog's served names"
    )
    catalog_wait_s: float = Field(
        60.0, gt=0, description="Seconds the catalog may stay away at the start before that is an error"
    )
    resolve_every_s: float = Field(
        5.0, gt=0, le=3_600, description="Seconds between two look-ups of the routers' names"
    )
    router_wait_s: float = Field(
        5.0, gt=0, le=600, description="Seconds a request waits for a router when none is connected"
    )
    router_losses: int = Field(5, ge=0, le=100, description="Routers a request may lose before it fails")

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.tenant_secret.get_secret_value())
