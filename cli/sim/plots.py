"""The picture of one cell: how times to first token are distributed, and each worker's work over time."""

from __future__ import annotations

from pathlib import Path

from libs.simulation.traces.recorded import read, scaled
from libs.simulation.traces.replay import Setting, loaded, run
from libs.simulation.traces.suite import Wanted

_BINS = 60


def draw(wanted: Wanted, path: Path) -> None:
    """The first tier set, the last load up to 0.85 and the first error of what is wanted, one seed, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    tiers, error = wanted.tiers[0], wanted.errors[0]
    rho = max((one for one in wanted.rhos if one <= 0.85), default=wanted.rhos[0])
    rows = read(wanted.trace, wanted.limit)
    rows = scaled(rows, loaded(rows, rho, tiers, wanted.workers))
    count = len(wanted.policies)
    figure, axes = pyplot.subplots(count + 1, 1, figsize=(9, 3 + 1.6 * count), layout="constrained")
    begin, end = rows[0].at_ms, rows[-1].at_ms
    width = max(1.0, (end - begin) / _BINS)
    for name, axis in zip(wanted.policies, axes[1:], strict=True):
        found = run(rows, Setting(name, tiers, error, 0, wanted.workers))
        ordered = sorted(found.ttft_ms)
        axes[0].plot(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], label=name)
        work = [[0.0] * (_BINS + 1) for _ in range(wanted.workers)]
        for when, worker, begun in found.timeline:
            work[worker][min(_BINS, int((when - begin) / width))] += begun / width
        axis.imshow(work, aspect="auto", interpolation="nearest", vmin=0.0, vmax=2.0, cmap="viridis")
        axis.set_ylabel(name, fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_xscale("log")
    axes[0].set_xlabel("time to first token, ms")
    axes[0].set_ylabel("share of requests")
    axes[0].legend(fontsize=8)
    axes[0].set_title(f"{wanted.trace.name}: {tiers.value}, load {rho}, {error.value} error", fontsize=9)
    axes[-1].set_xlabel("time; each row a worker, brighter = more work begun")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
