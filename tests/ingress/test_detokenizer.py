"""Streaming text against the whole decode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.ingress.choice_text import ChoiceText
from services.ingress.detokenizer import Detokenizer, TokenBytes, UnsupportedDecoderError, text_of
from services.ingress.stop_strings import StopMatcher
from tests.ingress.models import END, byte_fallback, byte_level

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
TABLES = {"byte level": TokenBytes(BYTE_LEVEL), "byte fallback": TokenBytes(BYTE_FALLBACK)}
any_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40)
texts = st.text(alphabet="ab the日é🙂\n.", max_size=30)


def streamed(table: TokenBytes, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(table)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.finish()]


@given(any_ids)
def test_byte_level_stream_is_the_library_decode_of_any_ids(ids: list[int]) -> None:
    assert "".join(streamed(TABLES["byte level"], ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(texts)
def test_byte_fallback_stream_is_the_library_decode_of_texts(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text, add_special_tokens=False).ids
    assert "".join(streamed(TABLES["byte fallback"], ids)) == BYTE_FALLBACK.decode(ids) == text


@given(any_ids)
def test_stream_equals_whole_text_for_any_ids(ids: list[int]) -> None:
    for table in TABLES.values():
        ids = [token % 290 for token in ids]
        assert "".join(streamed(table, ids)) == text_of(table, ids)


@given(texts)
def test_no_piece_ever_holds_a_broken_character(text: str) -> None:
    for tokenizer, table in ((BYTE_LEVEL, TABLES["byte level"]), (BYTE_FALLBACK, TABLES["byte fallback"])):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert not any("\ufffd" in piece for piece in streamed(table, ids))


def test_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    ids = BYTE_FALLBACK.encode("a🙂", add_special_tokens=False).ids[:-1]
    assert streamed(TABLES["byte fallback"], ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    assert streamed(TABLES["byte level"], [END, 10**6]) == ["", "", ""]


def test_other_decoders_are_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for decoder in (None, decoders.WordPiece(), decoders.Sequence([decoders.Replace("x", "y"), decoders.Fuse()])):
        if decoder is not None:
            tokenizer.decoder = decoder
        with pytest.raises(UnsupportedDecoderError):
            TokenBytes(tokenizer)


def reference_cut(text: str, stops: list[str]) -> str:
    """Character by character: the first at which a stop string is complete; cut where the longest such one begins."""
    for end in range(1, len(text) + 1):
        hits = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: min(hits)]
    return text


few = st.text(alphabet="ab", min_size=1, max_size=4)


@given(st.lists(st.text(alphabet="ab", max_size=5), max_size=12), st.lists(few, min_size=1, max_size=4))
def test_stop_strings_do_not_depend_on_how_text_is_divided(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, whole = "", "".join(pieces)
    for piece in pieces:
        shown += matcher.feed(piece)
        # Nothing is shown that a stop string may still take back, and nothing else is held back.
        assert reference_cut(whole, stops).startswith(shown)
    shown += matcher.finish()
    assert shown == reference_cut(whole, stops)
    assert (matcher.matched is not None) == (reference_cut(whole, stops) != whole)


def test_held_back_text_is_no_more_than_needed() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("Hi") == "Hi"
    assert matcher.feed("\n") == ""
    assert matcher.feed("x") == "\nx"
    assert matcher.feed("\n\nUser") == ""
    assert matcher.finish() == "\n\nUser"


@given(texts, st.lists(st.text(alphabet="ab th日", min_size=1, max_size=3), max_size=3), st.data())
def test_choice_counts_up_to_the_token_that_completes_the_stop(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    table = TABLES["byte fallback"]
    ids = BYTE_FALLBACK.encode(text, add_special_tokens=False).ids
    choice, at, shown = ChoiceText(table, stops, [END]), 0, ""
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        shown += choice.feed(ids[at : at + step])
        at += step
    shown += choice.finish()
    assert shown == choice.text == reference_cut(text, stops)
    if choice.stop_string is not None:
        count = len(choice.ids)
        assert any(stop in text_of(table, ids[:count]) for stop in stops)
        assert not any(stop in text_of(table, ids[: count - 1]) for stop in stops)
        assert choice.finish_reason == "stop"
    else:
        assert choice.ids == ids


def test_stop_token_is_counted_and_not_shown() -> None:
    choice = ChoiceText(TABLES["byte level"], [], [END, 100])
    assert choice.feed([50, 100, 51]) != ""
    assert choice.ids == [50, 100]
    assert choice.finish_reason == "stop"
