"""Commands run by claims: with a deadline, in a process group of their own, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """How a command ended. `output`: stdout, then stderr."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def last_line(self) -> str:
        """Of what it said: where a program that cannot start says why."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


class TooLongError(RuntimeError):
    """A command did not end in time; it was killed."""


async def finished(
    argv: Sequence[str],
    within: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    loud: bool = False,
) -> Finished:
    """Runs a command to its end. `env` replaces the whole environment; with `loud` what it says on stderr goes to this
    process's and is not kept. Raises TooLongError.
    """
    began = time.monotonic()
    async with started(argv, env=env, cwd=cwd, loud=loud) as process:
        try:
            async with asyncio.timeout(within):
                out, err = await process.communicate()
        except TimeoutError:
            raise TooLongError(f"{' '.join(argv)[:200]}: not ended within {within:g} s") from None
    assert process.returncode is not None
    seconds = time.monotonic() - began
    return Finished(process.returncode, out.decode(errors="replace"), (err or b"").decode(errors="replace"), seconds)


@asynccontextmanager
async def started(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    talk: bool = False,
    loud: bool = False,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running command; its whole process group is killed at the end if it still runs. With `talk` it has a stdin, and
    what it says on stderr is not kept; with `loud` that goes to this process's stderr.
    """
    errors = asyncio.subprocess.DEVNULL if talk else asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE if talk else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if loud else errors,
        env=None if env is None else dict(env),
        cwd=cwd,
        start_new_session=True,
        limit=1 << 20,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def descendants(pid: int) -> dict[int, str]:
    """Living processes below `pid`, by id, with their command lines. Linux only."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                stat = (entry / "stat").read_text()
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    below, found = {pid}, {}
    while news := {child for child, parent in parents.items() if parent in below} - below:
        below |= news
    for child in below - {pid}:
        with suppress(OSError):
            found[child] = (Path("/proc") / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def resident_bytes(pid: int | None) -> int:
    """Memory of a process that is in RAM. Linux only; raises FileNotFoundError where there is none."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alive(pid: int) -> bool:
    """Whether a process with this id runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
