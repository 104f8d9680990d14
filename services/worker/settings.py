"""What the worker can be told."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator

from libs.service.settings import Address, HttpEndpoint, ServiceSettings


class WorkerSettings(ServiceSettings):
    """The worker: owns one device, serves one model."""

    service: ClassVar[str] = "worker"

    worker: str = Field(
        "",
        max_length=253,
        description="Stable id of this worker, unique in the cluster; unset: host name",
    )
    advertise: str = Field(
        "",
        description="HOST:PORT at which others reach this worker; unset: as bound",
    )
    zone: str = Field("", description="Failure domain, such as a cloud zone; unset: none")
    catalog: Address = Field("127.0.0.1:7004", description="The catalog's address")
    startup_wait_s: float = Field(
        30.0,
        ge=0,
        le=3_600,
        description="Seconds to wait at start for the catalog and the object store before giving up",
    )

    model: str = Field(
        "gemma3-270m",
        description="What to serve: gemma3-270m, tiny, a model folder, a .gguf file, or a hub id owner/name",
    )
    name: str = Field("", description="Name the model is served under; unset: the last part of its source")
    cache_dir: Path = Field(Path("~/.cache/segue"), description="Where converted models are kept")
    device: str = Field("auto", description="Device: auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="Number format of the model")
    threads: int = Field(0, ge=0, le=1_024, description="Compute threads on a CPU; 0: all cores")
    max_context: int = Field(0, ge=0, description="Longest sequence, in tokens; 0: the model's own limit")
    lanes: int = Field(8, ge=1, le=256, description="Sequences computed at a time")
    handlers: Literal["batched", "serialized"] = Field(
        "batched", description="How requests are computed: batched over the lanes, or serialized, one at a time"
    )
    step_tokens: int = Field(512, ge=2, le=65_536, description="Most tokens of one device step, over all lanes")
    kv_bytes: ByteSize = Field(
        ByteSize(1 << 30), ge=1 << 16, description="Device memory for attention state, in bytes (2GiB is fine too)"
    )
    route_tokens: int = Field(
        4_096,
        ge=256,
        description="Typical length of a conversation, in tokens, for which kv_bytes is split between layers",
    )
    page: Literal[16, 32, 64, 128, 256] = Field(16, description="Tokens per page of attention state")
    max_control_tasks: int = Field(
        64, ge=1, le=4_096, description="Requests under way, beyond which offers are declined"
    )
    heartbeat_s: float = Field(1.0, ge=0.01, le=60, description="Seconds between heartbeats to a router")

    chunk_dir: Path | None = Field(
        None, description="Folder that keeps chunks on this machine's disk; unset: none kept"
    )
    chunk_dir_cap: ByteSize = Field(ByteSize(20 << 30), ge=0, description="Most bytes in chunk_dir")
    chunk_dir_free: ByteSize = Field(
        ByteSize(1 << 30), ge=0, description="Bytes of chunk_dir's file system left to others"
    )
    ram_bytes: ByteSize = Field(
        ByteSize(512 << 20), ge=0, description="Bytes of chunks kept in this machine's memory; 0: none kept"
    )
    serve_streams: int = Field(8, ge=1, le=1_024, description="Chunk objects sent to other workers at a time")
    staging_bytes: ByteSize = Field(
        ByteSize(256 << 20), ge=0, description="Bytes captured from the device that may wait to be written and uploaded"
    )
    fetch_bytes: ByteSize = Field(
        ByteSize(256 << 20),
        ge=1 << 20,
        description="Bytes fetched for restores that may wait to be copied to the device",
    )
    hedge_ms: float = Field(
        100.0, ge=1, le=600_000, description="Milliseconds before which no read of a chunk counts as late and is hedged"
    )
    restore_loss_ms: float = Field(
        300.0,
        ge=0,
        le=600_000,
        description="Milliseconds, or a tenth of computing if that is more, that a restore may lose against computing",
    )
    s3_endpoint: HttpEndpoint = Field(
        "http://127.0.0.1:9000", description="Object store, as http://HOST:PORT or https://HOST:PORT"
    )
    s3_bucket: str = Field("segue", min_length=3, max_length=63, description="Bucket that holds the chunks")
    s3_access_key: str = Field("", description="Access key of the object store")
    s3_secret_key: SecretStr = Field(SecretStr(""), description="Secret key of the object store")
    s3_region: str = Field("us-east-1", description="Region that requests are signed for")

    echo: bool = Field(False, description="Serve no model: declared costs and tokens, for trying out and for tests")
    echo_prefill_ms: float = Field(0.05, ge=0, le=1_000, description="Echo: milliseconds per prompt token")
    echo_decode_ms: float = Field(5.0, ge=0, le=60_000, description="Echo: milliseconds per decode step")
    echo_context: int = Field(32_768, ge=1, description="Echo: longest sequence, in tokens")
    echo_vocab: int = Field(262_144, ge=1, description="Echo: number of token ids")
    echo_pages: int = Field(8_192, ge=16, description="Echo: pages of each layer group")

    crash_on: tuple[int, ...] = Field(
        (), description="Test hook: token ids in a row that, in a prompt, kill this process at its prefill; unset: none"
    )

    @field_validator("advertise")
    @classmethod
    def _advertise_is_an_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and (not host or not port.isdigit() or not 0 < int(port) < 65_536):
            raise ValueError("expected HOST:PORT, such as worker-0.segue:7001")
        return value

    @model_validator(mode="after")
    def _budgets_fit(self) -> Self:
        if self.lanes > 1 and self.step_tokens <= self.lanes:
            raise ValueError(
                f"step_tokens is {self.step_tokens} for {self.lanes} lanes: give it more tokens than lanes"
            )
        return self
