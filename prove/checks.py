"""A claim of several parts: each is a check, the claim passes if all do."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import JsonValue

from prove.report import Outcome


@dataclass
class Checks:
    """Checks in the order they were made."""

    made: list[dict[str, JsonValue]] = field(default_factory=list)

    def check(self, name: str, figure: JsonValue, limit: JsonValue, passed: bool) -> bool:
        """Notes a verdict and hands it back. `figure`: what was found; `limit`: what it was held against."""
        self.made.append({"name": name, "figure": figure, "limit": limit, "pass": passed})
        return passed

    def equal(self, name: str, figure: JsonValue, limit: JsonValue) -> bool:
        """A check for equality."""
        return self.check(name, figure, limit, figure == limit)

    @property
    def failed(self) -> list[dict[str, JsonValue]]:
        return [one for one in self.made if not one["pass"]]

    def outcome(self, details: dict[str, JsonValue] | None = None) -> Outcome:
        """Passed if there was at least one check and none failed."""
        good = len(self.made) - len(self.failed)
        figure: JsonValue = {"passed": good, "of": len(self.made), "failed": [one["name"] for one in self.failed]}
        passed = bool(self.made) and not self.failed
        return Outcome(figure, "every check", passed, {"checks": list(self.made)} | (details or {}))
