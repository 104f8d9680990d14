"""A schedule: everything that is chosen about one run, as a value. There is no other source of chance.

A run is a function of its schedule: settings, asks (requests of clients) and faults. `generate` draws one from a seed,
scenario files are written by hand, `shrink` takes asks and faults away; `strict` reads and writes them as JSON.
Times are logical ms from the start of the run. Names: routers r0, r1, ...; workers as their specs say; the one ingress
is `ingress`, the catalog `catalog`, the object store `object`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Do(Enum):
    """Kinds of fault; behind each the fields of `Fault` it reads."""

    PARTITION = "partition"  # who, whom, ms: messages from who to whom wait until it is over
    JITTER = "jitter"  # who, whom, ms, pattern: extra delays, dealt to messages in turn; they overtake each other
    REPEAT = "repeat"  # who, whom, ms, n: every n-th message arrives twice
    LOSE_TUNNEL = "lose-tunnel"  # who (router), whom (worker), n: which; ms: how much later the worker notices
    LOSE_ATTACH = "lose-attach"  # who (router): the stream between ingress and it breaks, both live
    RETIRE = "retire"  # who (router), whom (worker): its tunnels to it are retired in order, whatever runs on them
    CRASH = "crash"  # who (router or worker), ms: down time
    DRAIN = "drain"  # who (worker), ms: grace period, then what still runs is cut
    MUTE = "mute"  # who (worker), whom (router), ms: heartbeats are lost; past the expiry that is silence
    STALE = "stale"  # who (worker), whom (router), ms: heartbeats of that time arrive when it is over
    SLOW = "slow"  # who (worker), whom (prefill, decode, ram, ssd, peer, object), ms, n: cost times n
    VANISH = "vanish"  # who (worker: its disk; or object), n: the n-th chunk there is lost, its fact remains
    CORRUPT = "corrupt"  # likewise: its bytes are damaged
    COLLECT = "collect"  # n: the n-th chunk the catalog knows is collected: the fact goes, then all its bytes
    CATALOG_AWAY = "catalog-away"  # ms
    CANCEL = "cancel"  # who (ask): its client leaves
    CANCEL_BY_ID = "cancel-by-id"  # who (ask), whom (router): an operator cancels it, whoever submitted it
    RESUBMIT = "resubmit"  # who (ask): submitted to its router a second time by mistake
    DEVICE_ERROR = "device-error"  # who (worker), n: its n-th run fails
    PRESSURE = "pressure"  # who (worker): every evictable page is evicted
    RELABEL = "relabel"  # who (worker): an idle process learns that it has another epoch; its tunnels stay
    MISPLAN = "misplan"  # who (router), n (see planning.Misplan): its next plan is a bad one
    STRAY_TIMER = "stray-timer"  # who (router), n: a timer that was cancelled fires all the same
    STRAY_PLAN = "stray-plan"  # who (router): its last plan is answered once more
    STRAY_CANCEL = "stray-cancel"  # who (router): a cancel and a deadline of a submission that is not the live one
    FORGE = "forge"  # who (router), n (see forgeries): a message no honest worker sends reaches it
    FORGE_OFFER = "forge-offer"  # who (worker), n (see forgeries): what no honest router sends reaches it
    WAKE = "wake"  # who (router), n: it hears of n free slots that may not be there


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client.

    Its prompt is the first `shared` tokens of the stream `prefix` and then `own` tokens of its own. It declares to
    generate `length` tokens (-1: its budget) and then to stop; `deadly`: its worker dies at the end of the prefill.
    """

    name: str
    at_ms: float = 0.0
    prefix: str = ""
    shared: int = 0
    own: int = 16
    budget: int = 8
    length: int = -1
    deadline_ms: float = 10_000.0
    tenant: str = "t"
    priority: int = 0
    model: str = "m"
    router: int = 0
    deadly: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong; `Do` says which fields it reads."""

    at_ms: float
    do: Do
    who: str = ""
    whom: str = ""
    ms: float = 0.0
    n: int = 0
    pattern: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: its size, and its declared costs in ms (restores: per token, by tier, plus a latency of 1 ms).

    `claims_context`: what its heartbeats say the context is; 0 = the truth. `tells_lane`: whether its runtime reports
    that a run got a lane (a runtime of one lane need not).
    """

    name: str
    lanes: int = 2
    pages: int = 24
    page_tokens: int = 16
    context: int = 512
    claims_context: int = 0
    control_tasks: int = 6
    prefill_ms: float = 1.0
    decode_ms: float = 10.0
    ram_ms: float = 0.02
    ssd_ms: float = 0.1
    peer_ms: float = 0.15
    object_ms: float = 0.3
    reserve_ms: float = 1.0
    evict_ms: float = 2.0
    queue_margin_ms: float = 200.0
    tells_lane: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """The cluster and its knobs. `burst`: tokens a decode reports at a time; 0 = all in one span."""

    workers: tuple[WorkerSpec, ...]
    routers: int = 1
    tunnels: int = 1
    latency_ms: float = 1.0
    catalog_ms: float = 3.0
    dial_ms: float = 5.0
    burst: int = 1
    heartbeat_ms: float = 400.0
    expiry_ms: float = 2_000.0
    offer_timeout_ms: float = 200.0
    offers_unanswered: int = 8
    prefix_copies: int = 2
    hold_least_ms: float = 100.0
    attempts: int = 6
    queue: int = 64
    queue_per_tenant: int = 16
    prompt_rest_ms: float = 60_000.0
    checkpoints: bool = True
    settle_ms: float = 3_000.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a scenario claims about one figure of its run (`figures`): equal to a text, or within bounds."""

    figure: str
    equals: str = ""
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """See the module."""

    name: str
    settings: Settings
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    expect: tuple[Expectation, ...] = ()
    seed: int = -1
    note: str = ""


class ScheduleError(ValueError):
    """A schedule that cannot be run: carries where it is wrong, and says what is allowed there."""

    def __init__(self, where: str, detail: str) -> None:
        super().__init__(f"{where}: {detail}")
        self.where = where


def check(schedule: Schedule) -> Schedule:
    """The schedule, if its names are consistent. Raises ScheduleError."""
    settings = schedule.settings
    workers = [spec.name for spec in settings.workers]
    routers = [f"r{index}" for index in range(settings.routers)]
    asks = [ask.name for ask in schedule.asks]
    if not workers or not routers:
        raise ScheduleError("settings", "at least one worker and one router are needed")
    names = [*workers, *routers, *asks, "ingress", "catalog", "object"]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ScheduleError("names", f"{', '.join(twice)}: given twice, or to two kinds of thing")
    for spec in settings.workers:
        if min(spec.lanes, spec.pages, spec.page_tokens, spec.control_tasks) < 1 or 256 % spec.page_tokens:
            raise ScheduleError(f"worker {spec.name}", "lanes, pages and tasks are at least 1; pages divide 256 tokens")
    for ask in schedule.asks:
        if ask.shared < 0 or ask.own < 0 or ask.shared + ask.own < 1 or ask.budget < 1:
            raise ScheduleError(f"ask {ask.name}", "a prompt has at least one token, and so has a budget")
        if ask.length > ask.budget or not 0 <= ask.router < settings.routers or ask.at_ms < 0 or ask.deadline_ms < 1:
            raise ScheduleError(f"ask {ask.name}", "length is within the budget, the router exists, times are positive")
    for index, fault in enumerate(schedule.faults):
        where = f"faults[{index}] ({fault.do.value})"
        for name, allowed in _NAMES.get(fault.do, {}).items():
            value = fault.who if name == "who" else fault.whom
            known = {"router": routers, "worker": workers, "ask": asks, "store": [*workers, "object"]}
            known["node"] = [*routers, *workers]
            known["part"] = ["prefill", "decode", "ram", "ssd", "peer", "object"]
            if value not in known[allowed]:
                raise ScheduleError(where, f"{name} is {value!r}: one of {', '.join(known[allowed])}")
        if fault.at_ms < 0 or fault.ms < 0 or (fault.do is Do.JITTER and not fault.pattern):
            raise ScheduleError(where, "times are not negative, and jitter has a pattern of delays")
    return schedule


_NAMES: dict[Do, dict[str, str]] = {
    Do.PARTITION: {"who": "node", "whom": "node"},
    Do.JITTER: {"who": "node", "whom": "node"},
    Do.REPEAT: {"who": "node", "whom": "node"},
    Do.LOSE_TUNNEL: {"who": "router", "whom": "worker"},
    Do.LOSE_ATTACH: {"who": "router"},
    Do.RETIRE: {"who": "router", "whom": "worker"},
    Do.CRASH: {"who": "node"},
    Do.DRAIN: {"who": "worker"},
    Do.MUTE: {"who": "worker", "whom": "router"},
    Do.STALE: {"who": "worker", "whom": "router"},
    Do.SLOW: {"who": "worker", "whom": "part"},
    Do.VANISH: {"who": "store"},
    Do.CORRUPT: {"who": "store"},
    Do.CANCEL: {"who": "ask"},
    Do.CANCEL_BY_ID: {"who": "ask", "whom": "router"},
    Do.RESUBMIT: {"who": "ask"},
    Do.DEVICE_ERROR: {"who": "worker"},
    Do.PRESSURE: {"who": "worker"},
    Do.RELABEL: {"who": "worker"},
    Do.MISPLAN: {"who": "router"},
    Do.STRAY_TIMER: {"who": "router"},
    Do.STRAY_PLAN: {"who": "router"},
    Do.STRAY_CANCEL: {"who": "router"},
    Do.FORGE: {"who": "router"},
    Do.FORGE_OFFER: {"who": "worker"},
    Do.WAKE: {"who": "router"},
}
