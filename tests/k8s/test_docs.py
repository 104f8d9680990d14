"""What the pages tell people to set and to open exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from libs.service.settings import SERVICES, ServiceSettings
from tools.k8s_check import ROOT
from tools.k8s_rules import settings_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_are_settings(page: Path) -> None:
    known = {"SEGUE_CONFIG"}
    for service in SERVICES:
        kind = settings_of(service)
        known |= {kind.variable(name) for name in kind.model_fields} | {f"SEGUE_{name.upper()}" for name in kind.SHARED}
    named = set(re.findall(r"\bSEGUE_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
    assert named <= known


@pytest.mark.parametrize("service", SERVICES)
def test_a_readme_lists_every_setting_of_its_service(service: str) -> None:
    kind = settings_of(service)
    text = (ROOT / "services" / service / "README.md").read_text()
    tables = re.findall(r"^\| setting \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    own = kind.model_fields.keys() - ServiceSettings.model_fields.keys()
    assert own, "a service has some of its own"
    assert own - set(listed) == set(), "missing"
    assert set(listed) <= kind.model_fields.keys()
    assert len(listed) == len(set(listed)), "listed twice"


def test_tuned_settings_exist() -> None:
    seen = set()
    for section in (ROOT / "docs" / "tune.md").read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        kind = ServiceSettings if title == "All services" else settings_of(title.lower())
        for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE):
            names = re.findall(r"`(\w+)`", row)
            assert set(names) <= set(kind.model_fields), f"{title}: {row}"
            seen.add(title)
    assert seen == {"Worker", "Router", "Ingress", "Catalog", "All services"}
