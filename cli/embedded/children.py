"""Child processes that are kept alive, heard, and never left behind.

A `Supervisor` owns its children: each has one task that spawns the process, copies its output line by line to a sink,
polls its readiness probe, and, when the process ends unasked, starts it again after a growing pause. Children stop in
the reverse of the order they were started in: SIGTERM, a grace period, SIGKILL.

Nothing outlives the parent. Each child leads its own session and process group, so a terminal's Ctrl-C reaches the
supervisor alone (which then stops children in order) and a stop reaches grandchildren too. If the parent is killed with
SIGKILL it can stop nobody: the kernel does it, through PR_SET_PDEATHSIG, set in the child between fork and exec.
That signal is tied to the *thread* that forked, so a supervisor must run in a thread as long-lived as its children.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

Sink = Callable[[str, str], None]
"""Called with (child name, one output line without its newline)."""
Probe = Callable[[], Awaitable[bool]]
"""True once the server does real work; False or any exception means not yet."""

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: dlopen between fork and exec could deadlock on another thread's lock.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_TAIL_LINES = 40
_LINE_BYTES = 16_384


@dataclass(frozen=True)
class ChildSpec:
    """What to run and how to know that it runs. Times in seconds."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the parent's environment."""
    scrub: tuple[str, ...] = ()
    """Prefixes of inherited environment variables the child must not see."""
    cwd: Path | None = None
    probe: Probe | None = None
    """None: ready as soon as it is spawned."""
    ready_within: float = 60.0
    probe_every: float = 0.05
    stop_within: float = 10.0
    """From SIGTERM to SIGKILL."""
    leftovers: tuple[Path, ...] = ()
    """Files the program leaves in places that are not ours; removed whenever a process of it has ended."""
    restart: bool = True
    backoff: float = 0.5
    """Pause before the first restart; doubles up to `backoff_limit`, starts anew after `steady_after` s alive."""
    backoff_limit: float = 10.0
    steady_after: float = 30.0


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    ENDED = "ended"


class ChildFailedError(RuntimeError):
    """A child ended, or was not ready in time; `tail` holds its last output lines."""

    def __init__(self, name: str, reason: str, tail: list[str]) -> None:
        self.name, self.reason, self.tail = name, reason, tail
        said = "".join(f"\n  {name} | {line}" for line in tail) or " (it printed nothing)"
        super().__init__(f"{name} {reason}; its last output:{said}")


class Child:
    """One supervised process. Created by `Supervisor.start`."""

    def __init__(self, spec: ChildSpec, sink: Sink) -> None:
        self.spec = spec
        self.state = State.STARTING
        self.pid: int | None = None
        self.restarts = 0
        self.exit_code: int | None = None
        """Of the last process that ended: negative for a signal, as subprocess has it."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._sink = sink
        self._stopping = False
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()

    async def wait_ready(self, within: float | None = None) -> None:
        """Returns when READY; raises ChildFailedError if the child ended for good or `within` seconds passed."""
        within = self.spec.ready_within if within is None else within
        try:
            async with asyncio.timeout(within), self._changed:
                await self._changed.wait_for(lambda: self.state in (State.READY, State.ENDED))
        except TimeoutError:
            raise ChildFailedError(self.spec.name, f"was not ready within {within:g} s", list(self.tail)) from None
        if self.state is State.ENDED:
            raise ChildFailedError(self.spec.name, _describe_exit(self.exit_code), list(self.tail))

    async def wait_crashed(self) -> None:
        """Returns when a process of this child has ended unasked. No deadline of its own: race it against one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.state in (State.WAITING, State.ENDED))

    async def wait_restarted(self, restarts: int, within: float = 30.0) -> None:
        """Returns when the child has been restarted at least `restarts` times in all and is READY again."""
        try:
            async with asyncio.timeout(within), self._changed:
                await self._changed.wait_for(lambda: self.restarts >= restarts and self.state is State.READY)
        except TimeoutError:
            reason = f"was not restarted {restarts} times and ready within {within:g} s"
            raise ChildFailedError(self.spec.name, reason, list(self.tail)) from None

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signals the child's whole process group; the supervisor treats the exit as a crash."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    async def stop(self) -> None:
        """SIGTERM, at most `stop_within` seconds, SIGKILL; returns when the process is reaped."""
        self._stopping = True
        self._wake.set()
        self.kill(signal.SIGTERM)
        try:
            await self.wait_ended(self.spec.stop_within)
        except TimeoutError:
            self._say(f"still alive {self.spec.stop_within:g} s after SIGTERM: killing it")
            self.kill(signal.SIGKILL)
            await self.wait_ended(5.0)

    async def run(self) -> None:
        """Lives as long as the child does, over all restarts. The supervisor runs it as a task."""
        pause = self.spec.backoff
        try:
            while not self._stopping:
                began = time.monotonic()
                await self._one_process()
                if self._stopping or not self.spec.restart:
                    return
                if time.monotonic() - began >= self.spec.steady_after:
                    pause = self.spec.backoff
                self._say(f"{_describe_exit(self.exit_code)}; starting it again in {pause:g} s")
                await self._set(State.WAITING)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
                pause = min(pause * 2, self.spec.backoff_limit)
                self.restarts += 1
        finally:
            self.kill(signal.SIGKILL)
            self.pid = None
            await self._set(State.ENDED)

    async def _one_process(self) -> None:
        await self._set(State.STARTING)
        parent = os.getpid()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(self.spec.scrub or ("\0",))}
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=inherited | dict(self.spec.env),
                cwd=self.spec.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )
        except OSError as error:
            self.exit_code = 127
            self._say(f"cannot be started: {error}")
            return
        self.pid = process.pid
        if self._stopping:  # stop() came while the process was being spawned
            self.kill(signal.SIGTERM)
        assert process.stdout is not None
        async with asyncio.TaskGroup() as tasks:
            pump = tasks.create_task(self._pump(process.stdout))
            probe = tasks.create_task(self._become_ready())
            try:
                self.exit_code = await process.wait()
            except asyncio.CancelledError:
                self.kill(signal.SIGKILL)
                raise
            probe.cancel()
            # A grandchild that holds the pipe open must neither outlive its parent nor hold up the restart.
            self.kill(signal.SIGKILL)
            await asyncio.wait({pump}, timeout=1.0)
            pump.cancel()
        for path in self.spec.leftovers:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self.pid = None

    async def _become_ready(self) -> None:
        while self.spec.probe is not None:
            try:
                if await self.spec.probe():
                    break
            except Exception:  # noqa: S110 - "not yet" by contract; the deadline reports
                pass
            await asyncio.sleep(self.spec.probe_every)
        await self._set(State.READY)

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while block := await stream.read(65_536):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._say(line.decode(errors="replace").rstrip("\r"))
            if len(rest) > _LINE_BYTES:
                self._say(rest.decode(errors="replace"))
                rest = b""
        if rest:
            self._say(rest.decode(errors="replace"))

    def _say(self, line: str) -> None:
        self.tail.append(line)
        self._sink(self.spec.name, line)

    async def _set(self, state: State) -> None:
        self.state = state
        async with self._changed:
            self._changed.notify_all()

    async def wait_ended(self, within: float) -> None:
        """Returns when the child has ended for good and is reaped; TimeoutError after `within` seconds."""
        async with asyncio.timeout(within), self._changed:
            await self._changed.wait_for(lambda: self.state is State.ENDED)


class Supervisor:
    """Owner of a set of children. Use as an async context manager: leaving it stops them all, last started first."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink: Sink = sink or (lambda _name, _line: None)
        self._tasks: dict[Child, asyncio.Task[None]] = {}

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._tasks)

    async def start(self, spec: ChildSpec) -> Child:
        """Spawns and waits until ready. Raises ChildFailedError (and keeps nothing of it) if that fails."""
        child = self.spawn(spec)
        try:
            await self.first_ready(child)
        except BaseException:
            await self.stop(child)
            raise
        return child

    def spawn(self, spec: ChildSpec) -> Child:
        """Starts a child without waiting; `child.wait_ready()` waits, so several can start at once."""
        child = Child(spec, self._sink)
        self._tasks[child] = asyncio.get_running_loop().create_task(child.run(), name=f"child {spec.name}")
        return child

    async def stop(self, child: Child) -> None:
        task = self._tasks.pop(child)
        try:
            await child.stop()
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=5.0)

    async def stop_all(self) -> None:
        for child in reversed(self.children):
            await self.stop(child)

    async def first_ready(self, child: Child) -> None:
        """As wait_ready, but an exit before the first readiness is final: a server that cannot start says why."""
        ready = asyncio.ensure_future(child.wait_ready())
        crash = asyncio.ensure_future(child.wait_crashed())
        try:
            await asyncio.wait({ready, crash}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return await ready
            raise ChildFailedError(child.spec.name, _describe_exit(child.exit_code), list(child.tail))
        finally:
            ready.cancel()
            crash.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self.stop_all()
        finally:
            # Only reached with children left when stopping was itself interrupted.
            for child, task in self._tasks.items():
                child.kill(signal.SIGKILL)
                task.cancel()


def _die_with(parent: int) -> None:
    """Runs in the child between fork and exec."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died between fork and prctl: no signal will ever come
        os._exit(1)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "never ran"
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"exited with code {code}"
