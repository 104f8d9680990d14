"""Chunks as the catalog lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from cli.connection import fail
from libs.contracts.segue.v1 import catalog_pb2 as pb


async def all_chunks(
    stub: Any, *, fingerprint: str = "", owner: str = "", hash_prefix: str = ""
) -> AsyncIterator[pb.ListedChunk]:
    """Every chunk that matches, page by page."""
    token = ""
    while True:
        page = await stub.ListChunks(
            pb.ListChunksRequest(fingerprint=fingerprint, owner=owner, hash_prefix=hash_prefix, page_token=token)
        )
        for chunk in page.chunks:
            yield chunk
        token = page.next_page_token
        if not token:
            return


async def find_chunk(stub: Any, hash: str, fingerprint: str) -> pb.ListedChunk:
    """The one chunk whose hash begins so. Ends the command if there is none, or more than one."""
    found: list[pb.ListedChunk] = []
    async for chunk in all_chunks(stub, hash_prefix=hash, fingerprint=fingerprint):
        found.append(chunk)
        if len(found) > 1:
            fail(f"more than one chunk begins with {hash}: give more digits, or --fingerprint")
    if not found:
        fail(f"no chunk begins with {hash}: see `segue cache ls --chunks`")
    return found[0]
