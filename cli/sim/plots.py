"""Pictures: how times to first token are distributed, and each worker's work over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from libs.simulation.fuzz import Run
from libs.simulation.runtime import Span
from libs.simulation.traces.recorded import read, scaled
from libs.simulation.traces.replay import Setting, loaded, run
from libs.simulation.traces.suite import Wanted
from libs.simulation.world import World

_BINS = 60
_PREFILL, _DECODE, _FAULT = "tab:orange", "tab:blue", "tab:red"


def draw(wanted: Wanted, path: Path) -> None:
    """The first tier set, the last load up to 0.85 and the first error of what is wanted, one seed, as a PNG."""
    tiers, error = wanted.tiers[0], wanted.errors[0]
    rho = max((one for one in wanted.rhos if one <= 0.85), default=wanted.rhos[0])
    rows = read(wanted.trace, wanted.limit)
    rows = scaled(rows, loaded(rows, rho, tiers, wanted.workers))
    count = len(wanted.policies)
    figure, axes = _figure([1.5] + [1.0] * count)
    begin, end = rows[0].at_ms, rows[-1].at_ms
    width = max(1.0, (end - begin) / _BINS)
    for name, axis in zip(wanted.policies, axes[1:], strict=True):
        found = run(rows, Setting(name, tiers, error, 0, wanted.workers))
        _shares(axes[0], found.ttft_ms, name)
        work = [[0.0] * (_BINS + 1) for _ in range(wanted.workers)]
        for when, worker, begun in found.timeline:
            work[worker][min(_BINS, int((when - begin) / width))] += begun / width
        axis.imshow(work, aspect="auto", interpolation="nearest", vmin=0.0, vmax=2.0, cmap="viridis")
        axis.set_ylabel(name, fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_xscale("log")
    axes[0].legend(fontsize=8)
    axes[0].set_title(f"{wanted.trace.name}: {tiers.value}, load {rho}, {error.value} error", fontsize=9)
    axes[-1].set_xlabel("time; each row a worker, brighter = more work begun")
    _save(figure, path)


def draw_run(world: World, path: Path) -> None:
    """Of one run, as a PNG: its times to first token; what each worker's lanes did when, and the faults."""
    figure, axes = _figure([1.5] + [0.5 + 0.25 * node.spec.lanes for node in world.workers.values()])
    _shares(axes[0], world.ingress.waits(), "")
    axes[0].set_title(f"{world.schedule.name}: orange prefill, blue decode, red a fault", fontsize=9)
    for (name, node), axis in zip(world.workers.items(), axes[1:], strict=True):
        for lane, spans in enumerate(lanes(node.spans)):
            prefill = [(one.began_ms, one.decodes_ms - one.began_ms) for one in spans]
            decode = [(one.decodes_ms, one.ended_ms - one.decodes_ms) for one in spans]
            axis.broken_barh(prefill, (lane, 0.8), facecolors=_PREFILL)
            axis.broken_barh(decode, (lane, 0.8), facecolors=_DECODE)
        for fault in world.schedule.faults:
            if fault.who == name:
                axis.axvline(fault.at_ms, color=_FAULT, linewidth=0.8, linestyle="--")
        axis.set_ylabel(name, fontsize=8)
        axis.set_yticks([])
        axis.set_xlim(0.0, world.agenda.now)
    axes[-1].set_xlabel("ms; each row a lane")
    _save(figure, path)


def draw_fuzz(runs: Sequence[Run], path: Path) -> None:
    """Of many schedules, as a PNG: all their times to first token, and how many events and faults each had."""
    figure, axes = _figure([1.5, 1.0, 1.0])
    _shares(axes[0], [wait for one in runs for wait in one.ttft_ms], "")
    axes[0].set_xscale("log")
    axes[0].set_title(f"{len(runs)} schedules", fontsize=9)
    for axis, values, label in (
        (axes[1], [one.events for one in runs], "events of a schedule"),
        (axes[2], [one.faults for one in runs], "faults of a schedule"),
    ):
        axis.hist(values, bins=min(_BINS, 1 + max(values) - min(values)))
        axis.set_xlabel(label)
        axis.set_ylabel("schedules", fontsize=8)
    _save(figure, path)


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans on as many rows as run beside each other, each row without overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (one.began_ms, one.ended_ms)):
        free = next((row for row in rows if row[-1].ended_ms <= span.began_ms), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _figure(heights: Sequence[float]) -> tuple[Any, Any]:
    """A figure with one axis above the other, of these heights in proportion."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(heights),
        1,
        figsize=(9, 1.5 + 1.6 * sum(heights)),
        layout="constrained",
        gridspec_kw={"height_ratios": [*heights]},
    )
    return figure, axes


def _shares(axis: Any, ttft_ms: Iterable[float], label: str) -> None:
    ordered = sorted(ttft_ms)
    shares = [place / len(ordered) for place in range(len(ordered) + 1)] if ordered else []
    axis.step([*ordered[:1], *ordered], shares, where="post", label=label)
    axis.set_ylim(0.0, 1.02)
    axis.set_xlabel("time to first token, ms")
    axis.set_ylabel("share of requests")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)
