"""The calls of docs/debug.md: one table. The document's part between two markers is made from it (`python -m
prove.debug_commands`); `2-reflection` executes the table, and the document's other blocks as they stand.

Each call is a line for a shell that uses the variables named in the document, in two forms, `grpcurl` and `buf curl`.
Both speak to the services by reflection, neither needs the proto files.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "debug.md"


@dataclass(frozen=True)
class Call:
    """A gRPC call by hand. `target`: the variable that holds HOST:PORT; `body`: JSON with shell variables as $NAME."""

    key: str
    text: str
    target: str
    method: str
    body: str = "{}"

    @property
    def grpcurl(self) -> str:
        if not self.method:
            return f'grpcurl -plaintext "${self.target}" list'
        return f'grpcurl -plaintext -d {_quoted(self.body)} "${self.target}" {self.method}'

    @property
    def buf(self) -> str:
        common = "buf curl --http2-prior-knowledge --protocol grpc"
        if not self.method:
            return f'{common} --list-services "http://${self.target}"'
        return f'{common} -d {_quoted(self.body)} "http://${self.target}/{self.method}"'

    @property
    def block(self) -> str:
        """As in the document."""
        return f"{self.text}\n\n```sh\n{self.grpcurl}\n{self.buf}\n```\n"


def _quoted(body: str) -> str:
    """For a shell: single quotes, but for the variables."""
    pieces = []
    for index, piece in enumerate(body.split("$")):
        if index == 0:
            pieces.append(f"'{piece}")
            continue
        name = piece[: len(piece) - len(piece.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ_"))]
        pieces.append(f"'\"${name}\"'{piece[len(name) :]}")
    return "".join(pieces) + "'"


CALLS = (
    Call("router services", "What a router serves:", "ROUTER", ""),
    Call("worker services", "A worker:", "WORKER", ""),
    Call("catalog services", "The catalog:", "CATALOG", ""),
    Call(
        "workers",
        "Which workers a router hears, with queue, pages and measured costs:",
        "ROUTER",
        "segue.v1.Router/ListWorkers",
    ),
    Call(
        "explain",
        "How a request would be routed now, and why: every ranked candidate with each term of its score, "
        "what was pruned, and the hashes of the prompt's chain:",
        "ROUTER",
        "segue.v1.Router/Explain",
        '{"model": "$MODEL", "tokens": $TOKENS, "maxNewTokens": 16, "tenantSalt": "$SALT"}',
    ),
    Call(
        "lookup",
        "What of that chain is durable, and on which disks it lies (the fingerprint is in Explain's `chains`):",
        "CATALOG",
        "segue.v1.Catalog/Lookup",
        '{"fingerprint": "$FINGERPRINT", "tenantSalt": "$SALT", "tokens": $TOKENS}',
    ),
    Call("models", "What is served under which name:", "CATALOG", "segue.v1.Catalog/ListModels"),
    Call(
        "describe",
        "What a worker is, holds and measures: pages by state and layer group, resident prefixes, pending checkpoints, "
        "assignments:",
        "WORKER",
        "segue.v1.Worker/Describe",
    ),
)
"""In the order of the document."""


def generated() -> str:
    """The part of the document that comes from this table."""
    return "\n".join(call.block for call in CALLS)


BEGIN, END = "<!-- calls: made from prove/debug_commands.py -->\n", "<!-- end of calls -->\n"


class MarkersMissingError(ValueError):
    """The document has lost the lines between which its calls go."""


def parts(document: str) -> tuple[str, str, str]:
    """Before, between and after the markers. Raises MarkersMissingError."""
    before, begin, rest = document.partition(BEGIN)
    between, end, after = rest.partition(END)
    if not begin or not end:
        raise MarkersMissingError(f"{DOCUMENT.name} must have the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before, between, after


def written(document: str) -> str:
    """The document with its calls as this table has them."""
    before, _, after = parts(document)
    return f"{before}{BEGIN}\n{generated()}\n{END}{after}"


def commands(text: str) -> list[str]:
    """The commands in a text's `sh` blocks, lines that go on joined, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{len(CALLS)} calls written to {DOCUMENT.name}\n")
