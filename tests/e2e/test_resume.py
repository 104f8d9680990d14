"""kill -9 of workers: streams go on token for token, and nothing that was durable is computed again."""

from __future__ import annotations

import asyncio

from cli.demo.facts import describe
from cli.demo.scenario import demo_text
from cli.demo.talk import Answer
from prove.stage import Stage
from tests.e2e.chats import SAMPLED, Body, case, complete, prompt, worker_of
from tests.e2e.oracle import Oracle

PAGE_TOKENS = 16
HISTORY = 2_064
"""Processed tokens: whole chunks and 16 more, so that little may be cheaper to compute than to fetch."""
STREAMS: dict[str, Body | None] = {
    "greedy": None,
    "sampled": SAMPLED,
    "penalised": {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    "sampled and penalised": {**SAMPLED, "frequency_penalty": 0.25, "seed": 2**64 - 1},
}


async def test_streams_go_on_at_another_worker_with_the_same_tokens(stage: Stage, oracle: Oracle) -> None:
    """Several at once, of all kinds: both the worker's loss and the resumption meet lanes that are busy."""
    prompts = {name: prompt(300 + 40 * n, seed=n) for n, name in enumerate(STREAMS)}
    undisturbed = {name: await complete(stage, prompts[name], 240, how) for name, how in STREAMS.items()}
    killing = False

    async def kill_the_busiest(pieces: int) -> None:
        nonlocal killing
        if pieces < 24 or killing:
            return
        killing = True
        busy = {name: len((await describe(one.target)).assignments) for name, one in stage.cluster.workers.items()}
        stage.cluster.workers[max(busy, key=busy.__getitem__)].child.kill()

    async with asyncio.TaskGroup() as group:
        tasks = {
            name: group.create_task(complete(stage, prompts[name], 240, how, kill_the_busiest))
            for name, how in STREAMS.items()
        }
    answers = {name: task.result() for name, task in tasks.items()}
    moved = [name for name, answer in answers.items() if len(set(answer.served.workers)) == 2]
    assert moved, "the kill came too late to break a stream"
    for name, answer in answers.items():
        assert answer.served.token_ids == undisturbed[name].served.token_ids, name
        assert answer.text == undisturbed[name].text, name
        assert answer.finish_reason == undisturbed[name].finish_reason, name
        assert answer.served.prompt_tokens == len(prompts[name]), "usage is the request's, not the last attempt's"
    assert not await oracle.inexact([case(name, answer, STREAMS[name]) for name, answer in answers.items()])


async def test_a_chat_goes_on_from_the_object_store_and_from_the_disk_of_a_worker_that_returned(
    fresh: Stage, oracle: Oracle
) -> None:
    first = await complete(fresh, prompt(HISTORY - 31, seed=77), 32)
    assert len(first.processed) == HISTORY
    home = worker_of(fresh, first)
    node = (await describe(home.target)).endpoint.node
    await fresh.facts.durable(first.processed, node=node)
    other = next(worker for worker in fresh.cluster.workers.values() if worker is not home)

    home.child.kill()
    await home.child.wait_crashed()
    await fresh.facts.worker_gone(home.name)
    second = await _next_turn(fresh, first, seed=1, new=744)
    assert len(second.processed) == HISTORY + 3 * 256
    assert second.served.worker == other.name
    _restored(first, second, {"object"})
    await fresh.facts.durable(second.processed)

    back = await fresh.facts.worker_heard(home.name, newer_than=first.served.epoch)
    assert back.heartbeat.node == node, "a chunk directory keeps its name over a crash"
    other.child.kill()
    await other.child.wait_crashed()
    await fresh.facts.worker_gone(other.name)
    # Its disk has the first turn; what the other one added is in the object store alone.
    third = await _next_turn(fresh, second, seed=2)
    assert third.served.worker == home.name and third.served.epoch > first.served.epoch
    _restored(second, third, {"ssd", "object"})
    again = await _next_turn(fresh, first, seed=3)
    assert again.served.worker == home.name
    assert not await oracle.inexact([case(str(n), answer) for n, answer in enumerate((first, second, third, again))])


async def _next_turn(stage: Stage, before: Answer, seed: int, new: int = 19) -> Answer:
    said = before.served.prompt_token_ids + before.served.token_ids
    return await complete(stage, said + prompt(new + 1, seed)[1:], 24)


def _restored(before: Answer, after: Answer, tiers: set[str]) -> None:
    served = after.served
    new = served.prompt_tokens - len(before.processed)
    assert set(served.restored_by_tier) == tiers, served.restored_by_tier
    assert served.computed_tokens <= new + PAGE_TOKENS, f"{served.computed_tokens} computed for {new} new ones"
    assert served.cached_tokens + served.computed_tokens == served.prompt_tokens
    assert sum(share.tokens for share in served.restored_by_tier.values()) == served.restored_tokens
    assert all(share.bytes > 0 for share in served.restored_by_tier.values())


async def test_a_next_turn_that_comes_at_once_lands_where_the_state_is(stage: Stage) -> None:
    """Agents do not pause between turns: the router must know what it has just been told of."""
    missed = []
    for seed in range(8):
        first = await complete(stage, prompt(600, seed=3_000 + seed), 8)
        second = await _next_turn(stage, first, seed)
        new = second.served.prompt_tokens - len(first.processed)
        if second.served.computed_tokens > new + PAGE_TOKENS:
            missed.append((seed, first.served.worker, second.served.worker, second.served.computed_tokens))
    assert not missed, missed


async def test_the_next_turn_of_a_chat_is_resident_and_exact(stage: Stage, oracle: Oracle) -> None:
    """Through the chat template and the turn memo: the ids that were generated are what the next prompt holds."""
    words = " ".join(demo_text().split()[:300])
    messages = [{"role": "user", "content": words}]
    first = await stage.talker.chat(messages, 24)
    await stage.facts.durable(first.processed)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = await stage.talker.chat(messages, 24)
    whole = first.served.prompt_token_ids + first.served.token_ids
    spliced = second.served.prompt_token_ids[: len(whole)] == whole
    # A model of random weights may end its answer with white space, which the template trims: a miss, never a mistake.
    if first.text == first.text.strip():
        assert spliced
        assert second.served.computed_tokens <= second.served.prompt_tokens - len(first.processed) + PAGE_TOKENS
    assert not await oracle.inexact([case("first", first), case("second", second)])
