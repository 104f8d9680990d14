"""API keys, tenants and salts."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.continuation.errors import IdentityError
from libs.continuation.tenancy import salt
from libs.service.errors import StartError
from services.ingress.errors import ApiError
from services.ingress.tenants import Tenants, read_keys

SECRET = bytes(range(32))


def test_without_keys_everybody_is_default() -> None:
    tenants = Tenants(SECRET, None)
    for header in (None, "", "Bearer anything", "Basic eA=="):
        assert tenants.of(header).id == "default"
        assert tenants.of(header).salt == salt("default", SECRET)


def test_keys_rotate_and_tenants_stay() -> None:
    tenants = Tenants(SECRET, {"old": "alice", "new": "alice", "b": "bob"})
    assert tenants.of("Bearer old") == tenants.of("bearer  new")
    assert tenants.of("Bearer b").salt != tenants.of("Bearer old").salt
    for header in (None, "", "old", "Basic old", "Bearer", "Bearer ol", "Bearer old2"):
        with pytest.raises(ApiError) as error:
            tenants.of(header)
        assert error.value.status == 401


def test_a_salt_shows_nowhere() -> None:
    tenant = Tenants(SECRET, None).of(None)
    assert tenant.salt not in repr(tenant)


def test_short_secrets_are_refused() -> None:
    with pytest.raises(IdentityError):
        Tenants(b"short", None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", '"sk-1" = "alice"'),
        ("b.toml", '[keys]\nsk-1 = "alice"'),
        ("c.json", '{"sk-1": "alice"}'),
        ("d.json", '{"keys": {"sk-1": "alice"}}'),
    ],
)
def test_forms_of_a_keys_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_keys(tmp_path / name) == {"sk-1": "alice"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "sk-1"),
        ("b.json", "{"),
        ("c.json", "[]"),
        ("d.json", '{"sk-1": ""}'),
        ("e.json", '{"sk-1": 3}'),
        ("f.toml", ""),
    ],
)
def test_bad_keys_files_are_told_without_the_keys(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StartError) as error:
        read_keys(tmp_path / name)
    assert "sk-1" not in str(error.value)


def test_a_missing_keys_file(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot be read"):
        read_keys(tmp_path / "nowhere.toml")
