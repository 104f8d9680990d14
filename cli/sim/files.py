"""Schedules on disk: the named scenarios that come with Segue, and files of one's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from libs.simulation.schedule import Schedule, ScheduleError
from libs.simulation.strict import parse, render


def scenarios() -> dict[str, str]:
    """The text of every named scenario, by name."""
    folder = resources.files("libs.simulation") / "scenarios"
    found = {entry.name[: -len(".json")]: entry for entry in folder.iterdir() if entry.name.endswith(".json")}
    return {name: found[name].read_text() for name in sorted(found)}


def load(wanted: str) -> Schedule:
    """A scenario by name, or a file. Raises ScheduleError, whose text says what to do."""
    known = scenarios()
    if wanted in known:
        return parse(known[wanted])
    path = Path(wanted)
    if not path.is_file():
        raise ScheduleError(wanted, f"is no file and no scenario; the scenarios are {', '.join(known)}")
    try:
        return parse(path.read_text())
    except ScheduleError as error:
        raise ScheduleError(wanted, str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(wanted, f"cannot be read: {error}") from error


def save(schedule: Schedule, folder: Path) -> Path:
    """Writes a schedule under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{schedule.name}.json"
    path.write_text(render(schedule))
    return path
