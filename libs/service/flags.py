"""The command line of a service: one flag per setting, and a `--help` that shows every setting there is."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

if TYPE_CHECKING:
    from libs.service.settings import ServiceSettings


class FlagError(ValueError):
    """The command line cannot be read; the message says which part."""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> typing.NoReturn:
        raise FlagError(f"{message}; see --help for every setting")


def _parser(settings: type[ServiceSettings]) -> _Parser:
    parser = _Parser(
        prog=f"python -m services.{settings.service}",
        description=(settings.__doc__ or "").strip().partition("\n")[0],
        epilog="A flag wins over its variable, a variable over the file, the file over the default.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8, width=110),
        usage="%(prog)s [--config FILE] [settings]",
    )
    about = f"TOML file with the table [{settings.service}], shared settings at its top [SEGUE_CONFIG; default: none]"
    parser.add_argument("--config", metavar="FILE", help=about)
    for name, info in settings.model_fields.items():
        variable = settings.variable(name) + (f" or SEGUE_{name.upper()}" if name in settings.SHARED else "")
        about = f"{info.description} [{variable}; {default_text(info)}]".replace("%", "%%")
        if plain_type(info.annotation) is SecretStr:
            # Listed, though it takes no flag: --help shows all there is.
            group = parser.add_argument_group(f"{name} (a secret: by variable or file only)")
            group.description = about.replace("%%", "%")
        elif plain_type(info.annotation) is bool:
            parser.add_argument(settings.flag(name), action=argparse.BooleanOptionalAction, default=None, help=about)
        elif is_list(info.annotation):
            parser.add_argument(
                settings.flag(name), action="extend", type=_parts, metavar="A,B,…", help=about + " May be repeated."
            )
        else:
            parser.add_argument(settings.flag(name), metavar=_metavar(name, info), help=about)
    return parser


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def default_text(info: FieldInfo) -> str:
    """`default: 30.0`, `required` or `default: none`; never a secret's value."""
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default is None or default in ("", (), []):
        return "default: none"
    if isinstance(default, SecretStr):
        return "default: set" if default.get_secret_value() else "default: none"
    if isinstance(default, ByteSize):
        return f"default: {default.human_readable()}"
    if isinstance(default, tuple | list):
        return "default: " + ",".join(map(str, default))
    return f"default: {default}"


def _metavar(name: str, info: FieldInfo) -> str:
    kind = plain_type(info.annotation)
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    by_suffix = {
        "_s": "SECONDS",
        "_ms": "MILLISECONDS",
        "_bytes": "BYTES",
        "_file": "FILE",
        "_dir": "FOLDER",
        "listen": "HOST:PORT",
    }
    for suffix, shown in by_suffix.items():
        if name.endswith(suffix):
            return shown
    return {int: "NUMBER", float: "NUMBER", ByteSize: "BYTES", Path: "PATH"}.get(kind, "TEXT")


def plain_type(annotation: Any) -> Any:
    """The annotation without Annotated and without an optional None."""
    if typing.get_origin(annotation) is Annotated:
        return plain_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return plain_type(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def is_list(annotation: Any) -> bool:
    return typing.get_origin(plain_type(annotation)) in (list, tuple, set, frozenset)


def read_flags(settings: type[ServiceSettings], argv: Sequence[str]) -> dict[str, Any]:
    """The settings given as flags, unvalidated. Raises FlagError; SystemExit(0) for --help."""
    return {name: value for name, value in vars(_parser(settings).parse_args(argv)).items() if value is not None}
