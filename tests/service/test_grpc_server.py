"""Server and channel together: errors, keepalive, sizes, TLS, reflection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs.service.channel import open_channel
from libs.service.errors import ServiceError, read_error
from libs.service.grpc_server import BindError, GrpcServer
from libs.service.transport import TlsFileError, Transport
from tests.fixtures import certificates

# grpc.aio's completion queue is one per process and disturbed by loops that come and go.
pytestmark = pytest.mark.asyncio(loop_scope="module")


class UnknownModelError(ServiceError):
    code = grpc.StatusCode.NOT_FOUND


async def fail() -> None:
    raise UnknownModelError("no model 'x'", remedy="see ListModels", values={"model": "x"})


class Faulty:
    """Four methods, one of each kind and style; the request says what goes wrong."""

    async def Unary(self, request: bytes, context: Any) -> bytes:
        if request == b"typed":
            raise UnknownModelError("no model 'x'", remedy="see ListModels", values={"model": "x"}, retry_after_s=1.5)
        if request == b"bug":
            raise KeyError("private detail")
        if request == b"abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "mine")
        if request == b"group":
            # Both tasks fail: on Python 3.11 the group may leave this task's count of cancellations raised.
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fail())
                    tasks.create_task(fail())
            except* UnknownModelError as group:
                task = asyncio.current_task()
                if task is not None and not task.cancelling():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0)
                raise group.exceptions[0] from None
        if request == b"huge":
            raise UnknownModelError("m" * 100_000, remedy="r" * 100_000, values={"model": "v" * 100_000})
        return request

    async def Generator(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await self.Unary(request, context)
        yield b"second"

    async def Writer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(await self.Unary(request, context))

    async def Collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([await self.Unary(request, context) async for request in requests])


def register(servicer: Faulty, server: grpc.aio.Server) -> None:
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.Unary),
        "Generator": grpc.unary_stream_rpc_method_handler(servicer.Generator),
        "Writer": grpc.stream_stream_rpc_method_handler(servicer.Writer),
        "Collect": grpc.stream_unary_rpc_method_handler(servicer.Collect),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Faulty", handlers),))


@asynccontextmanager
async def served(transport: Transport | None = None) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1:0", transport or Transport())
    server.add(Faulty(), register, "test.Faulty")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(transport: Transport | None = None) -> AsyncIterator[grpc.aio.Channel]:
    async with served(transport) as server, open_channel(server.target, transport or Transport()) as channel:
        yield channel


def one(request: bytes) -> Callable[[], AsyncIterator[bytes]]:
    async def requests() -> AsyncIterator[bytes]:
        yield request

    return requests


async def call(channel: grpc.aio.Channel, kind: str, request: bytes) -> list[bytes]:
    path, within = f"/test.Faulty/{kind}", 5
    if kind == "Unary":
        return [await channel.unary_unary(path)(request, timeout=within)]
    if kind == "Generator":
        return [reply async for reply in channel.unary_stream(path)(request, timeout=within)]
    if kind == "Writer":
        return [reply async for reply in channel.stream_stream(path)(one(request)(), timeout=within)]
    return [await channel.stream_unary(path)(one(request)(), timeout=within)]


KINDS = ["Unary", "Generator", "Writer", "Collect"]


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_of_every_kind_of_method(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as channel:
        assert await call(channel, kind, b"fine") == ([b"first", b"second"] if kind == "Generator" else [b"fine"])

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, b"typed")
        read = read_error(caught.value)
        assert (read.code, read.reason, read.remedy) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", "see ListModels")
        assert (read.values, read.retry_after_s) == ({"model": "x"}, 1.5)
        assert read.message == "no model 'x': see ListModels"
        assert not caplog.records

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, b"bug")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "private detail" not in str(caught.value.details())
        logged = caplog.records[-1]
        assert logged.segue_fields["error_id"] in str(caught.value.details())  # type: ignore[attr-defined]
        assert logged.exc_info is not None and isinstance(logged.exc_info[1], KeyError)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, b"abort")
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "mine")
        assert read_error(caught.value).reason == ""


async def test_a_failed_task_group_is_still_answered() -> None:
    async with connected() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "Unary", b"group")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_error_too_large_for_metadata_is_cut_not_lost() -> None:
    async with connected() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "Unary", b"huge")
        assert read_error(caught.value).reason == "UNKNOWN_MODEL"


async def test_grpcio_status_reads_the_details_too() -> None:
    from grpc_status import rpc_status

    async with connected() as channel:
        running = channel.unary_unary("/test.Faulty/Unary")(b"typed", timeout=5)
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        status = await rpc_status.aio.from_call(running)
        assert status is not None
        assert len(status.details) == 2


async def test_unknown_method_is_unimplemented() -> None:
    async with connected() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "Nothing", b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_by_name_from_not_serving_to_gone() -> None:
    async with served() as server, open_channel(server.target, Transport()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> list[int]:
            requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", "test.Faulty")]
            return [(await stub.Check(request, timeout=5)).status for request in requests]

        assert await statuses() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
        await server.set_serving(True)
        assert await statuses() == [health_pb2.HealthCheckResponse.SERVING] * 2
        await server.set_serving(False)
        assert await statuses() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
        await server.set_serving(True)
        await server.leave()
        await server.set_serving(True)
        assert await statuses() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="no.Such"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    async with connected() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        running = stub.ServerReflectionInfo(timeout=5)
        await running.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await running.read()
        running.cancel()
        names = {service.name for service in reply.list_services_response.service}
        assert names == {"test.Faulty", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_port_in_use() -> None:
    async with served() as first:
        with pytest.raises(BindError, match=rf"127\.0\.0\.1:{first.port}.*choose another"):
            await GrpcServer(first.target, Transport()).start()


@pytest.mark.parametrize("size", [(1 << 20) - 100, (1 << 20) + 1])
async def test_message_size_limit(size: int) -> None:
    async with connected(Transport(max_message_bytes=1 << 20)) as channel:
        if size < 1 << 20:
            assert len((await call(channel, "Unary", b"x" * size))[0]) == size
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "Unary", b"x" * size)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def survives_pings(server_transport: Transport, client_transport: Transport) -> bool:
    """Whether a silent stream lives through six pings, one a second: the fourth unwelcome one is answered by GOAWAY."""
    async with served(server_transport) as server, open_channel(server.target, client_transport) as channel:
        stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        await stream.read()
        silent = asyncio.ensure_future(stream.read())
        done, _ = await asyncio.wait({silent}, timeout=6)
        if done:
            error = silent.exception()
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.details() == "Too many pings"
        silent.cancel()
        return not done


class Silent(Transport):
    """A server's that does not ping by itself: its pings would put off the client's."""

    def server_options(self) -> list[tuple[str, int]]:
        return [option for option in super().server_options() if option[0] != "grpc.keepalive_time_ms"]


async def test_our_server_allows_our_pings_and_this_check_sees_one_that_does_not() -> None:
    ours, others = Silent(keepalive_s=1), Silent(keepalive_s=3_600)
    assert await asyncio.gather(survives_pings(ours, ours), survives_pings(others, ours)) == [True, False]


async def test_an_error_after_the_caller_has_gone_is_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def stubborn(request: bytes, context: Any) -> bytes:
        try:
            entered.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("too late") from None
        finally:
            left.set()
        return request

    def register_stubborn(_servicer: object, server: grpc.aio.Server) -> None:
        handlers = {"Unary": grpc.unary_unary_rpc_method_handler(stubborn)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Stubborn", handlers),))

    server = GrpcServer("127.0.0.1:0", Transport())
    server.add(None, register_stubborn, "test.Stubborn")
    await server.start()
    async with open_channel(server.target, Transport()) as channel:
        running = channel.unary_unary("/test.Stubborn/Unary")(b"")
        await asyncio.wait_for(entered.wait(), 5)
        running.cancel()
        await asyncio.wait_for(left.wait(), 5)
        await server.stop(1)
    failed = [record for record in caplog.records if record.levelname == "ERROR" and record.name != "asyncio"]
    assert failed == []


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, certificates for localhost and router.test it signed, and one by a stranger."""
    folder = tmp_path_factory.mktemp("pki")
    for name in ("ca", "stranger"):
        certificates.authority(folder, name)
    for name, alternatives in (("node", "DNS:localhost,IP:127.0.0.1"), ("named", "DNS:router.test")):
        certificates.signed(folder, name, alternatives)
    return folder


async def test_mutual_tls(pki: Path) -> None:
    ours = Transport(cert_file=pki / "node.pem", key_file=pki / "node.key", ca_file=pki / "ca.pem")
    theirs = Transport(cert_file=pki / "stranger.pem", key_file=pki / "stranger.key", ca_file=pki / "ca.pem")
    async with served(ours) as server:
        async with open_channel(server.target, ours) as channel:
            assert await call(channel, "Unary", b"fine") == [b"fine"]
        for stranger in (theirs, Transport()):
            async with open_channel(server.target, stranger) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/test.Faulty/Unary")(b"fine", timeout=2)
                assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_certificate_may_be_for_the_name_an_address_was_found_under(pki: Path) -> None:
    named = Transport(cert_file=pki / "named.pem", key_file=pki / "named.key", ca_file=pki / "ca.pem")
    async with served(named) as server:
        async with open_channel(server.target, named, server_name="router.test") as channel:
            assert await call(channel, "Unary", b"fine") == [b"fine"]
        for wrong in ("", "other.test"):
            async with open_channel(server.target, named, server_name=wrong) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/test.Faulty/Unary")(b"fine", timeout=2)
                assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_missing_tls_file_is_named(tmp_path: Path) -> None:
    transport = Transport(cert_file=tmp_path / "none.pem", key_file=tmp_path / "none.key")
    with pytest.raises(TlsFileError, match=r"none\.(pem|key) cannot be read"):
        await GrpcServer("127.0.0.1:0", transport).start()
    with pytest.raises(TlsFileError):
        open_channel("127.0.0.1:1", transport)


async def test_a_channel_finds_a_restarted_server_soon() -> None:
    server = GrpcServer("127.0.0.1:0", Transport())
    server.add(Faulty(), register, "test.Faulty")
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}", Transport()) as channel:
        assert await call(channel, "Unary", b"a") == [b"a"]
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "Unary", b"b")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        again = GrpcServer(f"127.0.0.1:{port}", Transport())
        again.add(Faulty(), register, "test.Faulty")
        await again.start()
        try:
            reply = await channel.unary_unary("/test.Faulty/Unary")(b"c", timeout=5, wait_for_ready=True)
            assert reply == b"c"
        finally:
            await again.stop(0)
