"""A device without numerics: every slot of every page remembers which prefix was written there.

What a forward pass would read is compared with what should be there. So any mistake of the page pool that would damage
attention state (a page with two owners, a missing copy before a write, a page freed too early) shows as a wrong read.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.controller.protocol import AssignmentId
from services.worker.handlers import GroupPages, JobPages, NodeFill
from services.worker.pages.sizing import GroupSpec, PageSizes

Slot = tuple[str, int, int] | None


def prefix_marks(root: str, tokens: Sequence[int]) -> list[Slot]:
    """One value per position that names the whole prefix up to it."""
    marks: list[Slot] = []
    running = hash(root)
    for position, token in enumerate(tokens):
        running = hash((running, token))
        marks.append((root, position, running))
    return marks


class Device:
    """Slots by (group, page)."""

    def __init__(self, groups: Sequence[GroupSpec], sizes: PageSizes) -> None:
        self.groups, self.sizes = groups, sizes
        self.slots: dict[str, list[list[Slot]]] = {
            group.name: [[None] * sizes.page for _ in range(group.pages)] for group in groups
        }

    def read(self, pages: JobPages, marks: Sequence[Slot], start: int, end: int) -> None:
        """What queries at positions [start, end) attend to before their own rows must be there, in every group."""
        for group in self.groups:
            first = 0 if not group.window else max(0, start - group.window + 1)
            table = pages.tables[group.name]
            for position in range(first, start):
                index, slot = divmod(position, self.sizes.page)
                assert index < len(table) and table[index] >= 0, f"{group.name} has no page for {position} < {start}"
                found = self.slots[group.name][table[index]][slot]
                assert found == marks[position], f"{group.name} at {position} holds {found}, not {marks[position]}"

    def write(self, pages: JobPages, marks: Sequence[Slot], start: int, end: int) -> None:
        """The rows of positions [start, end)."""
        for group in self.groups:
            table = pages.tables[group.name]
            for position in range(start, end):
                index, slot = divmod(position, self.sizes.page)
                self.slots[group.name][table[index]][slot] = marks[position]

    def copy(self, group: str, source: int, target: int, slots: int) -> None:
        """Copy-on-write."""
        self.slots[group][target][:slots] = self.slots[group][source][:slots]

    def load(self, fill: NodeFill, marks: Sequence[Slot]) -> None:
        """A restored node."""
        for part in fill.fills:
            for at, page in enumerate(part.pages):
                for slot in range(self.sizes.page):
                    position = part.start + at * self.sizes.page + slot
                    if position < part.end:
                        self.slots[part.group][page][slot] = marks[position]

    def snapshot(self, part: GroupPages) -> list[Slot]:
        """What a checkpoint would copy of one group."""
        values = [value for page in part.pages for value in self.slots[part.group][page]]
        return values[: part.end - part.start]


def key(number: int) -> AssignmentId:
    """Assignment `number`."""
    return AssignmentId(f"r{number}", 1)
