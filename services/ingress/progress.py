"""What one request has been given so far, over any number of routers. Pure: no I/O, no clock.

A router may be lost at any moment. The request then goes to another one with what was delivered as the end of its
tokens (`GenerateRequest.delivered`), the variant that produced it, what is left of its budget, and `output_start`
unchanged, so that draws, penalties and indices go on as if nothing had happened. Deliveries are fenced by index: only
the next token is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.contracts.segue.v1.common_pb2 import FinishReason, GenerationRequest, Usage
from libs.contracts.segue.v1.router_pb2 import GenerateRequest, TokensDelivery


class DeliveryGapError(Exception):
    """A router left out tokens: its stream cannot be trusted any more."""


class Progress:
    """One request. `delivered` are the tokens taken, in order."""

    def __init__(self, request: GenerationRequest) -> None:
        """`request` as first submitted: output_start = len(tokens)."""
        self._request = request
        self.delivered: list[int] = []
        self._usage: Usage | None = None
        self._settled = False
        self._fingerprint = ""
        self._duplicates = 0

    @property
    def usage(self) -> Usage | None:
        """Of the first router that delivered (there the prompt was read); before any token, the latest known."""
        return self._usage

    @property
    def duplicates(self) -> int:
        """Tokens that came a second time and were dropped."""
        return self._duplicates

    def submission(self, remaining_ms: int) -> GenerateRequest:
        """What to send to the next router."""
        request = GenerationRequest()
        request.CopyFrom(self._request)
        request.tokens.extend(self.delivered)
        request.max_new_tokens -= len(self.delivered)
        request.deadline_ms = max(1, remaining_ms)
        return GenerateRequest(request=request, delivered=len(self.delivered), fingerprint=self._fingerprint)

    def take(self, delivery: TokensDelivery) -> Sequence[int]:
        """The tokens of a delivery that are new. Raises DeliveryGapError."""
        known = len(self.delivered) - delivery.index
        if known < 0:
            raise DeliveryGapError(f"token {len(self.delivered)} was expected and {delivery.index} came")
        new = list(delivery.tokens)[known:]
        self._duplicates += len(delivery.tokens) - len(new)
        if not self._settled and delivery.HasField("usage"):
            self._usage = delivery.usage
        self.delivered += new
        if new:
            self._fingerprint = delivery.fingerprint
        return new

    def note_usage(self, usage: Usage) -> None:
        """Usage of a terminal delivery."""
        if not self._settled:
            self._usage = usage

    def router_lost(self) -> None:
        """From here on usage of another router is that of a resumed prompt, which is not what the client asked."""
        self._settled = bool(self.delivered)

    @property
    def ended(self) -> FinishReason | None:
        """How the generation ended, if the tokens alone say so: a router lost after the last one changes nothing."""
        if self.delivered and self.delivered[-1] in self._request.stop_token_ids:
            return FinishReason.FINISH_REASON_STOP
        if len(self.delivered) >= self._request.max_new_tokens:
            return FinishReason.FINISH_REASON_LENGTH
        return None
