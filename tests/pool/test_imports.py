"""What the pool may know: libs.tunnel at its shell, nothing of its user; the core neither loop, clock nor chance."""

import ast
from pathlib import Path

POOL = Path(__file__).resolve().parents[2] / "libs/pool"
SHELL = {"pool.py", "dialling.py", "guard.py", "hooks.py", "tuning.py"}
IMPURE = {"asyncio", "time", "random", "socket", "threading", "os", "logging", "secrets"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def test_the_pool_knows_nothing_of_its_user() -> None:
    for path in POOL.glob("*.py"):
        for name in imports(path):
            assert not name.startswith(("libs.controller", "libs.continuation", "libs.contracts", "services", "grpc"))


def test_the_core_is_pure() -> None:
    core = [path for path in POOL.glob("*.py") if path.name not in SHELL]
    assert len(core) > 20
    for path in core:
        names = imports(path)
        assert not names & IMPURE, path.name
        assert not [name for name in names if name.startswith("libs.")], path.name
        assert not {f".{shell.removesuffix('.py')}" for shell in SHELL} & names, path.name
