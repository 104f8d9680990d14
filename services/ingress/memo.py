"""Turn memo: which exact token ids stand behind a conversation's text.

A model that generated `[th, e]` may find `[the]` when the text is tokenized again for the next turn: other ids, another
hash chain, and none of the attention state of its own answer is found. So ingress remembers, per tenant and model, the
rendered text up to the end of an answer and the ids that were really processed for it (prompt and generated). The next
turn's rendered text begins with that text; its ids are those, followed by the tokenization of the rest alone.

Exactness of the text: an entry is only made if the ids decode to exactly the text the template shows (a template may
trim an answer; then the ids of a trailing token are left out, or there is no entry). The rest is tokenized apart only
from a boundary on (see text_model), where that gives the ids of the whole. A miss costs cache hits, nothing else.

Bounded: entries hold only the ids after their parent's, and count their bytes; least recently used go first. A use
moves an entry and then its parents to the recent end, so whatever is evicted has no child left. Texts are not kept,
only their BLAKE2b-256 digests. Tenants share nothing: the tenant and the model are the key of a table of its own.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ENTRY_BYTES = 256  # digest, object and dictionary overhead, about


@dataclass(frozen=True)
class Scope:
    """Whose turns: nothing is shared between scopes."""

    tenant: str
    model: str


@dataclass(frozen=True, eq=False)
class Entry:
    """One remembered turn."""

    digest: bytes
    parent: Entry | None
    suffix: array[int]
    """Ids after the parent's."""

    @property
    def bytes(self) -> int:
        return len(self.suffix) * self.suffix.itemsize + _ENTRY_BYTES

    def ids(self) -> list[int]:
        parts: list[array[int]] = []
        entry: Entry | None = self
        while entry is not None:
            parts.append(entry.suffix)
            entry = entry.parent
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True)
class Found:
    """A remembered beginning of a text: its first `length` characters have these ids."""

    entry: Entry
    length: int
    ids: list[int]


class _Table:
    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.bytes = 0


class TurnMemo:
    """All scopes' turns. Not thread-safe: used from one event loop."""

    def __init__(self, bytes_per_scope: int, max_scopes: int) -> None:
        """Memory is at most their product. 0 bytes = remember nothing."""
        self._limit = bytes_per_scope
        self._max_scopes = max_scopes
        self._tables: OrderedDict[Scope, _Table] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(table.bytes for table in self._tables.values())

    def longest(self, scope: Scope, text: str, boundary: re.Pattern[str] | None) -> Found | None:
        """The longest remembered text that `text` begins with and after which a boundary follows."""
        table = self._tables.get(scope)
        if table is None or boundary is None:
            return None
        self._tables.move_to_end(scope)
        found: tuple[Entry, int] | None = None
        for at, digest in _digests(text, boundary):
            entry = table.entries.get(digest)
            if entry is not None:
                found = (entry, at)
        if found is None:
            return None
        self._touch(table, found[0])
        return Found(found[0], found[1], found[0].ids())

    def remember(self, scope: Scope, text: str, ids: Sequence[int], parent: Entry | None) -> None:
        """Notes that `text` is `ids`. `parent`: the entry their beginning was taken from, if any."""
        table = self._tables.setdefault(scope, _Table())
        self._tables.move_to_end(scope)
        while len(self._tables) > self._max_scopes:
            self._tables.popitem(last=False)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        if digest in table.entries:  # the same answer again; entries that build on the first one stay true
            self._touch(table, table.entries[digest])
            return
        if parent is not None and table.entries.get(parent.digest) is not parent:
            parent = None  # evicted meanwhile
        known = len(parent.ids()) if parent is not None else 0
        entry = Entry(digest, parent, array("I", ids[known:]))
        if entry.bytes > self._limit:
            return
        table.entries[digest] = entry
        table.bytes += entry.bytes
        self._touch(table, entry)
        while table.bytes > self._limit:
            _, evicted = table.entries.popitem(last=False)
            table.bytes -= evicted.bytes

    @staticmethod
    def _touch(table: _Table, entry: Entry) -> None:
        at: Entry | None = entry
        while at is not None:
            table.entries.move_to_end(at.digest)
            at = at.parent


def _digests(text: str, boundary: re.Pattern[str]) -> Iterator[tuple[int, bytes]]:
    """Each position before a boundary, with the digest of the text up to there. Reads the text once."""
    running, done = hashlib.blake2b(digest_size=32), 0
    for match in boundary.finditer(text):
        running.update(text[done : match.start()].encode("utf-8", "surrogatepass"))
        done = match.start()
        yield done, running.copy().digest()
