"""From a row of logits to a token: penalties, bias, mask, truncation, one keyed draw.

The order is fixed, and part of what "the same tokens" means across workers:

1. repetition penalty over the ids of prompt and output (Keskar et al. 2019, CTRL: positive logits divided,
   negative multiplied), then frequency x count and presence penalties over the output alone (OpenAI's definition);
2. logit_bias added; 3. the logits mask (grammars) sets what it forbids to -inf;
4. temperature 0: the largest logit, the lowest id on a tie. Otherwise softmax(logits / temperature) in float64, and
   of it what survives top_k, then top_p (the smallest set of most likely tokens whose renormalised mass reaches it),
   then min_p (of the most likely token); equal probabilities at a cut are kept by lowest id;
5. the draw: one Philox uniform u keyed by seed at (position, choice); the token is the first, in ascending id order, at
   which the cumulative kept mass exceeds u x total.

The output begins at tokens[output_start:], so a resumed generation rebuilds its counts by replay. Log-probabilities are
those of the model itself: log-softmax of the raw logits, in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.worker.runtime.errors import NotFiniteError, RuntimeRefusalError
from services.worker.runtime.philox import uniform

_SHORTLIST = 2048  # most likely ids looked at before the whole vocabulary is sorted for top_p


class LogitsMask(Protocol):
    """A grammar's hold on the next token. Advanced over every output token, also the replayed ones."""

    def advance(self, token: int) -> None:
        """The output now ends with `token`."""

    def allowed(self) -> Tensor | None:
        """Bool `[vocab]` on any device: which ids may come next; None: all of them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. The defaults choose greedily.

    temperature >= 0 (0 is greedy); top_p in (0, 1]; top_k >= 0 (0: all); min_p in [0, 1]; repetition_penalty > 0;
    presence and frequency penalties in logits; logit_bias by token id, in logits; logprobs: None or how many
    alternatives to report; seed: u64, drawn once at the entrance where the client gave none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    seed: int = 0

    def validate(self, vocab: int) -> None:
        """Raises RuntimeRefusalError naming the first field outside its range."""
        checks = (
            ("temperature", 0.0 <= self.temperature < float("inf")),
            ("top_p", 0.0 < self.top_p <= 1.0),
            ("top_k", self.top_k >= 0),
            ("min_p", 0.0 <= self.min_p <= 1.0),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf")),
            ("presence_penalty", abs(self.presence_penalty) < float("inf")),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf")),
            ("logit_bias", all(0 <= token < vocab and bias == bias for token, bias in self.logit_bias)),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= vocab),
            ("seed", 0 <= self.seed < 1 << 64),
        )
        for name, fine in checks:
            if not fine:
                raise RuntimeRefusalError(f"{name}={getattr(self, name)!r} is outside the range Sampling states")

    @property
    def plain_greedy(self) -> bool:
        """Whether the token is simply the argmax of the raw logits."""
        return (
            self.temperature == 0.0
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.logit_bias
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the chosen token and of the most likely ones, best first, as (id, logprob)."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class SamplerState:
    """What one generation's sampling remembers: counts of its output, the set of all ids seen, the grammar's state."""

    def __init__(
        self, sampling: Sampling, tokens: Sequence[int], output_start: int, choice: int, mask: LogitsMask | None
    ) -> None:
        self.sampling = sampling
        self._choice = choice
        self._mask = mask
        self._counts: Counter[int] = Counter()
        self._seen: set[int] = set(tokens[:output_start]) if sampling.repetition_penalty != 1.0 else set()
        for token in tokens[output_start:]:
            self.advance(token)

    @property
    def takes_argmax(self) -> bool:
        """Whether the next token is the argmax of the raw logits, so that rows can be reduced together."""
        return self._mask is None and self.sampling.plain_greedy

    def advance(self, token: int) -> None:
        """The output now ends with `token`."""
        self._counts[token] += 1
        if self.sampling.repetition_penalty != 1.0:
            self._seen.add(token)
        if self._mask is not None:
            self._mask.advance(token)

    def choose(self, logits: Tensor, position: int) -> int:
        """The token at absolute index `position`, given its raw logits `[vocab]` (left untouched).

        Raises NotFiniteError where no logit is a number above -inf.
        """
        shaped = self._shape(logits)
        sampling = self.sampling
        top = float(shaped.max())
        if top != top or top == float("-inf"):
            raise NotFiniteError(f"the largest logit at position {position} is {top}: no token can be chosen")
        if sampling.temperature == 0.0:
            return int(shaped.argmax())
        scaled = (shaped.double() - top) / sampling.temperature
        return draw(_truncate(scaled.exp_(), sampling), uniform(sampling.seed, position, self._choice))

    def _shape(self, logits: Tensor) -> Tensor:
        sampling = self.sampling
        if self.takes_argmax:
            return logits
        shaped = logits.float().clone()
        device = logits.device
        if self._seen:
            ids = torch.tensor(sorted(self._seen), dtype=torch.int64, device=device)
            old = shaped[ids]
            shaped[ids] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        if self._counts and (sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0):
            ids = torch.tensor(list(self._counts), dtype=torch.int64, device=device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=device)
            shaped[ids] -= counts * sampling.frequency_penalty + sampling.presence_penalty
        if sampling.logit_bias:
            ids = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.int64, device=device)
            bias = torch.tensor([value for _, value in sampling.logit_bias], dtype=torch.float32, device=device)
            shaped.index_add_(0, ids, bias)
        allowed = self._mask.allowed() if self._mask is not None else None
        if allowed is not None:
            shaped.masked_fill_(~allowed.to(device), float("-inf"))
        return shaped


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities of the raw distribution `[vocab]`: of `token`, and of the `top` most likely ids."""
    logprobs = logits.double().log_softmax(0)
    if top == 0:
        return TokenLogprobs(float(logprobs[token]), ())
    ids = torch.nonzero(_largest(logprobs, top)).flatten()
    values = logprobs[ids]
    order = torch.sort(values, descending=True, stable=True).indices
    pairs = zip(ids[order].tolist(), values[order].tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token]), tuple((int(i), float(v)) for i, v in pairs))


def draw(weights: Tensor, u: float) -> int:
    """Inverse CDF over ascending ids: the first id at which the cumulative weight exceeds u x total. Float64
    `[vocab]`.
    """
    cumulative = weights.cumsum(0)
    target = torch.tensor([u], dtype=torch.float64, device=weights.device) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    if index < len(weights):
        return index
    return int(torch.nonzero(weights)[-1])  # u x total rounded up to the total itself


def _truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """Zeroes what top_k, top_p and min_p cut. Weights are unnormalised probabilities, the largest exactly 1."""
    if 0 < sampling.top_k < len(weights):
        weights = torch.where(_largest(weights, sampling.top_k), weights, 0.0)
    if sampling.top_p < 1.0:
        weights = torch.where(_largest(weights, _nucleus(weights, sampling.top_p)), weights, 0.0)
    if sampling.min_p > 0.0:
        weights = torch.where(weights >= sampling.min_p, weights, 0.0)
    return weights


def _nucleus(weights: Tensor, top_p: float) -> int:
    """How many of the most likely tokens it takes to reach the share `top_p` of the mass; at least one."""
    goal = weights.sum() * top_p
    shortlist = torch.topk(weights, min(_SHORTLIST, len(weights))).values.cumsum(0)
    if float(shortlist[-1]) < float(goal):
        shortlist = weights.sort(descending=True).values.cumsum(0)
    return min(int((shortlist < goal).sum()) + 1, len(weights))


def _largest(values: Tensor, count: int) -> Tensor:
    """Bool `[vocab]`: the `count` largest, the lowest ids first among those equal to the smallest kept."""
    if count >= len(values):
        return torch.ones_like(values, dtype=torch.bool)
    threshold = torch.topk(values, count).values[-1]
    keep = values > threshold
    ties = torch.nonzero(values == threshold).flatten()
    keep[ties[: count - int(keep.sum())]] = True
    return keep
