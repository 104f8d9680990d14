"""An etcd that demands client certificates and a login, with a user who may touch one prefix only."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aetcd import rpc

from cli.embedded.children import ChildSpec, Supervisor
from cli.embedded.etcd import find_etcd
from cli.embedded.ports import free_ports
from services.catalog.etcd.client import EtcdClient, Tls
from services.catalog.etcd.errors import EtcdUnavailableError
from services.catalog.etcd.transaction import prefix_end


def certificates(folder: Path) -> None:
    """A CA (ca.pem), a server pair and a client pair signed by it."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=20)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test ca")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for who in ("server", "client"):
        openssl("req", *key, "-keyout", f"{who}.key", "-out", f"{who}.csr", "-subj", f"/CN=test {who}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{who}.csr", "-out", f"{who}.pem", *signing)


@asynccontextmanager
async def guarded_etcd(folder: Path, prefix: str = "segue/") -> AsyncIterator[tuple[str, Tls]]:
    """(endpoint, the TLS material, whose files lie in `folder` as ca.pem, client.pem, client.key).

    Users: root:secret, and segue:secret, who may read and write under `prefix` only.
    """
    certificates(folder)
    client_port, peer_port = free_ports(2)
    url, peer = f"https://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    tls = Tls(*((folder / name).read_bytes() for name in ("ca.pem", "client.pem", "client.key")))
    spec = ChildSpec(
        name="etcd",
        argv=(
            str(find_etcd().path),
            f"--data-dir={folder / 'data'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            f"--trusted-ca-file={folder / 'ca.pem'}",
            f"--cert-file={folder / 'server.pem'}",
            f"--key-file={folder / 'server.key'}",
            "--client-cert-auth",
            "--log-level=error",
        ),
        scrub=("ETCD_",),
    )
    async with Supervisor() as supervisor:
        await supervisor.start(spec)
        client = EtcdClient(f"127.0.0.1:{client_port}", tls=tls)
        async with asyncio.timeout(20):
            while True:
                try:
                    await client.read([])
                    break
                except EtcdUnavailableError:
                    await asyncio.sleep(0.05)
        await client._auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="secret"), timeout=5)
        await client._auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"), timeout=5)
        await client._auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=5)
        await client._auth.UserAdd(rpc.AuthUserAddRequest(name="segue", password="secret"), timeout=5)
        await client._auth.RoleAdd(rpc.AuthRoleAddRequest(name="segue"), timeout=5)
        own = prefix.encode()
        permission = rpc.Permission(permType=rpc.Permission.READWRITE, key=own, range_end=prefix_end(own))
        await client._auth.RoleGrantPermission(
            rpc.AuthRoleGrantPermissionRequest(name="segue", perm=permission), timeout=5
        )
        await client._auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="segue", role="segue"), timeout=5)
        await client._auth.AuthEnable(rpc.AuthEnableRequest(), timeout=5)
        await client.close()
        yield f"127.0.0.1:{client_port}", tls
