"""Rewrite `requirements.lock`: resolve `.[dev]` afresh in an empty venv and freeze it.

The lock is a constraints file, so that each service installs only its own extra at the same exact versions.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCAL_BUILD = re.compile(r"\+[a-z0-9.]+$")


def main() -> int:
    """Entry point."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        pip = [str(Path(scratch) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", f"{ROOT}[dev]"], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout.splitlines()
    # A `+cpu` build tag would tie the lock to one platform's wheel.
    pins = [LOCAL_BUILD.sub("", line) for line in frozen if not line.startswith("segue")]
    (ROOT / "requirements.lock").write_text("\n".join(pins) + "\n")
    print(f"{len(pins)} versions locked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
