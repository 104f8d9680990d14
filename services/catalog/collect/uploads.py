"""Multipart uploads that were begun and neither completed nor given up: a publisher died, or lost the store.

Their parts are no objects: no listing shows them, no fact can name them, and they cost all the same. Those that are
older than the grace period, which exceeds any upload's deadline, are given up. Of one that is completed at that very
moment nothing is lost: it exists, or it does not and its publisher is told.

A store that does not let the catalog see them does not stop the collection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from libs.continuation.errors import IdentityError
from libs.continuation.keys import parse_key
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.logs import get_logger
from services.catalog.collect.orphans import CHUNKS
from services.catalog.collect.run import Run, Step
from services.catalog.store import StoreDeniedError, Upload

log = get_logger(__name__)


async def give_up(run: Run) -> AsyncIterator[None]:
    """Yields after each page of the listing."""
    try:
        async for page in run.store.uploads(CHUNKS):
            for upload in page:
                run.check()
                await _one(run, upload)
            yield
    except StoreDeniedError as error:
        log.warning("unfinished uploads are left alone", error=str(error))


async def _one(run: Run, upload: Upload) -> None:
    try:
        key = parse_key(upload.key)
    except IdentityError:
        run.totals.foreign += 1
        return
    if not upload.begun_ms or upload.begun_ms + run.limits.grace_ms > run.now_ms:
        run.totals.uploads_waiting += 1
        return
    if not run.dry:
        await run.store.abort(upload)
        await run.reached(Step.UPLOAD_ABORTED)
    run.totals.uploads_aborted += 1
    item = pb.Collected(reason=pb.COLLECT_REASON_UNFINISHED_UPLOAD, key=upload.key)
    item.fingerprint, item.owner, item.hash = key.fingerprint, key.owner, key.hash
    run.fresh.append(item)
