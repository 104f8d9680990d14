"""The contracts: generated code is current, and the reason for not using the etcd3 package still holds."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "tools" / "protos.py"), "--check"], capture_output=True, text=True, timeout=60
    )


def test_generated_code_is_current() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_proto_is_noticed(tmp_path: Path) -> None:
    for name in ("protos", "libs/contracts", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    planted = tmp_path / "protos" / "segue" / "v1" / "tunnel.proto"
    planted.write_text(planted.read_text().replace("bytes payload = 2;", "bytes payload = 3;"))
    done = check(tmp_path)
    assert done.returncode == 1
    assert "tunnel_pb2.py" in done.stdout


def test_a_breaking_change_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    planted = tmp_path / "protos" / "segue" / "v1" / "tunnel.proto"
    planted.write_text(planted.read_text().replace("bytes payload = 2;", "bytes payload = 3;"))
    buf = Path(sys.executable).parent / "buf"
    same = subprocess.run([buf, "breaking", "--against", str(ROOT)], cwd=ROOT, capture_output=True, text=True)
    assert same.returncode == 0, same.stdout + same.stderr
    broken = subprocess.run([buf, "breaking", "--against", str(ROOT)], cwd=tmp_path, capture_output=True, text=True)
    assert broken.returncode != 0
    assert "Item" in broken.stdout


def test_the_etcd3_package_still_cannot_be_imported() -> None:
    """docs/decisions/0001: when this fails, the decision's reason is gone and it should be looked at again."""
    done = subprocess.run([sys.executable, "-c", "import etcd3"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Descriptors cannot be created directly" in done.stderr
