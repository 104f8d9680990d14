"""Dockerfiles hold what the manifests and the services count on. Read here, not built: that takes an engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from libs.service.settings import SERVICES
from tools.k8s_check import ROOT
from tools.k8s_rules import settings_of


def lines(service: str) -> list[str]:
    """Instructions, continuations joined, comments left out."""
    text = (ROOT / "services" / service / "Dockerfile").read_text()
    kept = [line for line in text.splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(kept).replace("\\\n", " ").splitlines() if line]


def of(service: str, instruction: str) -> list[str]:
    return [line.partition(" ")[2] for line in lines(service) if line.startswith(instruction + " ")]


@pytest.mark.parametrize("service", SERVICES)
class TestImage:
    def test_runs_as_nobody_with_python_as_its_first_process(self, service: str) -> None:
        assert of(service, "USER") == ["65532:65532"]
        # The exec form: a shell as process 1 would keep SIGTERM to itself.
        assert of(service, "ENTRYPOINT") == [f'["python", "-m", "services.{service}"]']
        assert of(service, "HEALTHCHECK") == ["NONE"]
        assert not of(service, "CMD")

    def test_installs_this_services_extra_at_locked_versions(self, service: str) -> None:
        runs = " ".join(of(service, "RUN"))
        assert re.findall(r"optional-dependencies'\]\['(\w+)'\]", runs) == [service]
        installs = re.findall(r"pip install (?:(?!;|&&).)*", runs)
        assert installs
        assert all("-c requirements.lock" in one or "--no-deps ." in one for one in installs), installs

    def test_copies_its_own_code_only_and_nothing_that_is_ignored(self, service: str) -> None:
        sources = [part for line in of(service, "COPY") for part in line.split()[:-1] if not part.startswith("--from")]
        sources = [source for source in sources if not source.startswith("/venv")]
        let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        assert [one for one in sources if one.startswith("services/")] == [
            "services/__init__.py",
            f"services/{service}",
        ]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert Path(source).parts[0] in let_in, source

    def test_variables_are_settings(self, service: str) -> None:
        kind = settings_of(service)
        known = {kind.variable(name) for name in kind.model_fields} | {f"SEGUE_{name.upper()}" for name in kind.SHARED}
        named = re.findall(r"(SEGUE_\w+)=", " ".join(of(service, "ENV")))
        assert named
        assert set(named) <= known


def test_all_stand_on_one_base() -> None:
    assert {base.split()[0] for service in SERVICES for base in of(service, "FROM")} == {"python:3.11-slim"}


def test_only_the_worker_brings_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    with_torch = {
        service for service in SERVICES if any(re.match("torch|transformers", one) for one in extras[service])
    }
    assert with_torch == {"worker"}
    assert {service for service in SERVICES if "torch" in " ".join(of(service, "RUN"))} == {"worker"}
