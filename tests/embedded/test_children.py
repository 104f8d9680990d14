"""Supervised children: crashes, deadlines, stubborn ones, order, output, and no orphan under any end of the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.embedded.children import Child, ChildFailedError, ChildSpec, State, Supervisor
from cli.embedded.console import PrefixedConsole
from cli.embedded.ports import NoFreePortError, free_ports

ROOT = Path(__file__).parents[2]
# Says when it is up, so that readiness can be probed through the file system.
SLEEPER = "import sys, time, pathlib; print('up', flush=True); pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
# Writes nothing, so that a pipe its parent took along to the grave cannot end it.
SILENT = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER


def spec(tmp_path: Path, name: str = "child", program: str = SLEEPER, **changes: object) -> ChildSpec:
    mark = tmp_path / f"{name}.up"

    async def probe() -> bool:
        return mark.exists()

    fields: dict[str, object] = {"probe": probe, "ready_within": 15.0, "probe_every": 0.01, "backoff": 0.01, **changes}
    return ChildSpec(name, (sys.executable, "-c", program, str(mark)), **fields)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


async def test_killed_child_is_restarted_with_growing_pauses(tmp_path: Path) -> None:
    lines: list[str] = []
    async with Supervisor(lambda _name, line: lines.append(line)) as supervisor:
        child = await supervisor.start(spec(tmp_path))
        pids = [child.pid]
        for restart in (1, 2, 3):
            child.kill()
            await child.wait_restarted(restart)
            pids.append(child.pid)
        assert len(set(pids)) == 4
        assert child.exit_code == -signal.SIGKILL
    assert not any(pid is not None and alive(pid) for pid in pids)
    pauses = [line.rpartition(" in ")[2] for line in lines if "starting it again" in line]
    assert pauses == ["0.01 s", "0.02 s", "0.04 s"]
    assert "was killed by SIGKILL; starting it again in 0.01 s" in lines


async def test_a_child_that_cannot_start_says_why_and_is_not_retried(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        with pytest.raises(
            ChildFailedError, match=r"exited with code 3; its last output:\n  child . no disk"
        ) as failed:
            await supervisor.start(spec(tmp_path, program="print('no disk'); raise SystemExit(3)"))
        assert failed.value.tail[0] == "no disk"
        assert supervisor.children == ()


async def test_a_program_that_does_not_exist() -> None:
    async with Supervisor() as supervisor:
        with pytest.raises(ChildFailedError, match="cannot be started"):
            await supervisor.start(ChildSpec("ghost", ("/no/such/program",), restart=False))


async def test_not_ready_in_time_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    seen: list[Child] = []

    async def never() -> bool:
        seen.extend(supervisor.children)
        return False

    async with Supervisor() as supervisor:
        with pytest.raises(ChildFailedError, match=r"was not ready within 0\.3 s"):
            await supervisor.start(spec(tmp_path, probe=never, ready_within=0.3))
        assert seen and seen[0].state is State.ENDED and seen[0].pid is None


async def test_a_probe_that_raises_or_hangs_counts_as_not_yet(tmp_path: Path) -> None:
    tries = 0

    async def flaky() -> bool:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ConnectionRefusedError
        return True

    async def hanging() -> bool:
        await asyncio.Event().wait()
        return True

    async with Supervisor() as supervisor:
        await supervisor.start(spec(tmp_path, probe=flaky))
        assert tries == 3
        with pytest.raises(ChildFailedError, match="was not ready"):
            await supervisor.start(spec(tmp_path, name="other", probe=hanging, ready_within=0.3))


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(spec(tmp_path, program=STUBBORN, stop_within=0.2))
        pid = child.pid
        assert pid is not None
        await supervisor.stop(child)
        assert child.exit_code == -signal.SIGKILL
        assert not alive(pid)


async def test_children_stop_last_started_first(tmp_path: Path) -> None:
    ended: list[str] = []
    farewell = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye', flush=True))); "
    async with Supervisor(lambda name, line: ended.append(name) if line == "bye" else None) as supervisor:
        for name in ("etcd", "router", "worker"):
            await supervisor.start(spec(tmp_path, name, farewell + SLEEPER))
    assert ended == ["worker", "router", "etcd"]


async def test_stop_during_the_pause_before_a_restart(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(spec(tmp_path, backoff=60.0, backoff_limit=60.0))
        child.kill()
        await asyncio.wait_for(child.wait_crashed(), 5)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert child.state is State.ENDED


async def test_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "child.up"

    up = asyncio.Event()

    async def never() -> bool:
        if mark.exists():
            up.set()
        return False

    async with Supervisor() as supervisor:
        starting = asyncio.create_task(supervisor.start(spec(tmp_path, probe=never)))
        await asyncio.wait_for(up.wait(), 10)
        (child,) = supervisor.children
        pid = child.pid
        assert pid is not None and alive(pid)
        starting.cancel()
        await asyncio.wait({starting}, timeout=5)
        assert starting.cancelled()
        assert not alive(pid)


async def test_output_of_any_shape_is_heard(tmp_path: Path) -> None:
    lines: list[str] = []
    program = "import sys; sys.stdout.buffer.write(b'a\\nb\\xff\\r\\n' + b'x' * 300_000 + b'\\nlast')"
    async with Supervisor(lambda _name, line: lines.append(line)) as supervisor:
        child = supervisor.spawn(spec(tmp_path, program=program, probe=None, restart=False))
        await child.wait_ended(10)
    assert lines[:2] == ["a", "b\N{REPLACEMENT CHARACTER}"]
    assert "".join(lines[2:-1]) == "x" * 300_000
    assert lines[-1] == "last"


async def test_environment_is_scrubbed_and_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_NAME", "not ours")
    monkeypatch.setenv("KEPT", "yes")
    lines: list[str] = []
    program = "import os; print(os.environ.get('ETCD_NAME'), os.environ['KEPT'], os.environ['ADDED'])"
    async with Supervisor(lambda _name, line: lines.append(line)) as supervisor:
        changes = {"probe": None, "restart": False, "env": {"ADDED": "1"}, "scrub": ("ETCD_",)}
        child = supervisor.spawn(spec(tmp_path, program=program, **changes))
        await child.wait_ended(10)
    assert lines == ["None yes 1"]


PARENT = """
import asyncio, signal, sys
from cli.embedded.children import ChildSpec, Supervisor

async def main():
    async with Supervisor() as supervisor:
        for name in ("a", "b"):
            child = await supervisor.start(ChildSpec(name, (sys.executable, "-c", sys.argv[1])))
            print(child.pid, flush=True)
        print("ready", flush=True)
        await asyncio.Event().wait()

# A parent started in the background of a shell without job control inherits an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_when_the_parent_is_killed_or_interrupted(how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, SILENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        said = [parent.stdout.readline().strip() for _ in range(3)]
        assert said[2] == "ready"
        pids = [int(pid) for pid in said[:2]]
        assert all(alive(pid) for pid in pids)
        parent.send_signal(how)
        parent.wait(15)
        assert all(gone_within(pid, 5) for pid in pids)
    finally:
        parent.kill()
        parent.wait(5)
        parent.stdout.close()  # type: ignore[union-attr]


def test_a_child_without_the_parent_death_signal_would_be_seen() -> None:
    """The check above can fail: with the signal taken out, the child outlives its parent."""
    disarm = "from cli.embedded import children; children._LIBC = None"
    unprotected = PARENT.replace("async def main", f"{disarm}\nasync def main")
    parent = subprocess.Popen(
        [sys.executable, "-c", unprotected, SILENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    try:
        parent.kill()
        parent.wait(5)
        assert not any(gone_within(pid, 0.3) for pid in pids)
    finally:
        parent.stdout.close()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_ports_are_distinct_and_free_with_their_offsets() -> None:
    ports = free_ports(20, offsets=(0, 10_000))
    assert len({p + o for p in ports for o in (0, 10_000)}) == 40
    assert all(port >= 2_000 and port + 10_000 < 16_000 for port in ports)
    others = free_ports(500)
    assert not {p + o for p in ports for o in (0, 10_000)} & set(others)
    with pytest.raises(NoFreePortError):
        free_ports(30_000)


def test_console_prefixes_and_colours(capsys: pytest.CaptureFixture[str]) -> None:
    plain, coloured = PrefixedConsole(sys.stdout), PrefixedConsole(sys.stdout, colour=True)
    plain("router", "up")
    coloured("a", "one")
    coloured("b", "two")
    coloured("a", "three")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "router     | up"
    assert lines[1].split("m")[0] == lines[3].split("m")[0] != lines[2].split("m")[0]
