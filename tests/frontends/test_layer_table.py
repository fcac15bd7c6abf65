"""docs/layer-table.md names every class, and says how each is computed. What it says is what they do."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "layer-table.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")[1:]}


def rows_of(section: str, version: str) -> list[str]:
    """The rows of a table, whose versions are those that are installed."""
    if not re.search(rf"^{section} {re.escape(version)}[,.]", SECTIONS[section], re.M):
        pytest.skip(f"the table is of another version of {section}")
    _, _, *rows = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return rows


def names_of(rows: list[str]) -> list[str]:
    return [name for row in rows for name in row.split("|")[1].split(", ")]


@pytest.mark.long
def test_layers_of_pyg():
    """No table of classes says which layers are simple: what they do with their edges does."""
    rows = rows_of("PyG", pytest.importorskip("torch_geometric").__version__)
    from . import pyg_layer_table as table  # reads PyG

    assert table.rows(table.layers([1], ("halo",))) == rows
    assert sorted(names_of(rows)) == sorted({*table.pyg_convs.__all__} - {"MessagePassing"})


@pytest.mark.long
def test_layers_of_dgl():
    rows = rows_of("DGL", pytest.importorskip("dgl").__version__)
    from . import dgl_layer_table as table

    assert table.rows(table.layers([1], ("halo",))) == rows
    assert sorted(names_of(rows)) == sorted(table.modules.CLASSES)


def test_a_layer_of_the_users_own_is_as_fast():
    pytest.importorskip("torch_geometric")
    from . import pyg_layer_table as table

    case = table.CONVS["user's layer"]
    assert table.measured("own", case, table.GRAPH, table.sp.pyg.wrap, [1], 700, ("halo",)).ways == "softmax"
