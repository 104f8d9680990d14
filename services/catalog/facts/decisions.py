"""Recorded decisions: sealed into objects, indexed in etcd, read back by request, time, worker and reason.

A batch is one immutable object under `decisions/<day>/<batch>.jsonl`: one canonical JSON text of a DecisionRecord a
line, by time. Its name begins with the time of its first record and ends with the start of its content's BLAKE3, so
that the same records seal to the same object, and names sort by time. The index entry says what a query can rule the
batch out by: times, workers, outcomes, decline reasons, models, and four bytes of a hash of each request id.

The object is written before its entry: an entry never names bytes that are not there. `<day>` is the UTC day of the
first record, clamped to the catalog's own clock, so that a router's wrong clock cannot outlive retention.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3
from google.protobuf.json_format import MessageToDict, ParseDict

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import common_pb2
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import GetRange, KeyValue, Put, prefix_end
from services.catalog.facts.errors import InvalidRequestError, UnknownDecisionError
from services.catalog.facts.keys import Keys
from services.catalog.facts.known import check_count
from services.catalog.facts.paging import page_size
from services.catalog.facts.uses import day_of
from services.catalog.parallel import gather
from services.catalog.store import ObjectStore

MAX_RECORDS = 1_000
DEFAULT_PAGE = 100
_BATCHES_AT_ONCE = 32
_MS_DIGITS = 14


@dataclass(frozen=True, slots=True)
class Query:
    """Of ListDecisions. Empty, zero and unspecified rule nothing out."""

    request_id: str = ""
    from_ms: int = 0
    until_ms: int = 0
    worker: str = ""
    outcome: pb.AttemptOutcome = pb.ATTEMPT_OUTCOME_UNSPECIFIED
    decline: common_pb2.DeclineReason = common_pb2.DECLINE_REASON_UNSPECIFIED
    model: str = ""

    def may_hold(self, index: dict[str, object]) -> bool:
        """Whether a batch with this index entry may hold a match."""
        return (
            (not self.until_ms or int(str(index["first_ms"])) < self.until_ms)
            and int(str(index["last_ms"])) >= self.from_ms
            and (not self.worker or self.worker in _items(index, "workers"))
            and (not self.model or self.model in _items(index, "models"))
            and (not self.outcome or self.outcome in _items(index, "outcomes"))
            and (not self.decline or self.decline in _items(index, "declines"))
            and (not self.request_id or _short(self.request_id) in _shorts(str(index["requests"])))
        )

    def holds(self, record: pb.DecisionRecord) -> bool:
        """Whether a record is a match."""
        return (
            (not self.request_id or record.request_id == self.request_id)
            and record.decided_ms >= self.from_ms
            and (not self.until_ms or record.decided_ms < self.until_ms)
            and (not self.model or record.model == self.model)
            and (not self.worker or self.worker in _workers(record))
            and (not self.outcome or any(a.outcome == self.outcome for a in record.attempts))
            and (not self.decline or any(a.decline == self.decline for a in record.attempts))
        )


class Decisions:
    """now_ms: unix milliseconds. unreadable: told the key of a sealed object that is missing or damaged."""

    def __init__(
        self,
        etcd: EtcdClient,
        keys: Keys,
        store: ObjectStore,
        *,
        now_ms: Callable[[], int],
        unreadable: Callable[[str], None],
    ) -> None:
        self._etcd, self._keys, self._store = etcd, keys, store
        self._now_ms, self._unreadable = now_ms, unreadable

    async def append(self, records: Sequence[pb.DecisionRecord]) -> tuple[str, int, int]:
        """(object key, its bytes, etcd's revision). Raises InvalidRequestError."""
        if not records:
            raise InvalidRequestError("records", 0, "expected at least one")
        check_count("records", len(records), MAX_RECORDS)
        for record in records:
            _check(record)
        ordered = sorted(records, key=lambda r: (r.decided_ms, r.request_id, r.plan_id))
        body = b"".join(_line(record) for record in ordered)
        digest = blake3(body).hexdigest()
        first_ms, last_ms = ordered[0].decided_ms, ordered[-1].decided_ms
        today = day_of(self._now_ms())
        day = day_text(min(today, max(day_of(first_ms), today - 1)))
        batch = f"{first_ms:0{_MS_DIGITS}d}-{digest[:32]}"
        key = object_key(day, batch)
        await self._store.put(key, body)
        index = {
            "blake3": digest,
            "count": len(ordered),
            "declines": sorted({a.decline for r in ordered for a in r.attempts if a.decline}),
            "first_ms": first_ms,
            "last_ms": last_ms,
            "models": sorted({r.model for r in ordered}),
            "outcomes": sorted({a.outcome for r in ordered for a in r.attempts}),
            "requests": "".join(sorted({_short(r.request_id) for r in ordered})),
            "size": len(body),
            "workers": sorted({worker for r in ordered for worker in _workers(r)}),
        }
        value = json.dumps(index, sort_keys=True, separators=(",", ":")).encode()
        outcome = await self._etcd.transact(success=[Put(self._keys.decision(day, batch), value)])
        return key, len(body), outcome.revision

    async def find(self, query: Query, asked: int, token: str) -> tuple[list[pb.DecisionRecord], str, int]:
        """(records, next token, revision); newest batch first. Raises InvalidRequestError."""
        size = page_size(asked, MAX_RECORDS) if asked else DEFAULT_PAGE
        place, _, skip_text = token.partition(":")
        if token and not skip_text.isdigit():
            raise InvalidRequestError("page_token", token, "expected next_page_token of a call with the same filters")
        skip = int(skip_text) if skip_text else 0
        root = self._keys.decisions
        # The batch named by the token is taken up again, after what it has already given.
        end = root + place.encode() + b"\0" if place else prefix_end(root)
        outcome = await self._etcd.transact(success=[GetRange(root, end, _BATCHES_AT_ONCE, descending=True)])
        (found,) = outcome.reads
        likely = [kv for kv in found if query.may_hold(json.loads(kv.value))]
        bodies = await gather(self._records(kv) for kv in likely)
        answer: list[pb.DecisionRecord] = []
        for kv, records in zip(likely, bodies, strict=True):
            matching = [record for record in reversed(records) if query.holds(record)]
            name = kv.key[len(root) :].decode()
            begun = skip if name == place else 0
            taken = matching[begun : begun + size - len(answer)]
            answer += taken
            if len(answer) == size:
                return answer, f"{name}:{begun + len(taken)}", outcome.revision
        if len(found) < _BATCHES_AT_ONCE:
            return answer, "", outcome.revision
        return answer, f"{found[-1].key[len(root) :].decode()}:{MAX_RECORDS}", outcome.revision

    async def of_request(self, request_id: str) -> tuple[list[pb.DecisionRecord], int]:
        """Oldest first, and the revision. Raises InvalidRequestError, UnknownDecisionError."""
        if not request_id:
            raise InvalidRequestError("request_id", request_id, "expected a request's id")
        query, records, revision = Query(request_id=request_id), list[pb.DecisionRecord](), 0
        async for page in self._index():
            likely = [kv for kv in page if query.may_hold(json.loads(kv.value))]
            for found in await gather(self._records(kv) for kv in likely):
                records += [record for record in found if query.holds(record)]
            revision = max([revision, *(kv.mod_revision for kv in page)])
        if not records:
            raise UnknownDecisionError(request_id)
        return sorted(records, key=lambda r: (r.decided_ms, r.plan_id)), revision

    async def _index(self) -> AsyncIterator[tuple[KeyValue, ...]]:
        async for page in self._etcd.scan(self._keys.decisions):
            yield page

    async def _records(self, kv: KeyValue) -> list[pb.DecisionRecord]:
        """By time. Empty where the sealed object is gone or damaged, which is reported."""
        _, day, batch = self._keys.relative(kv.key)
        key = object_key(day, batch)
        body = await self._store.read(key)
        if body is None or blake3(body).hexdigest() != json.loads(kv.value)["blake3"]:
            self._unreadable(key)
            return []
        # Fields of a later version are passed over.
        return [
            ParseDict(json.loads(line), pb.DecisionRecord(), ignore_unknown_fields=True) for line in body.splitlines()
        ]


def object_key(day: str, batch: str) -> str:
    return f"decisions/{day}/{batch}.jsonl"


def day_text(day: int) -> str:
    """Eight digits, so that keys sort by day. day: since 1970-01-01."""
    return f"{day:08d}"


def _line(record: pb.DecisionRecord) -> bytes:
    value = MessageToDict(record, preserving_proto_field_name=True)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _check(record: pb.DecisionRecord) -> None:
    if not record.request_id:
        raise InvalidRequestError("request_id", record.request_id, "expected one in every record")
    if not 0 < record.decided_ms < 10**_MS_DIGITS:
        raise InvalidRequestError("decided_ms", record.decided_ms, "expected unix milliseconds")
    if len(record.terms) not in (0, len(record.ranked)):
        raise InvalidRequestError("terms", len(record.terms), f"expected none, or those of {len(record.ranked)} ranked")
    for attempt in record.attempts:
        if attempt.choice >= len(record.ranked):
            raise InvalidRequestError("choice", attempt.choice, f"expected an index into {len(record.ranked)} ranked")


def _workers(record: pb.DecisionRecord) -> set[str]:
    return {record.ranked[a.choice].worker for a in record.attempts} | ({record.worker} if record.worker else set())


def _short(request_id: str) -> str:
    return blake3(request_id.encode()).hexdigest(length=4)


def _shorts(joined: str) -> set[str]:
    return {joined[i : i + 8] for i in range(0, len(joined), 8)}


def _items(index: dict[str, object], name: str) -> list[object]:
    found = index[name]
    return found if isinstance(found, list) else []
