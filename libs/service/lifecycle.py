"""The life of a service process: start in order, serve, leave in order.

    async def build(settings: RouterSettings, service: Service) -> None:
        catalog = await service.enter(CatalogClient(settings.catalog))     # closed last, in reverse order of entering
        router = Router(catalog)
        service.add(RouterServicer(router), add_RouterServicer_to_server, "segue.v1.Router")
        service.spawn(router.run(), "router loop")                         # its crash ends the service
        service.on_drain(router.drain)                                     # async, given the seconds it may take
        port = await service.start()                                       # bound and answering, not ready yet

    main(RouterSettings, build)

When `build` returns the service is ready: health SERVING, `/readyz` 200. (`build` may take long, a model's loading say:
probes are answered meanwhile.) SIGTERM, SIGINT or a crash of background work begins the end:

1. not ready: health NOT_SERVING, `/readyz` 503, while requests are still taken, for `shutdown_delay_s`;
2. drain callbacks, all at once, within `shutdown_grace_s`. They must end what never ends by itself: long-lived streams;
3. the gRPC server refuses new requests and lets running ones finish in what is left of the grace, then cancels them;
4. background tasks are cancelled;
5. what was entered is closed, last first; traces are flushed.

A second signal exits at once. A watchdog ends a process that gets stuck in any of these steps.
Exit codes: 0 ordered end on a signal; 1 could not start, or background work crashed; 2 wrong settings;
128 + n second signal n.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, TypeVar

from libs.service import logs, telemetry
from libs.service.errors import ServiceError, StartError
from libs.service.grpc_server import GrpcServer
from libs.service.logs import get_logger
from libs.service.metrics import Metrics
from libs.service.settings import ServiceSettings, SettingsError, load
from libs.service.transport import Transport

S = TypeVar("S", bound=ServiceSettings)
T = TypeVar("T")

Build = Callable[[S, "Service"], Awaitable[None]]
Drain = Callable[[float], Awaitable[None]]

EXIT_OK, EXIT_FAILED, EXIT_SETTINGS = 0, 1, 2

# After a crash running requests may wait for something that will never come, so they get little time.
_CRASH_GRACE_S = 3.0
_CLOSE_WITHIN_S = 5.0
_WATCHDOG_SLACK_S = 30.0

log = get_logger(__name__)


class Service:
    """What a service's `build` puts its parts into. Made by `main`."""

    def __init__(self, settings: ServiceSettings, tasks: asyncio.TaskGroup) -> None:
        self.settings = settings
        self.transport = Transport.of(settings)
        self.metrics = Metrics(settings.service)
        self._grpc = GrpcServer(settings.listen, self.transport)
        self._started = False
        self._tasks = tasks
        self._background: set[asyncio.Task[None]] = set()
        self._drains: list[Drain] = []
        self._closers: list[tuple[str, Callable[[], Awaitable[object]]]] = []
        self._end = asyncio.Event()
        self._cancelled = False
        self._why_not_ready: str | None = None
        self._failure: BaseException | None = None

    def add(self, servicer: Any, register: Callable[[Any, Any], None], full_name: str) -> None:
        """Registers a gRPC service: generated add_XServicer_to_server and its full name, such as segue.v1.Router."""
        self._grpc.add(servicer, register, full_name)

    async def enter(self, resource: AbstractAsyncContextManager[T]) -> T:
        """Enters an async context manager; it is left at the end, after tasks, in reverse order."""
        value = await resource.__aenter__()
        self.on_close(type(resource).__name__, lambda: resource.__aexit__(None, None, None))
        return value

    def on_close(self, name: str, close: Callable[[], Awaitable[object]]) -> None:
        """As `enter`, for something with a close method only."""
        self._closers.append((name, close))

    def on_drain(self, drain: Drain) -> None:
        """Called at the start of the end with the seconds left; what it does not finish is cancelled."""
        self._drains.append(drain)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs background work until the end. If it raises, the whole service ends with an error.

        Raises RuntimeError once background work has been cancelled: nothing would cancel a late one.
        """
        if self._cancelled:
            work.close()
            raise RuntimeError(f"the service is ending: {name!r} cannot be started any more")
        task = self._tasks.create_task(self._watched(work, name), name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def start(self, listen: str | None = None) -> int:
        """Binds the gRPC server (default: the setting `listen`) and answers, not ready yet; returns the port.

        Called for you after `build` if something was added and `build` did not call it. Raises BindError, TlsFileError.
        """
        self._started = True
        return await self._grpc.start(listen)

    @property
    def target(self) -> str:
        """HOST:PORT the gRPC server is bound to, once started."""
        return self._grpc.target

    async def set_ready(self, why_not: str | None) -> None:
        """None: ready. A reason: not ready for now. For services that lose and regain readiness while they run.

        What was said while `build` ran holds once it has returned; said nothing, the service is ready then.
        """
        if self._end.is_set():
            return
        self._why_not_ready = why_not
        self.metrics.set_ready(why_not)
        await self._grpc.set_serving(why_not is None)

    def stop(self, reason: str, failure: BaseException | None = None) -> None:
        """Begins the ordered end; with a failure the exit code is 1. Returns at once."""
        if self._end.is_set():
            return
        self._failure = failure
        if failure is None:
            log.info("stopping", reason=reason)
        else:
            log.error("stopping on a failure", reason=reason, exc_info=failure)
        self._end.set()

    async def _watched(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception as error:
            self.stop(f"background task {name!r} crashed", error)

    async def _life(self, build: Callable[[Service], Awaitable[None]]) -> None:
        try:
            await self.metrics.start(self.settings.metrics_listen)
            await self._unless_stopped(build(self))
            if not self._end.is_set():
                if self._grpc.has_services and not self._started:
                    await self.start()
                await self.set_ready(self._why_not_ready)
                listen = {"listen": self.target} if self._started else {}
                metrics = f"{self.settings.metrics_listen.rpartition(':')[0]}:{self.metrics.port}"
                log.info("serving", **listen, metrics=metrics)
                await self._end.wait()
        except (StartError, ServiceError) as error:
            self._failure = error
            self._end.set()
            log.error(f"cannot start: {error}")
        except Exception as error:
            self.stop("start failed", error)
        finally:
            self._end.set()
            await self._leave()

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        """Awaits work, but cancels it when the end begins first (a signal while starting)."""
        working, ended = asyncio.ensure_future(work), asyncio.ensure_future(self._end.wait())
        try:
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            ended.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working}, timeout=_CLOSE_WITHIN_S)

    async def _leave(self) -> None:
        now = asyncio.get_running_loop().time
        grace, delay = self.settings.shutdown_grace_s, self.settings.shutdown_delay_s
        if self._failure is not None:
            grace, delay = min(grace, _CRASH_GRACE_S), 0.0
        _exit_after(delay + grace + _WATCHDOG_SLACK_S)
        self.metrics.set_ready("stopping")
        await self._grpc.leave()
        if self._started:
            await asyncio.sleep(delay)
        deadline = now() + grace
        await self._drain(deadline)
        if self._started:
            await self._grpc.stop(max(0.0, deadline - now()))
        await self._cancel_background()
        for name, close in reversed(self._closers):
            try:
                async with asyncio.timeout(_CLOSE_WITHIN_S):
                    await close()
            except Exception as error:
                log.error("closing failed", what=name, exc_info=error)
        await self.metrics.stop()
        await telemetry.shutdown()

    async def _drain(self, deadline: float) -> None:
        async def one(drain: Drain) -> None:
            try:
                await drain(max(0.0, deadline - asyncio.get_running_loop().time()))
            except Exception as error:
                log.error("drain failed", exc_info=error)

        try:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as drains:
                for drain in self._drains:
                    drains.create_task(one(drain))
        except TimeoutError:
            log.warning("drain cut short: shutdown_grace_s is over", grace_s=self.settings.shutdown_grace_s)

    async def _cancel_background(self) -> None:
        self._cancelled = True
        tasks = set(self._background)
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CLOSE_WITHIN_S)
            if stuck:
                log.error("tasks ignore cancellation", tasks=", ".join(sorted(task.get_name() for task in stuck)))


async def serve(settings: S, build: Build[S]) -> int:
    """Runs a service on the current loop until it ends; returns the exit code. Handles SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_stray)
    try:
        telemetry.configure(settings.service, settings.otlp_endpoint)
    except StartError as error:
        log.error(f"cannot start: {error}")
        return EXIT_FAILED
    async with asyncio.TaskGroup() as tasks:
        service = Service(settings, tasks)
        signals = [signal.SIGTERM, signal.SIGINT]
        received: list[signal.Signals] = []

        def on_signal(which: signal.Signals) -> None:
            if received:
                log.warning("second signal: exiting at once", signal=which.name)
                _exit_now(128 + which)
            received.append(which)
            service.stop(which.name)

        for which in signals:
            loop.add_signal_handler(which, on_signal, which)
        try:
            await service._life(lambda made: build(settings, made))
        finally:
            for which in signals:
                loop.remove_signal_handler(which)
    log.info("stopped")
    return EXIT_OK if service._failure is None else EXIT_FAILED


def run(settings: S, build: Build[S]) -> int:
    """`serve` on a loop of its own (uvloop where installed and wanted), with logs configured."""
    logs.configure(settings.service, settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=_loop_factory(settings.uvloop)) as runner:
        return runner.run(serve(settings, build))


def main(settings_type: type[S], build: Build[S], argv: list[str] | None = None) -> NoReturn:
    """A service's whole `__main__`: settings from flags, environment and file; then `run`; then exit."""
    try:
        settings = load(settings_type, sys.argv[1:] if argv is None else argv, os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_SETTINGS)
    sys.exit(run(settings, build))


def _loop_factory(wanted: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if wanted:
        try:
            import uvloop
        except ImportError:
            return None
        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


def _log_stray(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.error("error outside any task", what=context.get("message", ""), exc_info=context.get("exception"))


def _exit_after(seconds: float) -> None:
    """A step that blocks the loop cannot be timed out on the loop: a thread ends the process."""

    def give_up() -> None:
        sys.stderr.write(f"shutdown is stuck after {seconds:g} s: exiting\n")
        _exit_now(EXIT_FAILED)

    watchdog = threading.Timer(seconds, give_up)
    watchdog.daemon = True
    watchdog.start()


def _exit_now(code: int) -> NoReturn:
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
