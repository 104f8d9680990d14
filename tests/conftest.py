"""Real servers shared by every test of a session: one etcd, one S3. Tests keep apart by key prefix.

A test that kills its server starts one of its own:
`async with Supervisor() as s: await s.start(EtcdServer.in_dir(folder).spec())`.
"""

from __future__ import annotations

import os

# Tests start processes while gRPC channels are open. gRPC's own fork handlers may crash such a child between fork and
# exec, and nothing here forks without exec. Read when gRPC is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer
    from tests.fixtures.servers import BackgroundSupervisor

# A suite that is green stays green until something changes. `--hypothesis-profile=default` looks for new examples.
# No deadline: how long an example takes says more of the machine than of the code.
settings.register_profile("repeatable", derandomize=True, print_blob=True, deadline=None)
settings.load_profile("repeatable")

COMPUTING = {
    "chunks", "continuation", "contracts", "controller", "frame_claims", "k8s", "simulation", "simulation_traces",
    "worker", "worker_runtime",
}  # fmt: skip
"""Folders whose tests take the processor and wait for nobody, but for those that ask for a server."""
_SERVERS = {"background_servers", "etcd_server", "s3_server"}


def lane(folder: str, fixtures: Iterable[str]) -> str:
    """Which of two processes runs a test, where there are two (`make test`): what computes fills the pauses of what
    waits for servers, which keep to one process and are started once.
    """
    return "computing" if folder in COMPUTING and _SERVERS.isdisjoint(fixtures) else "live"


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a run of one process this changes nothing."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        item.add_marker(pytest.mark.xdist_group(lane(folder, getattr(item, "fixturenames", ()))))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What computes gives way to what has deadlines; two processes, so once is for good."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.nice(0) == 0:
        (mark,) = item.iter_markers("xdist_group")
        if mark.args == ("computing",):
            os.nice(10)


@pytest.fixture(scope="session")
def background_servers() -> Iterator[BackgroundSupervisor]:
    from tests.fixtures.servers import BackgroundSupervisor

    with BackgroundSupervisor() as supervisor:
        yield supervisor


@pytest.fixture(scope="session")
def etcd_server(background_servers: BackgroundSupervisor, tmp_path_factory: pytest.TempPathFactory) -> EtcdServer:
    """A running etcd: `.endpoint` is host:port, `.version`, `.safe_to_kill`."""
    from cli.embedded.etcd import EtcdServer

    server = EtcdServer.in_dir(tmp_path_factory.mktemp("etcd"))
    background_servers.start(server.spec())
    return server


@pytest.fixture(scope="session")
def s3_server(background_servers: BackgroundSupervisor, tmp_path_factory: pytest.TempPathFactory) -> SeaweedServer:
    """A running S3 server: `.endpoint` is host:port (plain HTTP), `.access_key`, `.secret_key`, `.bucket` exists."""
    from cli.embedded.seaweed import SeaweedServer

    server = SeaweedServer.in_dir(tmp_path_factory.mktemp("s3"))
    background_servers.start(server.spec())
    return server


def unsupported(skips: Iterable[str]) -> dict[str, int]:
    """How many skips say that this machine cannot do a thing, by reason. Any other reason to skip does not count."""
    marked = (reason.partition("unsupported here: ")[2].strip().rstrip("')") for reason in skips)
    return dict(Counter(reason for reason in marked if reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nothing that was left out goes unsaid."""
    found = unsupported(str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in found.items():
        terminalreporter.write_line(f"unsupported here: {reason} ({count})")
