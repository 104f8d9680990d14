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
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.remote import Producer

    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer
    from tests.fixtures.lanes import Lanes
    from tests.fixtures.servers import BackgroundSupervisor

# A suite that is green stays green until something changes. `--hypothesis-profile=default` looks for new examples.
# No deadline: how long an example takes says more of the machine than of the code.
settings.register_profile("repeatable", derandomize=True, print_blob=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    """See tests/fixtures/lanes.py."""
    from tests.fixtures.lanes import Lanes

    return Lanes(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    from tests.fixtures.lanes import give_way

    give_way(item)


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
