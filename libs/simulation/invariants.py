"""The seven invariants of the design, and three that keep the simulator itself honest; each a class with a name.

Checked after every step, against accounts of their own (`shadow`, page states, operations, what is durable), so that a
machine that contradicts itself consistently is found out all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from libs.controller import router_events as rx
from libs.controller.discovery import DiscoveryEffect, Observed
from libs.controller.protocol import (
    AssignmentId,
    CompletedDelivery,
    Delivery,
    ErrorDelivery,
    Heartbeat,
    TokensDelivery,
)
from libs.controller.router_effects import Deliver, RouterEffect, SendCancel
from libs.simulation import declared
from libs.simulation.ingress import Call
from libs.simulation.links import Tunnel
from libs.simulation.pages import PagePool, State
from libs.simulation.schedule import Ask
from libs.simulation.shadow import Shadow, Weight, cancels
from libs.simulation.violations import ViolationError

if TYPE_CHECKING:
    from libs.simulation.router_node import RouterNode
    from libs.simulation.storage import Catalog, Store


class Invariant:
    """`name` as the design numbers it."""

    name = ""

    def broken(self, detail: str) -> ViolationError:
        """The violation to raise."""
        return ViolationError(self.name, detail)


class OneEnd(Invariant):
    """Every request ends in exactly one terminal delivery, within its deadline plus a bound."""

    name = "1 one end"

    def __init__(self) -> None:
        self.ended: dict[tuple[str, int, int], Delivery] = {}  # by router process and origin

    def delivered(self, node: RouterNode, effect: Deliver) -> None:
        """At the router."""
        key = (node.name, node.boot, effect.origin)
        if key in self.ended:
            raise self.broken(f"{effect.delivery} follows the end {self.ended[key]}")
        if not isinstance(effect.delivery, TokensDelivery):
            self.ended[key] = effect.delivery

    def going(self, shadow: Shadow, node: RouterNode, request_id: str) -> None:
        """What has not ended has something that will move it."""
        stalled = shadow.stalled(node.machine, request_id)
        if stalled:
            raise self.broken(stalled)

    def given_up(self, call: Call) -> None:
        """At the client, past the bound."""
        if call.origin:
            raise self.broken(f"{call.ask.name} has no end {call.ask.deadline_ms:.0f} ms and a bound after it came")


class DeclaredTokens(Invariant):
    """Delivered tokens are the declared ones, once each, in order, across any number of attempts; usage says so."""

    name = "2 declared tokens"

    def router(self, shadow: Shadow, asks: dict[str, Ask], effect: Deliver) -> None:
        """As a router delivers."""
        delivery = effect.delivery
        submission = shadow.submitted.get(effect.origin)
        if submission is None:
            raise self.broken(f"{delivery} is for nobody")
        sent = shadow.delivered.get(effect.origin, 0)
        base, prompt = submission.delivered, submission.request.output_start
        if isinstance(delivery, TokensDelivery):
            self._tokens(asks[delivery.request_id], delivery, base + sent)
            sent += len(delivery.tokens)
            shadow.delivered[effect.origin] = sent
            if sent > submission.request.max_new_tokens:
                raise self.broken(f"{delivery.request_id} has {sent} tokens of {submission.request.max_new_tokens}")
        elif isinstance(delivery, CompletedDelivery):
            self._whole(asks[delivery.request_id], base + sent)
        elif isinstance(delivery, ErrorDelivery):
            return
        usage = delivery.usage
        if usage.generated_tokens != base + sent or usage.prompt_tokens != prompt:
            raise self.broken(f"{delivery.request_id} has {base + sent} tokens, usage says {usage}")
        if sent and usage.cached_tokens + usage.computed_tokens != prompt:
            raise self.broken(f"{delivery.request_id}: cached and computed are not the prompt in {usage}")

    def client(self, call: Call, delivery: TokensDelivery) -> None:
        """As the client gets them."""
        self._tokens(call.ask, delivery, len(call.delivered))

    def ended(self, call: Call, delivery: Delivery | None) -> None:
        """As the client is told the end."""
        if isinstance(delivery, CompletedDelivery):
            self._whole(call.ask, len(call.delivered))
            if delivery.finish_reason is not declared.finish(call.ask):
                raise self.broken(f"{call.ask.name} ended with {delivery.finish_reason.name}")

    def _tokens(self, ask: Ask, delivery: TokensDelivery, due: int) -> None:
        if delivery.index != due:
            raise self.broken(f"{ask.name}: token {delivery.index} comes where {due} is due")
        if delivery.tokens != declared.tokens(ask, due, due + len(delivery.tokens)):
            raise self.broken(f"{ask.name}: {delivery.tokens} from {due} on are not the declared ones")

    def _whole(self, ask: Ask, count: int) -> None:
        if count != declared.length(ask):
            raise self.broken(f"{ask.name} is complete with {count} of {declared.length(ask)} tokens")


class OnlyTheActive(Invariant):
    """No attempt but the active one changes anything; what the active one says counts; what is given up is told."""

    name = "3 only the active attempt"

    def handled(self, shadow: Shadow, weight: Weight, event: rx.RouterEvent, effects: list[RouterEffect]) -> None:
        """An event of this weight had these effects; the shadow is as before them."""
        if weight is Weight.NOTHING and effects:
            raise self.broken(f"{event} caused {effects}")
        if weight is Weight.CANCELS and not (len(effects) == 1 and isinstance(effects[0], SendCancel)):
            raise self.broken(f"{event} is for nobody and caused {effects}")
        if weight is Weight.REFUSED:
            alone = len(effects) == 1 and isinstance(effects[0], Deliver)
            if not alone or not isinstance(event, rx.Submitted) or effects[0].origin != event.origin:  # type: ignore[union-attr]
                raise self.broken(f"{event} is a second submission and caused {effects}")
        if weight is Weight.COUNTS and not isinstance(event, rx.Planned) and not effects:
            raise self.broken(f"{event} was ignored")
        if weight is Weight.COUNTS:
            for active in shadow.concerned(event):
                if not cancels(effects, active.assignment):
                    raise self.broken(f"{event} gave up {active.assignment} at {active.worker} without telling it")

    def over(self, shadow: Shadow, event: rx.RouterEvent, before: list[AssignmentId]) -> None:
        """The shadow is as after the effects: these attempts must be over."""
        for assignment in before:
            active = shadow.active.get(assignment.request_id)
            if active is not None and active.assignment == assignment:
                raise self.broken(f"{event} left {assignment} active")


class PageAccounts(Invariant):
    """Free, reserved, loading, resident, evicting are all there is; nothing is freed twice, at rest none reserved."""

    name = "4 page accounts"
    _AFTER: ClassVar = {
        State.FREE: (State.RESERVED,),
        State.RESERVED: (State.LOADING, State.RESIDENT, State.FREE),
        State.LOADING: (State.RESIDENT, State.FREE),
        State.RESIDENT: (State.EVICTING,),
        State.EVICTING: (State.FREE, State.RESERVED),
    }

    def __init__(self) -> None:
        self.states: dict[str, list[State]] = {}

    def moved(self, worker: str, pool: PagePool) -> None:
        """The pool's journal of this step against the own account."""
        states = self.states[worker]
        for page, before, after in pool.journal:
            if states[page] is not before:
                raise self.broken(f"{worker}: page {page} is {states[page].value}, not {before.value}")
            if after not in self._AFTER[before]:
                raise self.broken(f"{worker}: page {page} went from {before.value} to {after.value}")
            states[page] = after
        told = pool.pages()
        parts = (told.free, told.reserved, told.loading, told.resident, told.evicting)
        counted = tuple(states.count(state) for state in State)
        if parts != counted or sum(parts) != told.total or min(parts) < 0:
            raise self.broken(f"{worker}: says {told}, and of {[state.value for state in State]} has {counted}")

    def at_rest(self, worker: str, pool: PagePool) -> None:
        """Nothing under way."""
        told = pool.pages()
        if told.reserved or told.loading or told.evicting or pool.leases:
            raise self.broken(f"{worker} at rest: {told}, held by {sorted(pool.leases)}")


class PagesInUse(Invariant):
    """No page referenced by an in-flight operation is freed or reused."""

    name = "5 pages in use"

    def __init__(self) -> None:
        self.operations: dict[tuple[str, AssignmentId], tuple[int, ...]] = {}
        self._uses: dict[str, list[int]] = {}

    def started(self, worker: str, pages: int) -> None:
        """A new process: whatever ran is gone with its pages."""
        self._uses[worker] = [0] * pages
        for key in [key for key in self.operations if key[0] == worker]:
            del self.operations[key]

    def holds(self, worker: str, operation: AssignmentId, pages: tuple[int, ...]) -> None:
        """From now on the operation touches exactly these."""
        uses = self._uses[worker]
        for page in self.operations.get((worker, operation), ()):
            uses[page] -= 1
        for page in pages:
            uses[page] += 1
        self.operations[worker, operation] = pages

    def ends(self, worker: str, operation: AssignmentId) -> None:
        """It has quiesced."""
        uses = self._uses[worker]
        for page in self.operations.pop((worker, operation)):
            uses[page] -= 1

    def releases(self, worker: str, assignment: AssignmentId) -> None:
        """An assignment's pages are about to be released."""
        if (worker, assignment) in self.operations:
            raise self.broken(f"{worker}: {assignment} is released under its running operation")

    def moved(self, worker: str, pool: PagePool) -> None:
        """The pool's journal of this step."""
        uses = self._uses[worker]
        for page, _, after in pool.journal:
            if uses[page] and after in (State.FREE, State.EVICTING):
                users = [key[1] for key, pages in self.operations.items() if key[0] == worker and page in pages]
                raise self.broken(f"{worker}: page {page} became {after.value} under {users}")


class DurableFacts(Invariant):
    """The catalog never names a chunk whose bytes are not durable. What a fault destroyed is excused."""

    name = "6 durable facts"

    def __init__(self) -> None:
        self.destroyed: set[tuple[str, str]] = set()
        self.version = 0  # of the catalog, as checked last

    def check(self, catalog: Catalog, store: Store) -> None:
        """Against the stores."""
        self.version = catalog.version
        for name, fact in catalog.facts.items():
            for place in fact.places:
                if not store.has(place, name) and (place, name) not in self.destroyed:
                    raise self.broken(f"the catalog names {name[:12]} at {place}, where it is not durable")


class PagesPromised(Invariant):
    """An accepted assignment never fails or stalls for want of pages before its declared budget."""

    name = "7 pages promised"

    def short(self, worker: str, assignment: AssignmentId, detail: str) -> None:
        """A run found no page."""
        raise self.broken(f"{worker}: {assignment}: {detail}")


class NewestWord(Invariant):
    """What a router believes of a worker is the newest word of its newest process, over its own tunnel."""

    name = "8 newest word"

    def __init__(self) -> None:
        self._heard: dict[tuple[str, int, str], tuple[int, int]] = {}  # (router, boot, worker) -> (epoch, sequence)
        self._dialled: dict[tuple[str, int, str], int] = {}

    def dialled(self, node: RouterNode, worker: str, epoch: int) -> None:
        """The endpoint map named this process."""
        key = (node.name, node.boot, worker)
        self._dialled[key] = max(epoch, self._dialled.get(key, 0))

    def heard(self, node: RouterNode, tunnel: Tunnel, beat: Heartbeat, effects: list[DiscoveryEffect]) -> None:
        """A heartbeat was handled."""
        key = (node.name, node.boot, beat.worker)
        word, last = (beat.epoch, beat.sequence), self._heard.get(key, (0, 0))
        newer = word > last and beat.epoch >= self._dialled.get(key, 0)
        right = beat.version == 1 and tunnel.worker == beat.worker and newer
        believed = any(isinstance(effect, Observed) for effect in effects)
        if believed and not right:
            raise self.broken(f"{node.name} believed {word} of {beat.worker} after {last} over {tunnel}")
        if right and not believed:
            raise self.broken(f"{node.name} did not believe {word} of {beat.worker} after {last}")
        if believed:
            self._heard[key] = word
        elif effects:
            raise self.broken(f"{node.name} refused {word} of {beat.worker} and did {effects}")


class FleetSurvives(Invariant):
    """A request that kills its workers is not tried until none is left (an unanswered offer's loss counts half)."""

    name = "9 the fleet survives"

    def __init__(self) -> None:
        self.killed: dict[str, int] = {}

    def kill(self, call: Call) -> None:
        """One more."""
        count = self.killed[call.ask.name] = self.killed.get(call.ask.name, 0) + 1
        if count > 4 * call.submissions:
            raise self.broken(f"{call.ask.name} has killed {count} workers in {call.submissions} submissions")
