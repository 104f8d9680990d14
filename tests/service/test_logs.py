"""A log line: machine-readable, with its trace, and without what a log must not hold."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from libs.service import logs


@pytest.fixture(autouse=True)
def untouched_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(level: str = "info", style: str = "json") -> io.StringIO:
    stream = io.StringIO()
    logs.configure("router", level, "json" if style == "json" else "console", stream)
    return stream


def test_json_line_with_fields_and_trace() -> None:
    stream = written()
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1)))
    with trace.use_span(span):
        logs.get_logger("x").info("worker lost", worker="w-1", epoch=7, ratio=0.5, level="odd")
    line = json.loads(stream.getvalue())
    assert line["event"] == "worker lost"
    assert (line["worker"], line["epoch"], line["ratio"], line["level"], line["level_"]) == (
        "w-1",
        7,
        0.5,
        "info",
        "odd",
    )
    assert (line["trace_id"], line["span_id"]) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert line["time"].endswith("Z")


@pytest.mark.parametrize("style", ["json", "console"])
def test_what_is_withheld(style: str) -> None:
    stream = written(style=style)
    log = logs.get_logger("x")
    log.info("request", tenant="acme", token_ids=[1, 2], prompt="my diary", api_key="k-123", prompt_tokens=12)
    log.info("call with Bearer abcdef123456 and sk-abcdef123456", header="Bearer zyxwvu98765")
    try:
        raise ValueError("refused: Bearer abcdef123456")
    except ValueError as error:
        log.error("failed", exc_info=error)
    logging.getLogger("other.library").warning("authorization: Bearer abcdef123456")
    text = stream.getvalue()
    for private in ("acme", "[1, 2]", "diary", "k-123", "abcdef123456", "zyxwvu98765"):
        assert private not in text
    assert "12" in text
    assert "ValueError: refused: Bearer [withheld]" in text


def test_one_event_is_one_json_line_whatever_it_holds() -> None:
    stream = written()
    logs.get_logger("x").info("text\nwith lines %s %d", other="a\nb", odd={"x": object()})
    logging.getLogger("y").info("args %s", "given\n")
    assert len([json.loads(line) for line in stream.getvalue().splitlines()]) == 2


def test_level() -> None:
    stream = written("warning")
    logs.get_logger("x").info("not this")
    logs.get_logger("x").warning("but this")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["but this"]
