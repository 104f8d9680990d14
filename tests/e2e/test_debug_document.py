"""docs/debug.md has exactly the calls that `2-reflection` executes."""

from __future__ import annotations

import json
import subprocess

import pytest

from prove.debug_commands import BEGIN, CALLS, DOCUMENT, MarkersMissingError, commands, parts, written


def test_the_document_has_the_calls_of_the_table() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document == written(document), "python -m prove.debug_commands brings the document up to date"


def test_a_changed_call_is_noticed() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    changed = document.replace('"fingerprint": "', '"fingerprints": "')
    assert changed != document == written(changed)
    with pytest.raises(MarkersMissingError):
        parts(document.replace(BEGIN, ""))


def test_bodies_are_json_once_a_shell_has_filled_in_the_variables() -> None:
    env = {
        "MODEL": "m-1",
        "TOKENS": "[1, 2]",
        "SALT": "ab",
        "FINGERPRINT": "cd",
        "ROUTER": "r",
        "PATH": "/usr/bin:/bin",
    }
    for call in CALLS:
        for form in (call.grpcurl, call.buf):
            said = subprocess.run(["bash", "-c", f"printf '%s\\n' {form}"], env=env, capture_output=True, text=True)
            words = said.stdout.splitlines()
            assert not said.returncode and (("-d" in words) == bool(call.method))
            if call.method:
                json.loads(words[words.index("-d") + 1])


def test_commands_are_taken_whole() -> None:
    text = "a\n\n```sh\nX=$(one \\\n  | two)\nthree\n```\n    four\n```sh\nfive\n```\n"
    assert commands(text) == ["X=$(one    | two)", "three", "five"]
