"""Make a model ready to load, in a process of its own.

`python -m services.worker.model.prepare --model X --cache-dir D` prints JSON lines: {"doing", "fraction"} while it
works, then {"folder"} or {"error"}. The caller needs neither torch nor the time its import takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from services.worker.model.errors import ModelError
from services.worker.model.source import resolve


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Entry point: exit status 1 when the model cannot be had."""
    parser = argparse.ArgumentParser(description="Make a model ready to load.")
    parser.add_argument("--model", required=True, help="a built-in name, a folder, a .gguf file or a hub id")
    parser.add_argument("--cache-dir", required=True, type=Path, help="where converted models are kept")
    given = parser.parse_args()
    try:
        folder = resolve(given.model, given.cache_dir, lambda doing, fraction: _say(doing=doing, fraction=fraction))
    except ModelError as error:
        _say(error=str(error))
        return 1
    _say(folder=str(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
