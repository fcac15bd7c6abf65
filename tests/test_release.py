"""What `make release` finds before a release, and that a released wheel works for whoever has the index alone."""

import hashlib
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from shardpass.cli.launch import launcher_environment
from tests.release import ROOT, archives_that_differ, checkout_wanted, days_that_differ, versions_that_differ

FILES = {
    "shardpass/__init__.py": '__version__ = "1.2.0"\n',
    "pyproject.toml": 'version = "1.2.0"\n',
    "CITATION.cff": "version: 1.2.0\ndate-released: 2026-11-29\n",
    "CHANGELOG.md": "## [Unreleased]\n\n## [1.2.0] - 2026-11-29\n\nNew.\n",
    "README.md": "pip install 'shardpass[all]'\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a release in which all agrees."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("pyproject.toml", "1.2.0", "1.1.0", "pyproject.toml has version 1.1.0, and shardpass/__init__.py has 1.2.0"),
        ("CITATION.cff", "version: 1.2.0", "", "CITATION.cff has version none"),
        ("CITATION.cff", "-29", "-28", "date-released 2026-11-28, and CHANGELOG.md 2026-11-29"),
        ("CITATION.cff", "date-released", "date", "date-released nowhere"),
        ("CHANGELOG.md", "]\n\n## [1", "]\n\nMore.\n\n## [1", "CHANGELOG.md has changes under [Unreleased]"),
        ("CHANGELOG.md", "[1.2.0]", "[1.1.0]", "is `[1.1.0] - 2026-11-29`: expected one like `## [1.2.0] - "),
        ("CHANGELOG.md", "11-29", "11-31", "is `[1.2.0] - 2026-11-31`: expected one like"),
        ("CHANGELOG.md", "## [1.2.0] - 2026-11-29\n\nNew.\n", "", "is `none`: expected one like"),
        ("README.md", "shardpass[", ".[", "README.md, line 1, needs a checkout: write shardpass[all]"),
    ],
)
def test_what_does_not_agree_is_said(root: Path, name: str, old: str, new: str, said: str) -> None:
    def wrong() -> list[str]:
        return [*versions_that_differ(root), *days_that_differ(root), *checkout_wanted(root)]

    assert wrong() == []
    assert old in FILES[name]
    (root / name).write_text(FILES[name].replace(old, new))
    (sentence,) = wrong()
    assert said in sentence


def test_archives_hold_the_package(root: Path) -> None:
    dist = root / "dist"
    dist.mkdir()
    (dist / "shardpass-1.2.0.tar.gz").touch()
    assert "expected shardpass-1.2.0-py3-none-any.whl and" in archives_that_differ(root, dist)[0]
    with zipfile.ZipFile(dist / "shardpass-1.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("shardpass/__init__.py", "")
        wheel.writestr("shardpass-1.2.0.dist-info/METADATA", "")
    assert archives_that_differ(root, dist) == []
    (root / "shardpass" / "plan.html").touch()
    assert ["lacks shardpass/plan.html" in said for said in archives_that_differ(root, dist)] == [True]


def test_this_checkout_has_one_version() -> None:
    assert versions_that_differ(ROOT) == []


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The address of a simple index (PEP 503) that has this checkout's wheel alone, and is asked for it."""
    source, folder = tmp_path / "source", tmp_path / "served" / "simple" / "shardpass"
    shutil.copytree(ROOT / "shardpass", source / "shardpass", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source]
    subprocess.run(wheel, check=True)
    (built,) = folder.glob("*.whl")
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{built.name}#sha256={digest}">{built.name}</a>')
    asked: list[str] = []

    class Server(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(tmp_path / "served"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
    assert f"/simple/shardpass/{built.name}" in asked


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.processes
@pytest.mark.parametrize("versions", ["constraints-oldest.txt", "constraints.txt", "/dev/null"])
def test_the_readme_works_from_an_index(versions: str, index: str, tmp_path: Path) -> None:
    """With the oldest, the pinned and the newest versions, but of torch: the build that is here, and no other."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^pip install '(?:\.|shardpass)(\[.*\])'$", text, re.M)
    code = re.search(r"^```python\n(.*?)^```$", text, re.M | re.S)
    shell = re.search(r"^```console\n(shardpass partition .*?)^```$", text, re.M | re.S)
    assert command and code and shell
    kept = [line for line in (ROOT / versions).read_text().splitlines() if not line.startswith(("torch==", "triton=="))]
    (tmp_path / "constraints.txt").write_text("\n".join([*kept, f"torch=={torch.__version__}"]))
    (tmp_path / "empty").mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    own = {"PATH": f"{programs}:/usr/bin:/bin", "PIP_CONSTRAINT": str(tmp_path / "constraints.txt"), "COLUMNS": "120"}
    env = {name: value for name, value in launcher_environment().items() if name != "PYTHONPATH"} | own

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path / "empty", env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    run("pip", "install", "--quiet", "--extra-index-url", index, f"torch=={torch.__version__}")
    run("pip", "install", "--quiet", "--extra-index-url", index, f"shardpass{command[1]}")
    assert str(tmp_path / "venv") in run("python", "-c", "import shardpass; print(shardpass.__file__)")
    run("python", "-c", code[1])
    assert "loss" in run("bash", "-euxo", "pipefail", "-c", shell[1])
