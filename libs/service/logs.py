"""Structured logs on stderr: one event a line, JSON or for people, with the current trace and span id.

`log.info("worker lost", worker=name, epoch=7)`: the event is a constant sentence, what varies goes into fields. A log
is read by more people than may read its users' chats: fields that could hold a tenant, a credential, prompt or token
text are withheld by name, and bearer credentials are cut out of every text.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Literal, TextIO

from opentelemetry import trace

WITHHELD = frozenset(
    {
        *(
            "tenant",
            "user",
            "authorization",
            "api_key",
            "access_key",
            "secret",
            "secret_key",
            "password",
            "credentials",
        ),
        *(
            "token",
            "tokens",
            "token_id",
            "token_ids",
            "prompt",
            "prompts",
            "text",
            "message_text",
            "content",
            "messages",
        ),
        "completion",
    }
)
_CREDENTIAL = re.compile(r"(?i)\b(bearer\s+|sk-)[\w.~+/=-]{6,}")
_RESERVED = frozenset({"time", "level", "logger", "event", "trace_id", "span_id", "exception"})

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Logger:
    """Thin face of a standard logger that takes fields as keywords."""

    def __init__(self, inner: logging.Logger) -> None:
        self._inner = inner

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, None, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, None, fields)

    def warning(self, event: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        self._log(logging.WARNING, event, exc_info, fields)

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        self._log(logging.ERROR, event, exc_info, fields)

    def _log(self, level: int, event: str, error: BaseException | None, fields: Mapping[str, object]) -> None:
        if self._inner.isEnabledFor(level):
            self._inner.log(level, "%s", event, exc_info=error, extra={"segue_fields": fields})


def get_logger(name: str) -> Logger:
    return Logger(logging.getLogger(name))


def configure(service: str, level: str, style: Literal["json", "console"], stream: TextIO | None = None) -> None:
    """Sends every logger of the process, other libraries' too, to `stream` (default: stderr). May be called again."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json(service) if style == "json" else _Console())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    # Its exporter warns once per failed batch; one collector that is away is not the service's trouble.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    given: Mapping[str, object] = getattr(record, "segue_fields", {})
    return {
        (f"{key}_" if key in _RESERVED else key): "[withheld]" if key.lower() in WITHHELD else _plain(value)
        for key, value in given.items()
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else _clean(str(value))


def _clean(text: str) -> str:
    return _CREDENTIAL.sub(lambda match: f"{match[1]}[withheld]", text)


def _ids() -> dict[str, object]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}


def _exception(record: logging.LogRecord) -> str | None:
    if not record.exc_info or record.exc_info[1] is None:
        return None
    return _clean("".join(traceback.format_exception(record.exc_info[1])).rstrip())


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": _clean(record.getMessage()),
            **_ids(),
            **_fields(record),
        }
        if (error := _exception(record)) is not None:
            line["exception"] = error
        return json.dumps(line, ensure_ascii=False)


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        pairs = {**_fields(record), **_ids()}
        shown = "".join(
            f" {key}={json.dumps(v, ensure_ascii=False) if isinstance(v, str) and ' ' in v else v}"
            for key, v in pairs.items()
        )
        line = f"{when} {record.levelname.lower():<7} {_clean(record.getMessage())}{shown}"
        return f"{line}\n{error}" if (error := _exception(record)) is not None else line
