"""Hold the contracts against the last tagged version: `buf breaking`.

Before the first tag there is nothing to break, and in a shallow clone there may be no tag; both are said, not hidden.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Entry point."""
    tags = subprocess.run(
        ["git", "tag", "--list", "v*", "--sort=-v:refname"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tags:
        print("buf breaking: no tagged version here to compare with")
        return 0
    buf = Path(sys.executable).parent / "buf"
    return subprocess.run([buf, "breaking", "--against", f".git#tag={tags[0]}"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
