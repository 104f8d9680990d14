"""The paged, chunked, batched runtime draws the tokens of a plain contiguous forward, up to a float tie of 1e-4."""

from __future__ import annotations

import random

import pytest
import torch

from services.worker.runtime.job import Finished, Prefilled, Token
from tests.worker_runtime.harness import PAGE, Harness, Subject

TIE = 1e-4


@pytest.mark.parametrize("family", ["tiny", "llama", "qwen3"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 600])
def test_one_prompt_of_each_length(subjects: dict[str, Subject], family: str, length: int) -> None:
    subject = subjects[family]
    with Harness(subject) as harness:
        prompt = subject.prompt(length, seed=length)
        output = harness.run(harness.job("a", prompt, 24))
    assert len(output) == 24
    assert subject.worst_gap(prompt, output) < TIE


@pytest.mark.parametrize("family", ["tiny", "llama", "qwen3"])
def test_eight_mixed_lanes(subjects: dict[str, Subject], family: str) -> None:
    """24 prompts of 1 to 900 tokens over 8 lanes: decodes beside chunks, lanes refilled, windows left behind."""
    subject = subjects[family]
    rng = random.Random(3)
    with Harness(subject) as harness:
        prompts = {key: subject.prompt(rng.choice([1, 7, 40, 130, 500, 900]), seed=key) for key in range(24)}
        for key, prompt in prompts.items():
            harness.loop.submit(harness.job(key, prompt, rng.randint(1, 40)))
        harness.finish(*prompts)
        measured = harness.loop.measurements()
        for key, prompt in prompts.items():
            assert isinstance(harness.ended(key), Finished)
            assert subject.worst_gap(prompt, harness.output(key)) < TIE
    assert max(measured.decode_step_ms, default=0) > 1 or measured.prefill_beside_decode_token_ms
    assert measured.primed_rows == len(prompts), "tables are uploaded once per job, never for a decode"


def test_long_generation_crosses_the_window(tiny: Subject, harness: Harness) -> None:
    prompt = tiny.prompt(480, seed=1)
    output = harness.run(harness.job("a", prompt, 200))
    assert tiny.worst_gap(prompt, output) < TIE


@pytest.mark.parametrize("boundary", [0, 1, 255, 256, 511, 512, 513, 700, 1199])
def test_continues_from_resident_pages(tiny: Subject, harness: Harness, boundary: int) -> None:
    """A second job on the same pages begins at a boundary; what lies behind the window is not even mapped."""
    prompt = tiny.prompt(1200, seed=2)
    tables = harness.tables(1300)
    first = harness.run(harness.job("first", prompt, 20, pages=tables))
    holes = harness.forget_behind_window(tables, boundary)
    again = harness.run(harness.job("again", prompt, 20, pages=holes, computed=boundary))
    assert [event for event in harness.events("again") if isinstance(event, Prefilled)][-1].computed == 1200
    assert tiny.worst_gap(prompt, first) < TIE
    assert tiny.worst_gap(prompt, again) < TIE


def test_missing_state_would_be_noticed(tiny: Subject, harness: Harness) -> None:
    """The check above has teeth: claiming computed tokens on empty pages, or one foreign page, gives other tokens."""
    prompt = tiny.prompt(400, seed=4)
    empty = harness.run(harness.job("empty", prompt, 20, computed=399))
    assert tiny.worst_gap(prompt, empty) > 0.1
    tables = harness.tables(500)
    harness.run(harness.job("whole", prompt, 20, pages=tables))
    foreign = {name: [*pages[:20], tables[name][0], *pages[21:]] for name, pages in tables.items()}
    wrong = harness.run(harness.job("foreign", prompt, 20, pages=foreign, computed=399))
    assert tiny.worst_gap(prompt, wrong) > TIE


def test_state_written_through_the_store_continues(tiny: Subject, harness: Harness) -> None:
    """Read (checkpoint) and write (restore) into other pages, with a boundary inside a page and a foreign alignment."""
    prompt = tiny.prompt(777, seed=5)
    tables = harness.tables(900)
    expected = harness.run(harness.job("cold", prompt, 30, pages=tables))
    boundary = 760  # 47.5 pages
    target = harness.tables(900)
    for group in tiny.model.identity.layout.groups:
        start = group.first_needed(boundary)
        for begin in range(start, boundary, 100):
            end = min(begin + 100, boundary)
            pages = slice(begin // PAGE, -(-end // PAGE))
            rows = harness.kv.read(group.name, tables[group.name][pages], begin % PAGE, end - begin)
            assert set(rows) == set(group.layers)
            assert all(k.shape == v.shape == (end - begin, group.kv_heads, group.head_dim) for k, v in rows.values())
            harness.kv.write(group.name, target[group.name][pages], begin % PAGE, rows)
    restored = harness.run(harness.job("restored", prompt, 30, pages=target, computed=boundary))
    assert restored == expected
    assert tiny.worst_gap(prompt, restored) < TIE


def test_a_branch_writes_to_its_own_tail(tiny: Subject, harness: Harness) -> None:
    prompt = tiny.prompt(300, seed=6)
    tables = harness.tables(400)
    harness.run(harness.job("root", prompt, 1, pages=tables))
    other = [*prompt[:297], *tiny.prompt(20, seed=7)]
    branch = {name: [*pages[:18], *harness.tables(100)[name]] for name, pages in tables.items()}
    for name, pages in branch.items():
        harness.kv.copy_page(name, tables[name][18], pages[18], 297 - 18 * PAGE)
    left = harness.job("left", prompt, 40, pages=tables, computed=299)
    right = harness.job("right", other, 40, pages=branch, computed=297)
    harness.loop.submit(left)
    harness.loop.submit(right)
    harness.finish("left", "right")
    assert tiny.worst_gap(prompt, harness.output("left")) < TIE
    assert tiny.worst_gap(other, harness.output("right")) < TIE


def test_stop_and_boundaries_of_events(tiny: Subject, harness: Harness) -> None:
    prompt = tiny.prompt(150, seed=8)
    free = harness.run(harness.job("free", prompt, 30))
    stop = free[10]
    output = harness.run(harness.job("stopped", prompt, 30, stop=[stop]))
    assert output == free[: free.index(stop) + 1]
    ended = harness.ended("stopped")
    assert isinstance(ended, Finished)
    assert ended.reason == "stop"
    assert ended.computed == len(prompt) + len(output) - 1, "the last token has no state"
    assert [event.computed for event in harness.events("stopped") if isinstance(event, Prefilled)] == [64, 128, 150]
    tokens = [event for event in harness.events("stopped") if isinstance(event, Token)]
    assert [event.index for event in tokens] == list(range(len(output)))
    assert [event.computed for event in tokens] == [150 + index for index in range(len(output))]


def test_store_holds_the_keys_of_a_plain_cache(tiny: Subject, harness: Harness) -> None:
    """K after RoPE and V, as transformers' own cache has them: what a chunk object is defined to hold."""
    from transformers import DynamicCache

    prompt = tiny.prompt(200, seed=9)
    tables = harness.tables(220)
    harness.run(harness.job("a", prompt, 2, pages=tables))
    cache = DynamicCache(config=tiny.reference.config)
    with torch.inference_mode():
        tiny.reference(torch.tensor([prompt]), cache=cache)
    for group in tiny.model.identity.layout.groups:
        for layer, (keys, values) in harness.kv.read(group.name, tables[group.name], 0, 200).items():
            torch.testing.assert_close(keys, cache.layers[layer].keys[0].transpose(0, 1), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, cache.layers[layer].values[0].transpose(0, 1), atol=1e-4, rtol=1e-4)
