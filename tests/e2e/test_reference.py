"""The exactness oracle finds a planted mistake: else "every turn exact" proves nothing."""

from __future__ import annotations

from cli.demo.exact import Case, all_exact
from prove.stage import Stage
from tests.e2e.chats import SAMPLED, complete, prompt
from tests.e2e.oracle import Oracle


async def test_one_changed_token_is_caught(stage: Stage, oracle: Oracle) -> None:
    ids = prompt(200, seed=61)
    greedy, drawn = await complete(stage, ids, 40), await complete(stage, ids, 40, SAMPLED)
    good, sampled = greedy.served.token_ids, drawn.served.token_ids

    def changed(tokens: list[int], at: int) -> list[int]:
        return [*tokens[:at], (tokens[at] + 1) % 500 + 6, *tokens[at + 1 :]]

    cases = [
        Case("good", ids, good),
        *(Case(f"changed at {at}", ids, changed(good, at)) for at in (0, 17, 39)),
        Case("one token of the prompt is another", [*ids[:50], ids[50] ^ 1, *ids[51:]], good),
        Case("drawn", ids, sampled, SAMPLED),
        Case("drawn, changed", ids, changed(sampled, 20), SAMPLED),
        Case("drawn, shifted by one", ids[:-1], [ids[-1], *sampled[:-1]], SAMPLED),
    ]
    verdicts = await oracle.judge(cases)
    assert {name for name, verdict in verdicts.items() if verdict.exact} == {"good", "drawn"}
    assert all_exact([verdicts["good"]]) and not all_exact(list(verdicts.values()))
    assert verdicts["good"].argmax == 40 and verdicts["good"].max_gap <= 1e-4
