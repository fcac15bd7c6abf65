"""The gallery's pages are those of its scripts, and the scripts and the notebooks run and hold what they assert."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardpass.cli.launch import launcher_environment

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def make_gallery() -> Any:
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "docs" / "make_gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GALLERY = make_gallery()


@pytest.mark.parametrize("name", GALLERY.ORDER)
def test_a_page_has_the_prose_and_code_of_its_script(name: str) -> None:
    page = (GALLERY.PAGES / f"{name}.md").read_text(encoding="utf-8")
    script = GALLERY.SCRIPTS / f"{name}.py"
    assert GALLERY.without_outputs(page) == GALLERY.page_of(script), (
        f"run python docs/make_gallery.py {name}; with --prose, if its code is as it was"
    )
    (plot,) = re.findall(r"!\[.{30,}\]\((.*)\)", page)
    assert GALLERY.DARK in (GALLERY.PAGES / plot).read_text(encoding="utf-8")
    assert "## Largest size tested" in page


def test_the_index_and_the_site_have_every_page() -> None:
    assert (GALLERY.PAGES / "index.md").read_text(encoding="utf-8") == GALLERY.index(), (
        "python docs/make_gallery.py --prose"
    )
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [name for name in (*GALLERY.ORDER, "index") if f"gallery/{name}.md" not in navigation]


@pytest.mark.long
@pytest.mark.parametrize("name", GALLERY.ORDER)
def test_a_script_runs_alone_and_what_it_claims_holds(name: str, tmp_path: Path) -> None:
    """The claims are assertions in the scripts: exact, within a memory limit, better than chance."""
    for module in ("torch_geometric", "sklearn", "matplotlib", "kaminpar"):
        pytest.importorskip(module)
    if name == "moving_from_dgl":
        pytest.importorskip("dgl")
    if name == "inference_own_ids":
        pytest.importorskip("duckdb")
    script = GALLERY.SCRIPTS / f"{name}.py"
    if "from limited import" in script.read_text(encoding="utf-8") and sys.platform != "linux":
        pytest.skip("only Linux enforces the limit of memory")
    ended = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path, env={**launcher_environment(), "MPLBACKEND": "Agg"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / f"{name}.svg").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own; the plot of the loss was updated while the ranks trained."""
    pytest.importorskip("dgl" if path.stem == "dgl" else "torch_geometric")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    updates = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            updates.extend([msg["msg_type"]] * (msg["msg_type"] == "update_display_data"))
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.read(path, as_version=4)
    Client(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    accuracy = re.search(r"test accuracy ([0-9.]+)", text)
    assert accuracy and float(accuracy[1]) > 0.95, text
    assert len(updates) >= 5 and any("image/png" in output.get("data", {}) for output in outputs)
