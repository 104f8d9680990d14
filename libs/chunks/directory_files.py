"""The system calls of a chunk directory, and nothing that decides.

    <directory>/node         its UUID, made once: replica facts name the directory by it
    <directory>/lock         held (flock) by the one process that uses the directory
    <directory>/tmp/         files being written; emptied at start
    <directory>/quarantine/  damaged files, the newest few, for somebody to look at
    <directory>/v1/…         objects, the path below the directory being the object's key

A file is written below tmp, synced, renamed into place, and then the folders whose entries changed are synced: after a
crash there is either no file or the whole of it, and it stays.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from libs.chunks.books import Identity
from libs.chunks.errors import DirectoryError, DirectoryInUseError
from libs.chunks.tier import Parts
from libs.continuation.errors import IdentityError
from libs.continuation.keys import KEY_VERSION, ObjectKey, parse_key

_MOST_PARTS = 512  # below IOV_MAX (1024)
_QUARANTINE_KEEP = 16


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file met at start; `key` None: its path is no key."""

    path: Path
    key: ObjectKey | None
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """A file's bytes in place (a private mapping: writable for array libraries, yet nothing reaches the file)."""

    map: mmap.mmap | None
    data: memoryview
    identity: Identity

    def close(self) -> None:
        """Unmaps, or leaves that to the last array that still looks at the bytes."""
        with suppress(BufferError):
            self.data.release()
            if self.map is not None:
                self.map.close()


class DirectoryFiles:
    """Opens (making it if need be) and locks a chunk directory.

    Raises DirectoryError, DirectoryInUseError.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tmp, self._quarantine = root / "tmp", root / "quarantine"
        try:
            for folder in (root, self._tmp, self._quarantine):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryError(
                f"chunk directory {root} cannot be used ({error.strerror})", remedy="give a writable folder"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DirectoryInUseError(
                f"chunk directory {root} is used by another process", remedy="give each worker a directory of its own"
            ) from None
        self.node = self._node()
        for leftover in self._tmp.iterdir():
            leftover.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _node(self) -> str:
        path = self.root / "node"
        try:
            return str(uuid.UUID(path.read_text().strip()))
        except (FileNotFoundError, ValueError):
            made = str(uuid.uuid4())
        self.write_temporary([memoryview(made.encode())]).replace(path)
        sync_folder(self.root)
        return made

    def path(self, key: ObjectKey) -> Path:
        return self.root / key.text

    def scan(self) -> Iterator[FoundFile]:
        """Every file below the object folder."""
        top = self.root / KEY_VERSION
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    about = path.stat()
                    try:
                        key: ObjectKey | None = parse_key(path.relative_to(self.root).as_posix())
                    except IdentityError:
                        key = None
                    yield FoundFile(path, key, about.st_size, about.st_mtime_ns)

    def write_temporary(self, parts: Parts) -> Path:
        """A synced file below tmp. Leaves nothing behind when it fails. Raises OSError."""
        path = self._tmp / uuid.uuid4().hex
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                write_all(handle, parts)
                os.fsync(handle)
            finally:
                os.close(handle)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def publish(self, temporary: Path, key: ObjectKey) -> list[Path]:
        """Renames into place; returns the folders to sync, deepest first. Not concurrent with `unlink`."""
        target = self.path(key)
        changed = [target.parent]
        while not changed[-1].exists():
            changed.append(changed[-1].parent)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.rename(target)
        return changed

    def unlink(self, key: ObjectKey) -> None:
        """Removes the file and the folders it leaves empty. Not concurrent with `publish`."""
        path = self.path(key)
        path.unlink(missing_ok=True)
        self._prune(path.parent)

    def set_aside(self, path: Path, reason: str) -> None:
        """Moves a file to the quarantine, of which the newest few are kept; removes it where that fails."""
        try:
            path.rename(self._quarantine / f"{reason}-{path.name}")
            kept = sorted(self._quarantine.iterdir(), key=lambda found: found.stat().st_ctime_ns, reverse=True)
            for old in kept[_QUARANTINE_KEEP:]:
                old.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError:
            path.unlink(missing_ok=True)
        self._prune(path.parent)

    def _prune(self, folder: Path) -> None:
        with suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent

    def map(self, key: ObjectKey) -> Mapped:
        """The file's bytes, read ahead. Raises FileNotFoundError and other OSErrors."""
        handle = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            about = os.fstat(handle)
            identity = (about.st_ino, about.st_size, about.st_mtime_ns)
            if about.st_size == 0:
                return Mapped(None, memoryview(b""), identity)
            found = mmap.mmap(handle, about.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(handle)
        found.madvise(mmap.MADV_WILLNEED)
        return Mapped(found, memoryview(found), identity)

    def free_bytes(self) -> int:
        """What the file system would still give to this user."""
        about = os.statvfs(self.root)
        return about.f_bavail * about.f_frsize


def write_all(handle: int, parts: Parts) -> None:
    """Writes the parts one after the other, in as few calls as the system takes."""
    rest = [part.cast("B") for part in parts if part.nbytes]
    while rest:
        written = os.writev(handle, rest[:_MOST_PARTS])
        while written:
            if written < rest[0].nbytes:
                rest[0] = rest[0][written:]
                break
            written -= rest.pop(0).nbytes


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries durable; a folder that is gone (its last file was evicted) needs nothing."""
    with suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def drop_cached(path: Path) -> None:
    """Asks the system to forget the file's clean pages, so that the next read goes to the medium."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def read_through(path: Path, size: int) -> None:
    """Reads the first `size` bytes and forgets them."""
    with path.open("rb", buffering=0) as file:
        while size > 0 and (read := len(file.read(min(size, 1 << 20)))):
            size -= read
