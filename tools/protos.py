"""Generate `libs/contracts` from `protos/`, or check that it is current.

`protoc` writes `from segue.v1 import …`; the code lives under `libs.contracts`, so the imports are rewritten, in `.py`
and `.pyi` alike. Run as `python tools/protos.py` (write) or `python tools/protos.py --check` (exit 1 when stale).
"""

import filecmp
import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
CONTRACTS = ROOT / "libs" / "contracts"
IMPORT = re.compile(r"^from segue\.v1 import", re.MULTILINE)


def generate(out: Path) -> None:
    """Write the generated packages under `out`."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{include}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *files,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    for path in sorted([*out.rglob("*.py"), *out.rglob("*.pyi")]):
        path.write_text(IMPORT.sub("from libs.contracts.segue.v1 import", path.read_text()))
    for package in (out, out / "segue", out / "segue" / "v1"):
        (package / "__init__.py").write_text("")


def stale(fresh: Path, current: Path) -> list[str]:
    """Relative paths that differ between the two trees, either way."""
    names = {p.relative_to(fresh) for p in fresh.rglob("*.py*")}
    names |= {p.relative_to(current) for p in current.rglob("*.py*") if "__pycache__" not in p.parts}
    return sorted(
        str(name)
        for name in names
        if not (fresh / name).is_file()
        or not (current / name).is_file()
        or not filecmp.cmp(fresh / name, current / name, shallow=False)
    )


def main() -> int:
    """Entry point."""
    if "--check" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            generate(Path(scratch))
            differing = stale(Path(scratch), CONTRACTS)
        if differing:
            print("stale, run `make protos`:", *differing, sep="\n  ")
            return 1
        return 0
    CONTRACTS.mkdir(parents=True, exist_ok=True)
    generate(CONTRACTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
