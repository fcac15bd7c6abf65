"""Builds the documentation site, for the tests that look at it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build_site(folder: Path) -> Path:
    """The folder of the site, built below `folder` from a copy of the pages."""
    pytest.importorskip("zensical", reason="the site is built by zensical, which needs Python 3.11")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    words = [sys.executable, "-m", "zensical", "build", "--strict"]
    found = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=480, env=found, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
