"""Settings of a service: flags over environment over a TOML file over defaults, typed, with every problem on one line.

A setting `shutdown_grace_s` of the router is the flag `--shutdown-grace-s`, the variable
`SEGUE_ROUTER_SHUTDOWN_GRACE_S` and the key `shutdown_grace_s` in the file's `[router]` table. Settings that mean the
same for every service (logs, traces, TLS, …: `SHARED`) may also be given once for all, as `SEGUE_LOG_LEVEL` or at the
top of the file; the service's own place wins. One file may hold every service's table. Secrets have no flag, because
a command line is public on its machine.

Unknown flags, keys, tables and `SEGUE_ROUTER_…` variables are refused: a misspelt setting must not leave its default.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails as Problem
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from libs.service.flags import FlagError, default_text, is_list, plain_type, read_flags

S = TypeVar("S", bound="ServiceSettings")

SERVICES = ("router", "worker", "catalog", "ingress")
"""Tables a configuration file may hold."""

# A Kubernetes Service called segue-router puts SEGUE_ROUTER_PORT, SEGUE_ROUTER_SERVICE_HOST … into every pod.
_KUBERNETES_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")


def _check_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:7000 or [::1]:7000; port 0 takes any free one")
    return value


Address = Annotated[str, AfterValidator(_check_address)]
"""HOST:PORT."""


def _check_http_endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT, without a path")
    return value


HttpEndpoint = Annotated[str, AfterValidator(_check_http_endpoint)]
"""http://HOST:PORT or https://HOST:PORT."""


class ServiceSettings(BaseSettings):
    """What every service can be told. A subclass names its `service` and adds fields, each described, with its unit."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    service: ClassVar[str] = ""
    SHARED: ClassVar[frozenset[str]] = frozenset(
        {
            "otlp_endpoint",
            "log_level",
            "log_format",
            "tls_cert_file",
            "tls_key_file",
            "tls_ca_file",
            "shutdown_grace_s",
            "shutdown_delay_s",
            "keepalive_s",
            "max_message_bytes",
            "uvloop",
        }
    )

    listen: Address = Field(
        "127.0.0.1:0", description="Address the service's API listens on; port 0 takes any free one"
    )
    metrics_listen: Address = Field(
        "127.0.0.1:0", description="Address of /metrics, /healthz and /readyz (HTTP); port 0 takes any free one"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OTLP/gRPC collector to send traces to, as http://HOST:PORT or https://HOST:PORT; unset: no traces",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line written")
    log_format: Literal["json", "console"] = Field(
        "console", description="json: one object a line; console: for people"
    )
    tls_cert_file: Path | None = Field(None, description="PEM certificate chain of this service; unset: no TLS")
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file")
    tls_ca_file: Path | None = Field(
        None,
        description="PEM certificates peers are verified against; a server that has it demands client certificates",
    )
    shutdown_grace_s: float = Field(
        30.0,
        ge=0,
        le=3_600,
        description="Longest time, in seconds, that running requests may take to finish at shutdown",
    )
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        le=300,
        description="Seconds to go on accepting requests after turning not ready, until load balancers have noticed",
    )
    keepalive_s: float = Field(
        20.0,
        ge=1,
        le=3_600,
        description="Seconds of silence after which a gRPC connection is pinged; alike on all services",
    )
    max_message_bytes: ByteSize = Field(
        ByteSize(64 << 20),
        ge=1 << 20,
        le=1 << 30,
        description="Largest gRPC message sent or taken, in bytes (64MiB is fine too)",
    )
    uvloop: bool = Field(True, description="Use the uvloop event loop where it is installed")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        undocumented = [name for name, info in cls.model_fields.items() if not info.description]
        if undocumented:
            raise TypeError(f"settings without a description: {', '.join(undocumented)}")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` layers the sources and knows where each value came from; a constructor reads nothing behind one's back.
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: object, info: Any) -> object:
        """Lists come from flags and variables as a,b,c."""
        if isinstance(value, str) and is_list(cls.model_fields[info.field_name].annotation):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            given, lacking = (
                ("tls_cert_file", "tls_key_file") if self.tls_cert_file else ("tls_key_file", "tls_cert_file")
            )
            raise ValueError(f"{given} is set without {lacking}: set both, or neither for no TLS")
        if self.tls_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_ca_file is set without tls_cert_file and tls_key_file: set all three for mutual TLS")
        return self

    @classmethod
    def flag(cls, name: str) -> str:
        return "--" + name.replace("_", "-")

    @classmethod
    def variable(cls, name: str) -> str:
        return f"SEGUE_{cls.service.upper()}_{name.upper()}"


class SettingsError(ValueError):
    """One or more settings are wrong; `problems` holds one line each: where it was given, the value, the remedy."""

    def __init__(self, service: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"segue {service}: {problem}" for problem in problems))


def load(settings: type[S], argv: Sequence[str], environ: Mapping[str, str]) -> S:
    """The settings a process was given. Raises SettingsError; SystemExit(0) for `--help`."""
    try:
        flags = read_flags(settings, argv)
    except FlagError as error:
        raise SettingsError(settings.service, [str(error)]) from None
    variables, names = _read_environment(settings, environ)
    config = flags.pop("config", None) or environ.get("SEGUE_CONFIG") or None
    table, keys = _read_file(settings, Path(config)) if config else ({}, {})
    given = {**table, **variables, **flags}
    where = {**keys, **names, **{name: settings.flag(name) for name in flags}}
    try:
        return settings(**given)
    except ValidationError as error:
        raise SettingsError(settings.service, [_explain(settings, p, given, where) for p in error.errors()]) from None


def _read_environment(
    settings: type[ServiceSettings], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    shared = {f"SEGUE_{name.upper()}": name for name in settings.SHARED}
    own = {settings.variable(name): name for name in settings.model_fields}
    prefix = settings.variable("")
    problems = []
    for variable in environ:
        known = own if variable.startswith(prefix) else shared
        if variable in known or not variable.startswith("SEGUE_") or variable == "SEGUE_CONFIG":
            continue
        near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
        # Variables of other services and of the command line are none of ours, but a near miss is a misspelling.
        if (known is own and not _KUBERNETES_LINK.search(variable)) or (
            near and not _of_other_service(settings, variable)
        ):
            hint = f"did you mean {near[0]}?" if near else "unset it, or see --help for every setting"
            problems.append(f"{variable}: unknown setting; {hint}")
    if problems:
        raise SettingsError(settings.service, problems)
    # An empty variable counts as unset: that is what optional entries of a deployment's manifest leave behind.
    names = {name: variable for known in (shared, own) for variable, name in known.items() if environ.get(variable)}
    links = {name for name, variable in names.items() if _is_link(variable, environ[variable])}
    names = {name: variable for name, variable in names.items() if name not in links}
    return {name: environ[variable] for name, variable in names.items()}, names


def _is_link(variable: str, value: str) -> bool:
    return _KUBERNETES_LINK.search(variable) is not None and value.startswith(("tcp://", "udp://", "sctp://"))


def _of_other_service(settings: type[ServiceSettings], variable: str) -> bool:
    return any(variable.startswith(f"SEGUE_{name.upper()}_") for name in SERVICES if name != settings.service)


def _read_file(settings: type[ServiceSettings], path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        whole = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SettingsError(
            settings.service, [f"--config={path}: cannot be read: {reason}; give a readable TOML file"]
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(settings.service, [f"--config={path}: not valid TOML: {error}"]) from None
    problems, values, keys = [], {}, {}
    own = whole.get(settings.service, {})
    if not isinstance(own, dict):
        raise SettingsError(settings.service, [f"{path}: {settings.service} must be a table: [{settings.service}]"])
    for key, value in whole.items():
        if key in settings.SHARED:
            values[key], keys[key] = value, f"{path}: {key}"
        elif key not in (*SERVICES, settings.service):
            problems.append(_unknown_key(path, key, [*settings.SHARED, *SERVICES], "at the top"))
    for key, value in own.items():
        if key in settings.model_fields:
            values[key], keys[key] = value, f"{path}: {settings.service}.{key}"
        else:
            problems.append(_unknown_key(path, key, list(settings.model_fields), f"in [{settings.service}]"))
    if problems:
        raise SettingsError(settings.service, problems)
    return values, keys


def _unknown_key(path: Path, key: str, known: list[str], place: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    return f"{path}: {key}: unknown setting {place}; " + (
        f"did you mean {near[0]}?" if near else "see --help for every setting"
    )


def _explain(
    settings: type[ServiceSettings], problem: Problem, given: Mapping[str, Any], where: Mapping[str, str]
) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    info = settings.model_fields[name]
    secret = plain_type(info.annotation) is SecretStr
    if problem["type"] == "missing" and secret:  # which has no flag
        return f"{settings.variable(name)}: required; set it, or give {name} in the file of --config"
    if problem["type"] == "missing":
        return f"{settings.flag(name)}: required; give it, or set {settings.variable(name)}"
    place = where.get(name, settings.flag(name))
    shown = "(not shown)" if secret else " ".join(str(given.get(name)).split())[:120]
    return f"{place}={shown}: {message[:1].lower()}{message[1:]} ({info.description}; {default_text(info)})"
