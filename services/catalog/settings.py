"""What the catalog can be told."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from libs.service.settings import HttpEndpoint, ServiceSettings


class CatalogSettings(ServiceSettings):
    """The catalog: durable facts in etcd."""

    service: ClassVar[str] = "catalog"

    etcd_endpoint: str = Field(
        "127.0.0.1:2379",
        description="etcd's client address, HOST:PORT or a gRPC name such as dns:///etcd.default.svc:2379",
    )
    etcd_prefix: str = Field("segue/", description="Prefix of every key in etcd; ends in '/'; one cluster, one prefix")
    etcd_user: str | None = Field(None, description="etcd user; unset: etcd without authentication")
    etcd_password: SecretStr | None = Field(None, description="Password of etcd_user")
    etcd_ca_file: Path | None = Field(
        None, description="PEM certificates etcd's is verified against; unset: no TLS to etcd"
    )
    etcd_cert_file: Path | None = Field(None, description="PEM client certificate shown to etcd")
    etcd_key_file: Path | None = Field(None, description="PEM private key of etcd_cert_file")
    etcd_timeout_s: float = Field(
        2.0, ge=0.05, le=60, description="Longest time, in seconds, one request to etcd may take before the call fails"
    )
    lease_ttl_s: int = Field(
        15, ge=2, le=3_600, description="Seconds a silent worker stays listed; workers learn it when they register"
    )
    s3_endpoint: HttpEndpoint = Field(
        "http://127.0.0.1:9000", description="Object store, as http://HOST:PORT or https://HOST:PORT"
    )
    s3_bucket: str = Field("segue", min_length=3, max_length=63, description="Bucket that holds the chunks")
    s3_access_key: str = Field("", description="Access key of the object store")
    s3_secret_key: SecretStr = Field(SecretStr(""), description="Secret key of the object store")
    s3_region: str = Field("us-east-1", description="Region that requests are signed for")
    s3_create_bucket: bool = Field(True, description="Create the bucket at start if it is missing")
    s3_threads: int = Field(16, ge=1, le=256, description="Requests to the object store at once")
    s3_timeout_s: float = Field(
        3.0, ge=0.05, le=60, description="Longest silence, in seconds, of the object store before a call fails"
    )
    gc_interval_s: float = Field(
        3_600.0, ge=0, le=604_800, description="Seconds between collections of garbage; 0: only when one is asked for"
    )
    gc_grace_s: float = Field(
        3_600.0,
        ge=60,
        le=604_800,
        description="Seconds between the end of an object's last fact and its deletion; longer than any restore",
    )
    gc_idle_days: int = Field(
        30, ge=0, le=36_500, description="Days without use after which a chunk is collected; 0: never for that reason"
    )
    gc_max_age_days: int = Field(
        0, ge=0, le=36_500, description="Days after which a chunk is collected whether used or not; 0: never"
    )
    gc_directory_days: int = Field(
        7,
        ge=1,
        le=36_500,
        description="Days after which replicas in a chunk directory that no worker claims are forgotten",
    )
    decision_days: int = Field(7, ge=1, le=36_500, description="Days for which recorded decisions are kept")
    startup_wait_s: float = Field(
        30.0, ge=0, le=3_600, description="Seconds to wait at start for etcd and the object store before giving up"
    )

    @field_validator("etcd_prefix")
    @classmethod
    def _prefix_is_a_folder(cls, value: str) -> str:
        if not value.endswith("/") or not value.isascii() or not value.isprintable():
            raise ValueError("expected printable ASCII that ends in '/', such as segue/")
        return value

    @model_validator(mode="after")
    def _pairs_are_whole(self) -> Self:
        for one, other in (("etcd_user", "etcd_password"), ("etcd_cert_file", "etcd_key_file")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} belong together: set both or neither")
        if self.etcd_cert_file is not None and self.etcd_ca_file is None:
            raise ValueError("etcd_cert_file is set without etcd_ca_file: set it too, for TLS")
        return self
