"""Golden vectors: Random123's known-answer tests for philox4x32 with ten rounds, and our own frozen mapping to a
uniform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.runtime.philox import philox4x32, uniform

U64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_random123_known_answers(counter: str, key: str, expected: str) -> None:
    words = tuple(int(word, 16) for word in counter.split())
    keys = tuple(int(word, 16) for word in key.split())
    assert philox4x32(words, keys) == tuple(int(word, 16) for word in expected.split())


def test_uniform_from_the_known_answers() -> None:
    assert uniform(0, 0, 0) == ((0x6627E8D5E169C58D >> 11) * 2.0**-53)
    assert uniform(2**64 - 1, 2**64 - 1, 2**64 - 1) == ((0x408F276D41C83B0E >> 11) * 2.0**-53)
    seed, position, choice = 0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E
    assert uniform(seed, position, choice) == ((0xD16CFE0994FDCCEB >> 11) * 2.0**-53)


@given(U64, U64, U64)
def test_uniform_is_in_the_unit_interval(seed: int, position: int, choice: int) -> None:
    assert 0.0 <= uniform(seed, position, choice) < 1.0


def test_positions_and_choices_are_independent_streams() -> None:
    draws = np.array([[uniform(7, position, choice) for position in range(2000)] for choice in range(2)])
    assert len(np.unique(draws)) == draws.size
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draws)[0, 1]) < 0.06


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (0, 2**64, 0), (0, 0, -1)])
def test_values_outside_u64_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        uniform(*arguments)
