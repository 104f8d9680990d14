"""Certificates for mutual TLS, signed by one authority: for a host, or for nothing but a worker's id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from libs.service.transport import Transport
from tests.fixtures import certificates

Identity = Callable[[str], Transport]
"""What the party of that name shows, and whom it believes."""


def plain(_name: str) -> Transport:
    """No TLS at all."""
    return Transport()


class Authority:
    """Its files lie in `folder`. Call it for an identity: `hosts` are certified for 127.0.0.1, all others for their
    name alone, wherever they listen."""

    def __init__(self, folder: Path, hosts: frozenset[str] = frozenset({"router", "catalog"})) -> None:
        self._folder, self._hosts = folder, hosts
        certificates.authority(folder, "ca")

    def __call__(self, name: str) -> Transport:
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        if not certificate.exists():
            names = "DNS:localhost,IP:127.0.0.1" if name in self._hosts else f"DNS:{name}"
            certificates.signed(self._folder, name, names)
        return Transport(cert_file=certificate, key_file=key, ca_file=self._folder / "ca.pem")


def bind(server: grpc.aio.Server, address: str, transport: Transport) -> int:
    """Adds the port; the one that was taken where `address` leaves it open."""
    credentials = transport.server_credentials()
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)
