"""The judge of hostile frames, on ends that forgot one check each; the claim's slice holds it against honest ones."""

from __future__ import annotations

import pytest

from prove.p5_frames import PLANTED, planted, quiet


@pytest.mark.parametrize("name", ["the checksum", "the limits", "the delta's index"])
async def test_an_end_that_forgot_a_check_is_noticed(name: str) -> None:
    assert name in PLANTED
    with quiet():
        found = await planted(name)
    assert any("counted otherwise" in check or "left standing" in check for check in found), found
