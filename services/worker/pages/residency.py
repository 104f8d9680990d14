"""What prefixes are resident: found by chain hash, confirmed by comparing tokens, advertised as a numbered journal.

A route can be continued at every chunk boundary it still fully holds (each windowed group back to its window) and at
its *marks*: the exact ends of its generations, and these rounded down to a tail's length (16), which is what a router
can name. Chunk boundaries are keyed by their hash, marks by the hash of the last full chunk before them. A hash alone
never decides: the tokens are compared.

The journal serves heartbeats: `since(version)` gives what came and went after a version that a router has seen, or None
when that is too long ago and a snapshot is due. A running assignment's computed boundaries are listed like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.continuation.chain import TAIL_TOKENS, chunks_after, node_hash
from services.worker.pages.route import Route
from services.worker.pages.sizing import GroupSpec, PageSizes

_JOURNAL_LENGTH = 16_384
_MARKS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix: `boundary` tokens of `route`."""

    route: Route
    boundary: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Prefixes as (hash → (end, fingerprint)) that are there now, and hashes that went, up to `version`.

    `snapshot`: `came` is everything, whatever was known before.
    """

    version: int
    came: dict[str, tuple[int, str]]
    went: tuple[str, ...]
    snapshot: bool = False


def chunk_hashes(root: str, tokens: Sequence[int]) -> list[str]:
    """Hash of every full chunk."""
    return [node.hash for node in chunks_after(root, tokens)]


class ResidencyIndex:
    """Not thread-safe: the pool's lock protects it."""

    def __init__(self, groups: Sequence[GroupSpec], sizes: PageSizes) -> None:
        self._groups = tuple(groups)
        self._sizes = sizes
        self._chunks: dict[str, dict[int, Route]] = {}
        self._marks: dict[str, dict[tuple[int, int], Route]] = {}
        self._present: dict[str, dict[int, tuple[int, str]]] = {}
        self._journal: deque[tuple[int, str]] = deque()
        self.version = 0

    def usable(self, route: Route, boundary: int) -> bool:
        """Whether a continuation can begin at `boundary` of the route."""
        if not 0 < boundary <= route.sealed:
            return False
        return all(
            low == 0 or low <= self._sizes.first_needed(group.window, boundary) // self._sizes.page
            for group, low in zip(self._groups, route.low, strict=True)
        )

    def find(self, root: str, tokens: Sequence[int], hashes: Sequence[str], limit: int) -> Match | None:
        """The longest resident prefix of at most `limit` tokens. `hashes`: of the full chunks of `tokens`.

        At equal length a route nobody extends and that ends there wins (it needs no copy), then the oldest.
        """
        chunk = self._sizes.chunk
        for full in range(min(limit // chunk, len(hashes)), -1, -1):
            start, head = full * chunk, hashes[full - 1] if full else root
            marked = self._marks.get(head)
            found = (
                [Match(route, mark) for (_, mark), route in marked.items() if start < mark <= min(limit, start + chunk)]
                if marked
                else []
            )
            if full:
                found += [Match(route, start) for route in self._chunks.get(head, {}).values()]
            # Of many routes that share a prefix the tokens of one are compared, as a rule.
            for match in sorted(found, key=_preference):
                if match.route.tokens[: match.boundary] == list(tokens[: match.boundary]):
                    return match
        return None

    def has(self, digest: str) -> bool:
        """Whether a continuation can begin at the end of the full chunk of this hash."""
        return digest in self._chunks

    def update(self, route: Route) -> None:
        """Lists exactly the boundaries at which the route can be continued now."""
        chunk, listed = self._sizes.chunk, {}
        for index in range(min(route.sealed // chunk, len(route.hashes))):
            if self.usable(route, (index + 1) * chunk):
                listed[route.hashes[index]] = (index + 1) * chunk
        for digest in [digest for digest in route.listed if digest not in listed]:
            self._forget(route, digest)
        for digest, end in listed.items():
            if digest not in route.listed:
                self._chunks.setdefault(digest, {})[route.id] = route
                self._list(route, digest, end)
        route.listed = listed
        self._update_marks(route)

    def remove(self, route: Route) -> None:
        """Forgets the route."""
        for digest in list(route.listed):
            self._forget(route, digest)
        route.listed = {}
        for mark in list(route.marks):
            self._drop_mark(route, mark)
        route.marks = set()

    def add_mark(self, route: Route, end: int) -> None:
        """A generation ended at `end`."""
        for mark in {end, end // TAIL_TOKENS * TAIL_TOKENS}:
            if mark % self._sizes.chunk and mark not in route.marks and self.usable(route, mark):
                route.marks.add(mark)
                self._marks.setdefault(self._head(route, mark), {})[(route.id, mark)] = route
                if (digest := self._tail_hash(route, mark)) is not None:
                    self._list(route, digest, mark)
        for mark in sorted(route.marks)[: -_MARKS_KEPT * 2]:
            self._drop_mark(route, mark)

    def since(self, version: int) -> Changes | None:
        """What changed after `version`; None where the journal no longer reaches back so far."""
        if version > self.version or (self._journal and version < self._journal[0][0] - 1):
            return None
        touched = {digest for at, digest in self._journal if at > version}
        came = {digest: next(iter(self._present[digest].values())) for digest in touched if digest in self._present}
        return Changes(self.version, came, tuple(sorted(touched - came.keys())))

    def snapshot(self) -> Changes:
        """Everything that is there."""
        came = {digest: next(iter(routes.values())) for digest, routes in self._present.items()}
        return Changes(self.version, came, (), snapshot=True)

    def check(self, routes: Iterable[Route]) -> list[str]:
        """Contradictions between the index and the routes."""
        problems: list[str] = []
        expected: dict[str, set[int]] = {}
        for route in routes:
            for digest, end in route.listed.items():
                expected.setdefault(digest, set()).add(route.id)
                if not self.usable(route, end) or route.hashes[end // self._sizes.chunk - 1] != digest:
                    problems.append(f"route {route.id} is listed at {end} and cannot be continued there")
            for mark in route.marks:
                if not self.usable(route, mark):
                    problems.append(f"route {route.id} has a mark at {mark} and cannot be continued there")
                if (route.id, mark) not in self._marks.get(self._head(route, mark), {}):
                    problems.append(f"mark {mark} of route {route.id} is not in the index")
        if {digest: set(found) for digest, found in self._chunks.items()} != expected:
            problems.append("index and routes list different chunks")
        marks = sum(len(found) for found in self._marks.values())
        if marks != sum(len(route.marks) for route in routes):
            problems.append("index holds marks of no route")
        return problems

    def _update_marks(self, route: Route) -> None:
        for mark in [mark for mark in route.marks if not self.usable(route, mark)]:
            self._drop_mark(route, mark)

    def _drop_mark(self, route: Route, mark: int) -> None:
        head = self._head(route, mark)
        route.marks.discard(mark)
        found = self._marks[head]
        del found[(route.id, mark)]
        if not found:
            del self._marks[head]
        if (digest := self._tail_hash(route, mark)) is not None:
            self._unlist(route, digest)

    def _head(self, route: Route, mark: int) -> str:
        full = mark // self._sizes.chunk
        return route.hashes[full - 1] if full else route.of.root

    def _tail_hash(self, route: Route, mark: int) -> str | None:
        """What the mark is called in heartbeats; None for one that no tail can end at."""
        start = mark // self._sizes.chunk * self._sizes.chunk
        return None if mark % TAIL_TOKENS else node_hash(self._head(route, mark), route.tokens[start:mark])

    def _forget(self, route: Route, digest: str) -> None:
        found = self._chunks[digest]
        del found[route.id]
        if not found:
            del self._chunks[digest]
        self._unlist(route, digest)

    def _list(self, route: Route, digest: str, end: int) -> None:
        present = self._present.setdefault(digest, {})
        if not present:
            self._log(digest)
        present[route.id] = (end, route.of.fingerprint)

    def _unlist(self, route: Route, digest: str) -> None:
        present = self._present[digest]
        del present[route.id]
        if not present:
            del self._present[digest]
            self._log(digest)

    def _log(self, digest: str) -> None:
        self.version += 1
        self._journal.append((self.version, digest))
        if len(self._journal) > _JOURNAL_LENGTH:
            self._journal.popleft()


def _preference(match: Match) -> tuple[int, bool, int]:
    route = match.route
    return (-match.boundary, route.holder is not None or route.end != match.boundary, route.id)
