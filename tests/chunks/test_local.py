"""The chunk directory: what survives, what goes, and that the cap is exact whatever happens."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from libs.chunks import directory_files
from libs.chunks.errors import DirectoryInUseError, MissingObjectError, TierError, TierFullError
from libs.chunks.local import LocalDirectory
from libs.chunks.verified import open_verified
from libs.continuation.errors import ContentMismatchError, ObjectError
from libs.continuation.keys import ObjectKey
from libs.continuation.objects import open_by_key
from tests.chunks.samples import FINGERPRINT, OWNER, sample

REPOSITORY = Path(__file__).parents[2]


def files(root: Path) -> list[Path]:
    return [path for path in (root / "v1").rglob("*") if path.is_file()]


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in files(root))


def test_a_restart_finds_everything_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "chunks"
    first = LocalDirectory(root, cap=1 << 30)
    made = [sample(seed) for seed in range(5)]
    for encoded, _ in made:
        first.put(encoded.key, encoded.parts, within=5)
    node, used = first.node, first.used
    first.close()
    (root / "tmp" / "half").write_bytes(b"half a file")
    (root / "v1" / "stray").write_bytes(b"what is this")
    again = LocalDirectory(root, cap=1 << 30)
    assert (again.node, again.used, again.counts.leftovers) == (node, used, 1)
    assert again.used == on_disk(root) == sum(encoded.size for encoded, _ in made)
    assert not list((root / "tmp").iterdir())
    for _, wanted in made:
        open_verified(again, wanted, within=5).release()
    again.close()


def test_a_smaller_cap_after_a_restart_is_kept_at_once(tmp_path: Path) -> None:
    first = LocalDirectory(tmp_path, cap=1 << 30)
    made = [sample(seed)[0] for seed in range(6)]
    for encoded in made:
        first.put(encoded.key, encoded.parts, within=5)
    first.close()
    gone: list[ObjectKey] = []
    again = LocalDirectory(tmp_path, cap=2 * made[0].size, on_gone=gone.append)
    assert again.used == on_disk(tmp_path) == 2 * made[0].size
    assert len(gone) == 4 and not set(gone) & set(again.objects())
    again.close()


def test_one_process_per_directory(tmp_path: Path) -> None:
    first = LocalDirectory(tmp_path, cap=1 << 20)
    with pytest.raises(DirectoryInUseError, match="another process"):
        LocalDirectory(tmp_path, cap=1 << 20)
    first.close()
    LocalDirectory(tmp_path, cap=1 << 20).close()


def test_a_damaged_file_is_set_aside_counted_and_told(tmp_path: Path) -> None:
    gone: list[ObjectKey] = []
    directory = LocalDirectory(tmp_path, cap=1 << 30, on_gone=gone.append)
    encoded, wanted = sample(1)
    directory.put(encoded.key, encoded.parts, within=5)
    path = tmp_path / encoded.key.text
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ContentMismatchError):
        open_verified(directory, wanted, within=5)
    assert gone == [encoded.key] and directory.counts.quarantined == 1 and directory.used == on_disk(tmp_path) == 0
    assert [found.name.split("-")[0] for found in (tmp_path / "quarantine").iterdir()] == ["content_mismatch"]
    with pytest.raises(MissingObjectError):
        open_verified(directory, wanted, within=5)
    # A good copy may take its place.
    assert directory.put(encoded.key, encoded.parts, within=5).created
    open_verified(directory, wanted, within=5).release()
    directory.close()


def test_the_quarantine_is_bounded(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path, cap=1 << 30)
    for seed in range(20):
        encoded, wanted = sample(seed)
        directory.put(encoded.key, encoded.parts, within=5)
        (tmp_path / encoded.key.text).write_bytes(b"x")
        with pytest.raises(ObjectError):
            open_verified(directory, wanted, within=5)
    assert len(list((tmp_path / "quarantine").iterdir())) == 16 and directory.counts.quarantined == 20
    directory.close()


def test_a_vanished_file_is_missing_and_forgotten(tmp_path: Path) -> None:
    gone: list[ObjectKey] = []
    directory = LocalDirectory(tmp_path, cap=1 << 30, on_gone=gone.append)
    encoded, wanted = sample(1)
    directory.put(encoded.key, encoded.parts, within=5)
    (tmp_path / encoded.key.text).unlink()
    with pytest.raises(MissingObjectError):
        open_verified(directory, wanted, within=5)
    assert directory.used == 0 and gone == [encoded.key] and directory.counts.vanished == 1
    directory.close()


def test_the_least_valuable_unleased_file_goes(tmp_path: Path) -> None:
    made = [sample(seed) for seed in range(4)]
    size = made[0][0].size
    directory = LocalDirectory(tmp_path, cap=3 * size)
    for encoded, _ in made[:3]:
        directory.put(encoded.key, encoded.parts, within=5)
    leased = open_verified(directory, made[0][1], within=5)
    open_verified(directory, made[1][1], within=5).release()  # used since; the third is not
    directory.put(made[3][0].key, made[3][0].parts, within=5)
    assert set(directory.objects()) == {made[0][0].key, made[1][0].key, made[3][0].key}
    assert bytes(leased.view.data) == made[0][0].to_bytes()
    leased.release()
    directory.close()


def test_nothing_leased_is_evicted_and_nothing_is_taken_then(tmp_path: Path) -> None:
    made = [sample(seed) for seed in range(3)]
    directory = LocalDirectory(tmp_path, cap=2 * made[0][0].size)
    held = []
    for encoded, wanted in made[:2]:
        directory.put(encoded.key, encoded.parts, within=5)
        held.append(open_verified(directory, wanted, within=5))
    with pytest.raises(TierFullError, match="nothing more can be evicted"):
        directory.put(made[2][0].key, made[2][0].parts, within=5)
    assert directory.counts.refused_full == 1 and directory.used == on_disk(tmp_path)
    for opened in held:
        opened.release()
    directory.put(made[2][0].key, made[2][0].parts, within=5)
    directory.close()


def test_the_file_systems_free_bytes_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [sample(seed)[0] for seed in range(4)]
    size = made[0].size
    directory = LocalDirectory(tmp_path, cap=1 << 30, keep_free=1_000)
    monkeypatch.setattr(directory_files.DirectoryFiles, "free_bytes", lambda self: 1_000 + 2 * size - on_disk(tmp_path))
    for encoded in made:
        directory.put(encoded.key, encoded.parts, within=5)
        assert directory.used == on_disk(tmp_path) <= 2 * size
    assert directory.counts.evicted_files == 2
    directory.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    made = [sample(seed)[0] for seed in range(3)]
    directory = LocalDirectory(tmp_path, cap=1 << 30, rest_s=0.0)
    directory.put(made[0].key, made[0].parts, within=5)
    write_all = directory_files.write_all

    def full(handle: int, parts: object) -> None:
        os.write(handle, b"as far as it went")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory_files, "write_all", full)
    with pytest.raises(TierFullError):
        directory.put(made[1].key, made[1].parts, within=5)
    # It has given room back, holds no part of the file, and its books are right.
    assert directory.counts.disk_full == 1 and directory.counts.evicted_files == 1
    assert directory.used == on_disk(tmp_path) == 0 and not list((tmp_path / "tmp").iterdir())
    monkeypatch.setattr(directory_files, "write_all", write_all)
    assert directory.put(made[1].key, made[1].parts, within=5).created
    directory.close()


def test_after_a_full_disk_it_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = LocalDirectory(tmp_path, cap=1 << 30, rest_s=60.0)
    tried = Counter[str]()

    def full(handle: int, parts: object) -> None:
        tried["writes"] += 1
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(directory_files, "write_all", full)
    for seed in range(5):
        with pytest.raises(TierFullError):
            directory.put(sample(seed)[0].key, sample(seed)[0].parts, within=5)
    assert tried["writes"] == 1 and directory.counts.refused_full == 5
    directory.close()


class Books(RuleBasedStateMachine):
    """Against the disk itself: what is counted is what lies there, never above the cap; no leased file ever goes."""

    MADE: ClassVar = [sample(seed, tokens=range(seed, seed + 16 * (1 + seed % 16))) for seed in range(24)]

    @initialize(cap=st.integers(20_000, 300_000))
    def start(self, cap: int) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.directory = LocalDirectory(self.root, cap=cap)
        self.held: list[tuple[bytes, object]] = []

    @rule(which=st.integers(0, 23))
    def put(self, which: int) -> None:
        encoded, _ = self.MADE[which]
        try:
            self.directory.put(encoded.key, encoded.parts, within=5)
            assert encoded.key in self.directory.objects()
        except TierFullError:
            leased = sum(len(data) for data, _ in self.held)
            assert encoded.size > self.directory.cap or leased

    @rule(which=st.integers(0, 23))
    def lease(self, which: int) -> None:
        encoded, wanted = self.MADE[which]
        try:
            self.held.append((encoded.to_bytes(), open_verified(self.directory, wanted, within=5)))
        except MissingObjectError:
            assert not (self.root / encoded.key.text).exists() or encoded.key not in self.directory.objects()

    @rule(which=st.integers(0, 30))
    def release(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held))[1].release()

    @rule(which=st.integers(0, 23))
    def remove(self, which: int) -> None:
        key = self.MADE[which][0].key
        self.directory.remove(key, within=5)
        assert key not in self.directory.objects()

    @rule(which=st.integers(0, 23))
    def reject(self, which: int) -> None:
        self.directory.reject(self.MADE[which][0].key, ContentMismatchError("damaged"))

    @rule()
    def restart(self) -> None:
        for _, opened in self.held:
            opened.release()
        self.held = []
        before = sorted(self.directory.objects(), key=lambda key: key.text)
        self.directory.close()
        self.directory = LocalDirectory(self.root, cap=self.directory.cap)
        assert sorted(self.directory.objects(), key=lambda key: key.text) == before

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "directory"):
            return
        there = {key.text: (self.root / key.text).stat().st_size for key in self.directory.objects()}
        counted = sum(there.values())
        leased_only = self.directory.used - counted
        assert self.directory.used <= self.directory.cap
        # What is counted beyond the files that can be found are files taken out while somebody reads them.
        assert leased_only >= 0 and (leased_only == 0 or self.held)
        if not self.held:
            assert self.directory.used == on_disk(self.root)
            assert {str(path.relative_to(self.root)) for path in files(self.root)} == set(there)

    @invariant()
    def held_bytes_stay(self) -> None:
        for data, opened in getattr(self, "held", []):
            assert bytes(opened.view.data) == data

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            for _, opened in self.held:
                opened.release()
            self.directory.close()
            self.folder.cleanup()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


WRITER = """
import sys
from pathlib import Path
from libs.chunks.local import LocalDirectory
from tests.chunks.samples import sample
root, cap = Path(sys.argv[1]), int(sys.argv[2])
directory = LocalDirectory(root, cap=cap)
print("ready", flush=True)
seed = int(sys.argv[3])
while True:
    encoded, _ = sample(seed)
    directory.put(encoded.key, encoded.parts, within=5)
    print("put", flush=True)
    seed += 1
"""


def test_kill_9_at_any_moment_leaves_whole_files_only(tmp_path: Path) -> None:
    size = sample(0)[0].size
    cap = 40 * size
    draw = random.Random(7)
    survived = 0
    for round_ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(cap), str(round_ * 1_000)],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        ) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            for _ in range(draw.randint(0, 8)):
                assert writer.stdout.readline() == b"put\n"
            time.sleep(draw.uniform(0.0, 0.01))  # the moment is what is random here
            writer.send_signal(signal.SIGKILL)
            assert writer.wait(10) == -signal.SIGKILL
        directory = LocalDirectory(tmp_path, cap=cap)
        assert directory.used == on_disk(tmp_path) <= cap and directory.counts.leftovers == 0
        assert not list((tmp_path / "tmp").iterdir())
        for key in directory.objects():
            open_by_key((tmp_path / key.text).read_bytes(), key).release()
        survived = len(directory.objects())
        directory.close()
    assert survived > 5


def test_find_knows_every_computation_of_an_object(directory: LocalDirectory) -> None:
    tokens = list(range(256))
    made = [sample(seed, tokens=tokens)[0] for seed in range(3)]
    for encoded in made:
        directory.put(encoded.key, encoded.parts, within=5)
    key = made[0].key
    assert set(directory.find(FINGERPRINT, OWNER, key.hash, key.group)) == {encoded.key for encoded in made}
    assert directory.find(FINGERPRINT, "00" * 16, key.hash, key.group) == ()


def test_verified_once_per_file(directory: LocalDirectory) -> None:
    encoded, wanted = sample(3)
    directory.put(encoded.key, encoded.parts, within=5)
    first = open_verified(directory, wanted, within=5)
    again = open_verified(directory, wanted, within=5)
    assert first.fresh and not again.fresh
    first.release()
    again.release()
    with pytest.raises(TierError):
        open_verified(directory, sample(4)[1], within=5)
