"""Where a setting's value comes from, and what a person is told who got one wrong."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ByteSize, Field, SecretStr

from libs.service.settings import ServiceSettings, SettingsError, load


class RouterSettings(ServiceSettings):
    """Ranks and offers."""

    service: ClassVar[str] = "router"

    attempts: int = Field(3, ge=1, le=10, description="Attempts per request, a count")
    models: tuple[str, ...] = Field((), description="Names of models served")
    budget_bytes: ByteSize = Field(ByteSize(1 << 20), description="Most memory, bytes")
    api_key: SecretStr = Field(SecretStr("default-secret"), description="Key of the upstream")
    eager: bool = Field(False, description="Do it at once")


def refused(argv: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load(RouterSettings, argv, environ)
    assert all("\n" not in problem for problem in caught.value.problems)
    return str(caught.value)


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.sets(st.sampled_from(["flag", "own variable", "shared variable", "own key", "shared key"])))
def test_precedence_for_every_subset_of_places(tmp_path: Path, places: set[str]) -> None:
    order = [("flag", 11.0), ("own variable", 12.0), ("shared variable", 13.0), ("own key", 14.0), ("shared key", 15.0)]
    values = dict(order)
    file = tmp_path / "segue.toml"
    top = f"shutdown_grace_s = {values['shared key']}\n" if "shared key" in places else ""
    own = f"shutdown_grace_s = {values['own key']}\n" if "own key" in places else ""
    file.write_text(f"{top}[router]\n{own}[worker]\nshutdown_grace_s = 99.0\nanything = 1\n")
    environ = {"SEGUE_CONFIG": str(file), "SEGUE_WORKER_SHUTDOWN_GRACE_S": "98"}
    if "own variable" in places:
        environ["SEGUE_ROUTER_SHUTDOWN_GRACE_S"] = str(values["own variable"])
    if "shared variable" in places:
        environ["SEGUE_SHUTDOWN_GRACE_S"] = str(values["shared variable"])
    argv = [f"--shutdown-grace-s={values['flag']}"] if "flag" in places else []
    expected = next((value for place, value in order if place in places), 30.0)
    assert load(RouterSettings, argv, environ).shutdown_grace_s == expected


def test_config_flag_wins_over_its_variable(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[router]\nattempts = 5\n")
    (tmp_path / "b.toml").write_text("[router]\nattempts = 6\n")
    environ = {"SEGUE_CONFIG": str(tmp_path / "b.toml")}
    assert load(RouterSettings, ["--config", str(tmp_path / "a.toml")], environ).attempts == 5


def test_types_from_text() -> None:
    environ = {"SEGUE_ROUTER_MODELS": "a, b", "SEGUE_ROUTER_BUDGET_BYTES": "2GiB", "SEGUE_ROUTER_EAGER": "yes"}
    read = load(RouterSettings, [], environ)
    assert (read.models, read.budget_bytes, read.eager) == (("a", "b"), 2 << 30, True)
    read = load(RouterSettings, ["--models=a,b", "--models", "c", "--no-eager"], environ)
    assert (read.models, read.eager) == (("a", "b", "c"), False)


def test_empty_variable_counts_as_unset() -> None:
    assert load(RouterSettings, [], {"SEGUE_ROUTER_ATTEMPTS": "", "SEGUE_OTLP_ENDPOINT": ""}).attempts == 3


def test_a_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGUE_ROUTER_ATTEMPTS", "9")
    monkeypatch.setenv("ATTEMPTS", "8")
    assert RouterSettings().attempts == 3


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--attempts=0"], {}, ["--attempts=0", "greater than or equal to 1", "Attempts per request"]),
        ([], {"SEGUE_ROUTER_ATTEMPTS": "many"}, ["SEGUE_ROUTER_ATTEMPTS=many", "integer"]),
        (["--listen=7000"], {}, ["--listen=7000", "HOST:PORT"]),
        (["--listen=h:70000"], {}, ["--listen=h:70000", "HOST:PORT"]),
        (["--log-level=loud"], {}, ["--log-level=loud", "'warning'"]),
        (["--atempts=1"], {}, ["--atempts=1", "--help"]),
        (["--attempt=1"], {}, ["--attempt=1"]),
        (["stray"], {}, ["stray"]),
        (["--attempts"], {}, ["--attempts", "expected one argument"]),
        ([], {"SEGUE_ROUTER_ATEMPTS": "1"}, ["SEGUE_ROUTER_ATEMPTS", "did you mean SEGUE_ROUTER_ATTEMPTS?"]),
        ([], {"SEGUE_ROUTER_WHATEVER": "1"}, ["SEGUE_ROUTER_WHATEVER", "unknown setting"]),
        ([], {"SEGUE_LOG_LEVLE": "1"}, ["SEGUE_LOG_LEVLE", "did you mean SEGUE_LOG_LEVEL?"]),
        (["--tls-cert-file=a.pem"], {}, ["tls_cert_file is set without tls_key_file"]),
        (["--tls-ca-file=a.pem"], {}, ["set all three"]),
        (["--api-key=x"], {}, ["--api-key=x"]),
    ],
)
def test_what_is_refused_and_how(argv: list[str], environ: dict[str, str], says: list[str]) -> None:
    text = refused(argv, environ)
    assert text.startswith("segue router: ")
    for part in says:
        assert part in text
    assert "pydantic" not in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[router]\natempts = 1\n", ["atempts", "did you mean attempts?"]),
        ("attempts = 1\n", ["attempts", "at the top"]),
        ("[rooter]\nattempts = 1\n", ["rooter", "did you mean router?"]),
        ("[router]\nattempts = [1]\n", ["router.attempts=[1]", "integer"]),
        ("router = 1\n", ["must be a table"]),
        ("[router\n", ["not valid TOML"]),
    ],
)
def test_a_file_with_a_mistake(tmp_path: Path, content: str, says: list[str]) -> None:
    file = tmp_path / "segue.toml"
    file.write_text(content)
    text = refused([], {"SEGUE_CONFIG": str(file)})
    for part in (str(file), *says):
        assert part in text


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read" in refused(["--config", str(tmp_path / "none.toml")], {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused(["--config", str(tmp_path / "bytes.toml")], {})


def test_several_mistakes_are_all_told() -> None:
    assert refused(["--attempts=0", "--listen=x"], {}).count("\n") == 1


def test_variables_kubernetes_adds_for_a_service_are_not_settings() -> None:
    links = {
        "SEGUE_ROUTER_SERVICE_HOST": "10.0.0.1",
        "SEGUE_ROUTER_SERVICE_PORT": "7000",
        "SEGUE_ROUTER_SERVICE_PORT_GRPC": "7000",
        "SEGUE_ROUTER_PORT": "tcp://10.0.0.1:7000",
        "SEGUE_ROUTER_PORT_7000_TCP": "tcp://10.0.0.1:7000",
        "SEGUE_ROUTER_PORT_7000_TCP_ADDR": "10.0.0.1",
    }
    assert load(RouterSettings, [], links) == RouterSettings()


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "segue.toml"
    file.write_text("[router]\napi_key = 41414141\n")
    assert "41414141" not in refused([], {"SEGUE_CONFIG": str(file)})
    assert "hunter2" not in repr(load(RouterSettings, [], {"SEGUE_ROUTER_API_KEY": "hunter2"}))


def test_help_shows_every_setting_with_variable_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(RouterSettings, ["--help"], {"SEGUE_ROUTER_ATTEMPTS": "wrong, but help helps"})
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, info in RouterSettings.model_fields.items():
        assert f"SEGUE_ROUTER_{name.upper()}" in shown
        assert str(info.description) in shown
    assert "--no-eager" in shown
    assert "default: 64.0MiB" in shown
    assert "default-secret" not in shown


def test_a_setting_without_description_is_refused() -> None:
    with pytest.raises(TypeError, match="without a description: mute"):

        class Mute(ServiceSettings):
            mute: int = 1
