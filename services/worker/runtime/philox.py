"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as Random123
defines it.

A counter-based generator has no state to carry: the draw for a token is a function of (seed, position, choice) alone,
so any worker that continues a generation, in any batch, at any attempt, draws the same number.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Ten rounds over four 32-bit words; counter and key words in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, choice: int) -> float:
    """The uniform in [0, 1) that draws the token at absolute index `position` of choice `choice`.

    Frozen: key = (seed low, seed high), counter = (position low, position high, choice low, choice high), 32-bit words;
    the result is the top 53 bits of (word 0 << 32 | word 1), times 2^-53. Raises ValueError outside u64.
    """
    for name, value in (("seed", seed), ("position", position), ("choice", choice)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name} {value} is not an unsigned 64-bit integer")
    words = philox4x32((position & _MASK, position >> 32, choice & _MASK, choice >> 32), (seed & _MASK, seed >> 32))
    return float(((words[0] << 32 | words[1]) >> 11) * 2.0**-53)
