"""Claims that run suites: what failed, was skipped or is missing keeps them from passing."""

from __future__ import annotations

from prove.checks import Checks
from prove.suites import counted, judge

REPORT = """<testsuites><testsuite>
<testcase classname="tests.chunks.test_conformance" name="test_a[memory]"/>
<testcase classname="tests.chunks.test_conformance" name="test_a[peer]"/>
{more}
</testsuite></testsuites>"""


def failed(more: str, least: int = 2) -> list[str]:
    checks = Checks()
    judge(checks, counted(REPORT.format(more=more)), least)
    return [str(one["name"]) for one in checks.failed]


def test_a_suite_passes_only_whole() -> None:
    assert failed("") == []
    assert failed("", least=3) == ["tests passed"]
    assert failed('<testcase classname="x" name="b"><failure/></testcase>') == ["tests failed"]
    assert failed('<testcase classname="x" name="b"><error/></testcase>') == ["tests failed"]
    assert failed('<testcase classname="x" name="b"><skipped/></testcase>') == ["tests skipped (unsupported here)"]


def test_names_are_counted_by_their_words() -> None:
    ran = counted(REPORT.format(more=""))
    assert ran.passed == ["test_conformance::test_a[memory]", "test_conformance::test_a[peer]"]
    assert ran.count("test_a") == 2 and ran.count("test_a", "[peer") == 1
