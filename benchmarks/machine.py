"""Where the figures of a report come from, and where reports go. It needs nothing but what is measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch_geometric

import shardpass as sp

REPORTS = Path(__file__).resolve().parent / "reports"


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    system = " ".join((platform.system(), *platform.libc_ver()))
    return {
        "cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**20, 1), "system": system,
        "python": platform.python_version(), "torch": torch.__version__, "torch_geometric": torch_geometric.__version__,
        "shardpass": f"{sp.__version__} ({revision()})",
    }  # fmt: skip


def revision() -> str:
    """The commit that was measured, marked where files differ from it."""
    git = ["git", "-C", str(REPORTS.parent), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "no git checkout"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
