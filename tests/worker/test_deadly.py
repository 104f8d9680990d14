"""The test hook that kills its worker: off by default, and where it is on, for the prompts it names alone."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from libs.contracts.segue.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.worker.deadly import DeadlyRuntime, has
from tests.worker.conftest import Process, worker_process
from tests.worker.rig import running

SEQUENCE = (7, 8, 9)


@pytest.mark.parametrize("tokens", [(), (7, 8), (7, 8, 7, 8), (9, 8, 7), (7, 7, 8, 8, 9, 9)])
def test_other_prompts_do_not_have_it(tokens: tuple[int, ...]) -> None:
    assert not has(tokens, SEQUENCE)
    assert has((*tokens, *SEQUENCE), SEQUENCE) and has((*SEQUENCE, *tokens), SEQUENCE)


async def test_off_unless_it_is_asked_for() -> None:
    async with running() as plain, running(crash_on=SEQUENCE) as armed:
        assert not isinstance(plain.worker.interpreter.runtime, DeadlyRuntime)
        assert isinstance(armed.worker.interpreter.runtime, DeadlyRuntime)


async def test_a_prompt_that_has_it_kills_the_process_and_no_other_does(
    catalog: Process, processes: list[Process]
) -> None:
    worker = worker_process(catalog, crash_on=",".join(map(str, SEQUENCE)))
    processes.append(worker.start())
    await worker.until_ready()
    async with grpc.aio.insecure_channel(worker.target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]

        async def ask(*tokens: int, output: int = 0) -> list[worker_pb2.WorkerGenerateResponse]:
            request = common_pb2.GenerationRequest(
                request_id=f"r{tokens}{output}", tokens=tokens, output_start=len(tokens) - output, max_new_tokens=2
            )
            asked = worker_pb2.WorkerGenerateRequest(request=request)
            return [event async for event in stub.Generate(asked, timeout=10)]

        assert (await ask(7, 8, 1, 9))[-1].result.usage.generated_tokens == 2
        # What was generated is no part of the prompt.
        assert (await ask(1, 2, *SEQUENCE, output=2))[-1].result.usage.generated_tokens == 2
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await ask(1, 2, *SEQUENCE, 3)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(worker.wait) == -signal.SIGKILL
    assert "test hook" in worker.output
