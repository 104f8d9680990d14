"""S3's multipart upload, as the object store tier uses it: parts side by side, visible at once, and only if absent.

The client's own multipart upload has no condition and hides its retries; these are its four steps, the one place that
uses the client's private calls for them. The object appears with `complete`, whole, which carries If-None-Match: * like
a plain put. An upload that fails is given up, so that its parts do not stay and cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast
from xml.etree import ElementTree

from minio import Minio
from minio.helpers import md5sum_hash
from minio.xml import Element, SubElement, findtext, getbytes

from libs.chunks.errors import ServerFailedError

Part = tuple[int, str]
"""Part number, from 1, and its ETag."""

_XML = "application/xml"


class MultipartUpload:
    """One object being written. Every method is one request and raises what the client raises."""

    def __init__(self, client: Minio, bucket: str, key: str) -> None:
        self._client, self._bucket, self._key = client, bucket, key
        self._upload = client._create_multipart_upload(bucket, key, {})

    def part(self, number: int, data: memoryview) -> Part:
        """Sends one part; sending it again replaces it."""
        # Typed as bytes; any buffer does.
        etag = self._client._upload_part(self._bucket, self._key, cast("bytes", data), None, self._upload, number)
        return number, etag

    def complete(self, parts: Sequence[Part], *, over: bool) -> str:
        """Makes the object visible, unless its key exists (412) and is not to be written `over`; its ETag."""
        element = Element("CompleteMultipartUpload")
        for number, etag in sorted(parts):
            tag = SubElement(element, "Part")
            SubElement(tag, "PartNumber", str(number))
            SubElement(tag, "ETag", f'"{etag}"')
        body = getbytes(element)
        condition = {} if over else {"If-None-Match": "*"}
        response = self._client._execute(
            "POST",
            self._bucket,
            self._key,
            body=body,
            headers={"Content-Type": _XML, "Content-MD5": cast("str", md5sum_hash(body)), **condition},
            query_params={"uploadId": self._upload},
        )
        return _etag(response.data)

    def give_up(self) -> None:
        """Removes the parts."""
        self._client._abort_multipart_upload(self._bucket, self._key, self._upload)


def _etag(answer: bytes) -> str:
    """S3 may answer 200 and an error: the headers go out before the work is done."""
    root = ElementTree.fromstring(answer)  # noqa: S314 - from the store we hold the secret of
    etag = findtext(root, "ETag")
    if not etag:
        raise ServerFailedError(
            f"completing a multipart upload answered {root.tag}", remedy="try again; check the store's log"
        )
    return etag.replace('"', "")
