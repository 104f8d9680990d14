"""What both ends of a gRPC connection must agree on: TLS, keepalive, message sizes.

A client that pings more often than its server allows is sent away with GOAWAY too_many_pings after three strikes, and
with it every stream of the connection. So client and server options come from one `Transport`: the server allows pings
at half the interval clients use. Every service of a cluster is given the same `keepalive_s`; half leaves room for one
that is being changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from libs.service.errors import StartError
from libs.service.settings import ServiceSettings

Options = list[tuple[str, int | str]]

# How long a ping may stay unanswered before the connection counts as dead.
_KEEPALIVE_TIMEOUT_MS = 10_000


class TlsFileError(StartError):
    """A TLS file cannot be read."""


@dataclass(frozen=True)
class Transport:
    """keepalive_s: seconds between pings on a silent connection, at least 1 (gRPC pings no faster, whatever it is
    told); max_message_bytes: either direction."""

    keepalive_s: float = 20.0
    max_message_bytes: int = 64 << 20
    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def of(cls, settings: ServiceSettings) -> Transport:
        return cls(
            settings.keepalive_s,
            int(settings.max_message_bytes),
            settings.tls_cert_file,
            settings.tls_key_file,
            settings.tls_ca_file,
        )

    @property
    def secure(self) -> bool:
        return self.cert_file is not None

    @property
    def mutual(self) -> bool:
        """Whether both ends show a certificate."""
        return self.secure and self.ca_file is not None

    @property
    def _keepalive_ms(self) -> int:
        return int(self.keepalive_s * 1_000)

    def _both_ends(self) -> Options:
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", self._keepalive_ms),
            ("grpc.keepalive_timeout_ms", min(_KEEPALIVE_TIMEOUT_MS, self._keepalive_ms * 2)),
            ("grpc.keepalive_permit_without_calls", 1),
            # Pings between data frames are how a half-open connection under a long silent stream is noticed.
            ("grpc.http2.max_pings_without_data", 0),
        ]

    def server_options(self) -> Options:
        return [
            *self._both_ends(),
            # The core's name for the least interval between *received* pings (its MIN_RECV_PING_INTERVAL argument).
            ("grpc.http2.min_ping_interval_without_data_ms", self._keepalive_ms // 2),
            # With port sharing a second server would bind the same port and get half of the first one's connections.
            ("grpc.so_reuseport", 0),
        ]

    def client_options(self) -> Options:
        return [
            *self._both_ends(),
            # Otherwise all channels of a process to one target share one TCP connection, and its fate.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Despite its name also the time a connection attempt is given; 100 ms would not survive one lost SYN.
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # A restarted pod has a new address; the default looks names up only every 30 s.
            ("grpc.dns_min_time_between_resolutions_ms", 1_000),
            # Retries belong to callers, who know what may be repeated.
            ("grpc.enable_retries", 0),
        ]

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS. With a CA, clients must show a certificate it signed. Raises TlsFileError."""
        if self.cert_file is None or self.key_file is None:
            return None
        ca = _read(self.ca_file) if self.ca_file else None
        pair = (_read(self.key_file), _read(self.cert_file))
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS. Raises TlsFileError."""
        if self.cert_file is None or self.key_file is None:
            return None
        ca = _read(self.ca_file) if self.ca_file else None
        return grpc.ssl_channel_credentials(
            ca, private_key=_read(self.key_file), certificate_chain=_read(self.cert_file)
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsFileError(
            f"{path} cannot be read ({error.strerror})", remedy="check the tls_*_file settings"
        ) from None
