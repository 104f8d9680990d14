"""Models for the embedded cluster: made ready once, in a child process, with progress."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction that is done."""

# A conversion takes a minute or two on two cores; a hub download may take far longer.
_PREPARE_WITHIN_S = 3_600.0


class ModelUnavailableError(RuntimeError):
    """A model cannot be had; the text carries the value and the remedy."""


def default_cache() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/segue/models`, shared by every state directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segue" / "models"


def served_name(model: str) -> str:
    """What clients call a model: a built-in name or hub id as it is, a path by its last part without `.gguf`."""
    if "/" in model or model.endswith(".gguf"):
        path = Path(model).expanduser()
        if path.exists() or model.startswith((".", "~", "/")):
            return path.resolve().name.removesuffix(".gguf")
    return model


async def prepare(model: str, cache: Path, progress: Progress) -> Path:
    """The folder to load `model` from. Raises ModelUnavailableError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.worker.model.prepare", "--model", model, "--cache-dir", str(cache)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    folder, error = None, ""
    try:
        async with asyncio.timeout(_PREPARE_WITHIN_S):
            noise = asyncio.ensure_future(process.stderr.read())
            async for line in process.stdout:
                said = json.loads(line)
                if "doing" in said:
                    progress(str(said["doing"]), float(said["fraction"]))
                folder, error = said.get("folder", folder), said.get("error", error)
            await process.wait()
            error = error or (await noise).decode(errors="replace").strip().rpartition("\n")[2]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if folder is None:
        raise ModelUnavailableError(error or f"model {model!r}: preparing it ended with {process.returncode}")
    return Path(folder)
