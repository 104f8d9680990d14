"""Pages over keys. A page's token is the last key it looked at, below the prefix of all keys: readable, stateless."""

from __future__ import annotations

from dataclasses import dataclass

from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import GetRange, KeyValue, prefix_end
from services.catalog.facts.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Page:
    """`token` is that of the next page; empty = there is none."""

    found: tuple[KeyValue, ...]
    token: str
    revision: int


def page_size(asked: int, limit: int) -> int:
    """0 = the limit. Raises InvalidRequestError above it."""
    if asked > limit:
        raise InvalidRequestError("page_size", asked, f"expected at most {limit}")
    return asked or limit


async def read_page(etcd: EtcdClient, prefix: bytes, root: bytes, token: str, size: int) -> Page:
    """The next keys under `prefix` after the one that `token` names below `root`. Raises InvalidRequestError."""
    start = prefix
    if token:
        after = root + token.encode()
        if not after.startswith(prefix):
            raise InvalidRequestError("page_token", token, "expected next_page_token of a call with the same filters")
        start = after + b"\0"
    outcome = await etcd.transact(success=(GetRange(start, prefix_end(prefix), size),))
    (found,) = outcome.reads
    return Page(found, found[-1].key[len(root) :].decode() if len(found) == size else "", outcome.revision)
