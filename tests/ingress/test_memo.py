"""The turn memo: exact ids where they help, the exact text always."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.detokenizer import text_of
from services.ingress.memo import Entry, Scope, TurnMemo
from services.ingress.prompts import chat_prompt, remember_turn
from services.ingress.text_model import TextModel
from tests.ingress.models import END, byte_level, write_folder

MINE = Scope("a", "m")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load("m", write_folder(tmp_path_factory.mktemp("model"), byte_level()))


def ids_of(text: str) -> list[int]:
    """One id a byte: never what the tokenizer would say for `the`."""
    tokenizer = byte_level(merges=())
    return tokenizer.encode(text, add_special_tokens=False).ids


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def test_generated_ids_are_spliced_although_retokenizing_gives_others(model: TextModel) -> None:
    memo = TurnMemo(1 << 20, 8)
    first = await chat_prompt(model, memo, MINE, [user("hi")])
    generated = [*ids_of("the hall"), END]
    assert remember_turn(model, memo, MINE, first, "the hall", generated)
    second = await chat_prompt(model, memo, MINE, [user("hi"), assistant("the hall"), user("the end")])
    spliced = first.ids + generated[:-1]
    assert second.ids[: len(spliced)] == spliced
    assert second.spliced == len(spliced)
    assert second.ids[len(spliced)] == END
    # Other ids than tokenizing anew, the very same text.
    anew = await model.encode(second.text)
    assert second.ids != anew
    assert text_of(model.bytes_of, second.ids) == text_of(model.bytes_of, anew)


async def test_each_turn_builds_on_the_one_before(model: TextModel) -> None:
    memo = TurnMemo(1 << 20, 8)
    messages: list[dict[str, str]] = []
    expected: list[int] = []
    for turn in range(5):
        messages.append(user(f"question {turn}"))
        prompt = await chat_prompt(model, memo, MINE, messages)
        assert prompt.ids[: len(expected)] == expected
        assert (prompt.spliced > 0) == (turn > 0)
        answer = ids_of(f"the answer {turn}")
        remember_turn(model, memo, MINE, prompt, f"the answer {turn}", [*answer, END])
        messages.append(assistant(f"the answer {turn}"))
        expected = [*prompt.ids, *answer]
    # A conversation that forks off at an earlier answer begins with that one.
    fork = await chat_prompt(model, memo, MINE, [*messages[:2], user("another")])
    assert 0 < fork.spliced < len(expected)
    assert fork.ids[: fork.spliced] == expected[: fork.spliced]


async def test_tenants_and_models_share_nothing(model: TextModel) -> None:
    memo = TurnMemo(1 << 20, 8)
    prompt = await chat_prompt(model, memo, MINE, [user("hi")])
    remember_turn(model, memo, MINE, prompt, "the hall", ids_of("the hall"))
    chat = [user("hi"), assistant("the hall"), user("x")]
    assert (await chat_prompt(model, memo, MINE, chat)).spliced > 0
    for other in (Scope("b", "m"), Scope("a", "n")):
        assert (await chat_prompt(model, memo, other, chat)).spliced == 0


@pytest.mark.parametrize(
    ("answer", "generated", "found"),
    [
        ("the hall\n", "the hall\n", "the hall"),  # the template trims: the last token is left out
        (" the hall", " the hall", None),  # trimmed in front: no ids have that text
        ("the ha", "the hall", "the ha"),  # cut by a stop string between two tokens
        ("", "", ""),
        ("changed", "the hall", None),  # not what was generated
    ],
)
async def test_the_text_is_exact_whatever_was_cut(
    model: TextModel, answer: str, generated: str, found: str | None
) -> None:
    memo = TurnMemo(1 << 20, 8)
    prompt = await chat_prompt(model, memo, MINE, [user("hi")])
    remember_turn(model, memo, MINE, prompt, answer, ids_of(generated))
    then = await chat_prompt(model, memo, MINE, [user("hi"), assistant(answer), user("x")])
    assert then.spliced == (0 if found is None else len(prompt.ids) + len(ids_of(found)))
    assert text_of(model.bytes_of, then.ids) == text_of(model.bytes_of, await model.encode(then.text))


async def test_an_edited_answer_is_a_miss(model: TextModel) -> None:
    memo = TurnMemo(1 << 20, 8)
    prompt = await chat_prompt(model, memo, MINE, [user("hi")])
    remember_turn(model, memo, MINE, prompt, "the hall", ids_of("the hall"))
    for edited in ("the halls", "the hal", "The hall"):
        assert (await chat_prompt(model, memo, MINE, [user("hi"), assistant(edited), user("x")])).spliced == 0


async def test_special_tokens_in_the_answer_end_what_is_remembered(model: TextModel) -> None:
    memo = TurnMemo(1 << 20, 8)
    prompt = await chat_prompt(model, memo, MINE, [user("hi")])
    # `<pad>` has no text: ids that hold it would stand for a text that does not show it.
    assert not remember_turn(model, memo, MINE, prompt, "the hall", [*ids_of("the "), 0, *ids_of("hall")])


pieces = st.sampled_from(
    ["<start_of_turn>", "<end_of_turn>", "<eos>", "the", " ", "hall", "\n", "é", "<", "end_of_turn>"]
)


@given(st.lists(pieces, max_size=12))
def test_tokenizing_apart_at_a_boundary_gives_the_ids_of_the_whole(parts: list[str]) -> None:
    tokenizer = byte_level()
    text = "".join(parts)
    import re

    from services.ingress.text_model import _boundary_pattern

    boundary = _boundary_pattern(list(tokenizer.get_added_tokens_decoder().values()))
    assert isinstance(boundary, re.Pattern)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    for match in boundary.finditer(text):
        left = tokenizer.encode(text[: match.start()], add_special_tokens=False).ids
        right = tokenizer.encode(text[match.start() :], add_special_tokens=False).ids
        assert left + right == whole


def test_unsafe_special_tokens_are_no_boundaries() -> None:
    from tokenizers import AddedToken

    from services.ingress.text_model import _boundary_pattern

    def token(content: str, **traits: bool) -> AddedToken:
        return AddedToken(content, **({"special": True, "normalized": False} | traits))

    assert (
        _boundary_pattern([token("<a>", lstrip=True), token("<b>", normalized=True), token("<c>", single_word=True)])
        is None
    )
    assert (
        _boundary_pattern([token("<a>"), token("x<", special=False)]) is None
    )  # `x<` ends with the beginning of `<a>`
    assert _boundary_pattern([token("<a>"), token("x<a>y", special=False)]) is None  # `<a>` inside another
    kept = _boundary_pattern([token("<a>"), token("</a>")])
    assert kept is not None
    assert kept.findall("<a></a>") == ["<a>", "</a>"]


def test_bytes_are_bounded_and_leaves_go_first(model: TextModel) -> None:
    limit, memo, chance = 6_000, TurnMemo(6_000, 3), random.Random(7)
    kept: dict[Scope, list[tuple[str, list[int], Entry]]] = {}
    for _ in range(900):
        scope = Scope(f"tenant {3 if chance.random() < 0.01 else chance.randrange(3)}", "m")
        # A chat goes on from a turn found before, which may be gone by now, or begins anew.
        text, ids, parent = "<bos>", [2], None
        if kept.get(scope) and chance.random() < 0.8:
            text, ids, parent = chance.choice(kept[scope])
        part = f"<end_of_turn>{chance.randrange(3)}"
        found = memo.longest(scope, text + part, model.boundary)
        if found is not None:
            assert found.ids == ids[: len(found.ids)]  # whatever was evicted, what is found is exact
            assert text.startswith(text[: found.length])
        text, ids = text + part, [*ids, *ids_of(part)]
        memo.remember(scope, text, ids, parent)
        again = memo.longest(scope, text + "<end_of_turn>", model.boundary)
        if again is not None and again.length == len(text):
            assert again.ids == ids
            kept.setdefault(scope, []).append((text, ids, again.entry))
        for table in memo._tables.values():
            assert table.bytes == sum(entry.bytes for entry in table.entries.values()) <= limit
            for entry in table.entries.values():
                assert entry.parent is None or table.entries[entry.parent.digest] is entry.parent
        assert len(memo._tables) <= 3
    assert 0 < memo.bytes <= 3 * limit


def test_nothing_is_remembered_with_no_bytes(model: TextModel) -> None:
    memo = TurnMemo(0, 2)
    memo.remember(MINE, "a", [1], None)
    assert memo.bytes == 0
    assert memo.longest(MINE, "a<end_of_turn>", model.boundary) is None


def test_folder_helper_writes_a_loadable_model(tmp_path: Path) -> None:
    assert TextModel.load("m", write_folder(tmp_path, byte_level())).max_context == 4_096
