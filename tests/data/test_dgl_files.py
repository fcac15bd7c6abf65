"""DGL's partition directories: missing, altered and foreign files are refused by name. Any byte: `damage.py`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_helpers import change_graph, hetero, write

from shardpass.data import read

dgl = pytest.importorskip("dgl")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sound"), hetero(), 2, graph_formats=["coo", "csc"]).path


@pytest.fixture
def files(sound: Path, tmp_path: Path) -> Path:
    """A copy of a sound partition, to be altered; the JSON."""
    shutil.copytree(sound.parent, tmp_path / "copy")
    return tmp_path / "copy" / sound.name


def edit(path: Path, change: Any) -> None:
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


FILES = ["part0/graph.dgl", "part1/graph.dgl", "part1/node_feat.dgl", "part0/edge_feat.dgl"]


class TestWrongFiles:
    def test_sound(self, files: Path) -> None:
        assert sum(read(files).num_nodes.values()) > 0

    @pytest.mark.parametrize("name", FILES)
    def test_missing(self, files: Path, name: str) -> None:
        (files.parent / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} cannot be read: No such file"):
            read(files)

    @pytest.mark.parametrize("name", FILES)
    def test_cut_short(self, files: Path, name: str) -> None:
        path = files.parent / name
        content = path.read_bytes()
        lengths = {0, 1, 8, 20, 4096, 4100, len(content) // 3, len(content) // 2, len(content) - 200}
        for length in sorted(length for length in lengths if length < len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=rf"{name} is cut short or altered \(.*copy it again"):
                read(files)

    def test_other_files(self, files: Path) -> None:
        swap(files.parent / "part0/graph.dgl", files.parent / "part1/graph.dgl")
        with pytest.raises(ValueError, match=r"part0/graph\.dgl is altered or belongs to another partition: .* part 0"):
            read(files)
        swap(files.parent / "part0/graph.dgl", files.parent / "part1/graph.dgl")
        swap(files.parent / "part0/node_feat.dgl", files.parent / "part0/graph.dgl")
        with pytest.raises(ValueError, match=r"part0/node_feat\.dgl is cut short or altered \(a file of DGL tensors"):
            read(files)

    def test_other_features(self, files: Path) -> None:
        folder = files.parent
        shutil.copy(folder / "part0/node_feat.dgl", folder / "part1/node_feat.dgl")
        with pytest.raises(ValueError, match=r"part1/node_feat\.dgl is altered: '.*' is .*; expected .* other parts"):
            read(files)
        dgl.data.utils.save_tensors(str(folder / "part1/node_feat.dgl"), {})
        with pytest.raises(ValueError, match=r"part1/node_feat\.dgl has no '.*', which other parts have"):
            read(files)
        dgl.data.utils.save_tensors(str(folder / "part1/node_feat.dgl"), {"feat": torch.rand(3)})
        with pytest.raises(ValueError, match=r"part1/node_feat\.dgl: 'feat' belongs to no type"):
            read(files)

    @pytest.mark.parametrize(
        "change, told",
        [
            (lambda c: c.update(num_nodes=67), "num_nodes is 67, but the parts have 66"),
            (lambda c: c.update(num_parts=3), "KeyError: 'part-2'"),
            (lambda c: c["node_map"]["user"].append([9, 9]), r"ValueError"),
            (lambda c: c["node_map"]["user"][1].__setitem__(0, 40), "the node ids of its parts have gaps or overlap"),
            (lambda c: c["edge_map"].pop("user:buys:item"), "KeyError: 'user:buys:item'"),
            (lambda c: c.update(node_map="node_map.npy"), "with DGL 1.0 or newer"),
            (lambda c: c["ntypes"].update(user=1), "the types have the numbers"),
            (lambda c: c.pop("part-1"), "KeyError: 'part-1'"),
            (lambda c: c["part-1"].pop("node_feats"), "KeyError: 'node_feats'"),
            (lambda c: c.pop("num_parts"), "KeyError: 'num_parts'"),
            (
                lambda c: c["etypes"].__setitem__("buys", c["etypes"].pop("user:buys:item")),
                "not enough values .*DGL 1.0",
            ),
            (
                lambda c: c["etypes"].__setitem__("a:buys:item", c["etypes"].pop("user:buys:item")),
                "'a:buys:item' is not",
            ),
            (
                lambda c: c["part-0"].update(part_graph_graphbolt=c["part-0"].pop("part_graph")),
                "KeyError: 'part_graph'.* without use_graphbolt=True",
            ),
        ],
    )
    def test_json(self, files: Path, change: Any, told: str) -> None:
        edit(files, change)
        with pytest.raises(ValueError, match=f"some name.json does not describe a DGL partition .*{told}"):
            read(files)

    def test_not_json(self, files: Path) -> None:
        files.write_text(files.read_text()[:-5])
        with pytest.raises(ValueError, match=r"some name\.json is cut short or altered: it is not JSON"):
            read(files)
        files.write_text("[1]")
        with pytest.raises(ValueError, match="does not describe a DGL partition"):
            read(files)
        with pytest.raises(ValueError, match=r"copy is a directory; .* pass the \.json in it"):
            read(files.parent)
        with pytest.raises(ValueError, match=r"there is no file .*none\.json"):
            read(files.with_name("none.json"))

    def test_several_graphs(self, files: Path) -> None:
        path = files.parent / "part0/graph.dgl"
        dgl.save_graphs(str(path), [dgl.load_graphs(str(path))[0][0]] * 2)
        with pytest.raises(ValueError, match=r"part0/graph\.dgl is cut short or altered \(2 graphs in the format"):
            read(files)

    @pytest.mark.parametrize("name", ["_ID", "inner_node"])
    def test_graphs_without_their_fields(self, files: Path, name: str) -> None:
        change_graph(files.parent, 0, lambda g: g.ndata.pop(name))
        with pytest.raises(ValueError, match=rf"part0/graph\.dgl holds no integers '{name}'"):
            read(files)

    def test_wrong_ids(self, files: Path) -> None:
        """An id of another part, one that is there twice, one that is not there."""

        def of_another_part(g: Any) -> None:
            (first, _), (other, _) = json.loads(files.read_text())["node_map"]["item"]
            assert g.ndata["_ID"][0] == first
            g.ndata["_ID"][0] = other

        def twice(g: Any) -> None:
            assert g.edata["inner_edge"][1] == 1
            g.edata["_ID"][1] = g.edata["_ID"][0]

        def missing(g: Any) -> None:
            g.edata["inner_edge"][1] = 0

        path = files.parent / "part0/graph.dgl"
        sound = path.read_bytes()
        for change, what in ((of_another_part, "node"), (twice, "edge"), (missing, "edge")):
            path.write_bytes(sound)
            change_graph(files.parent, 0, change)
            with pytest.raises(ValueError, match=rf"part0/graph\.dgl is altered .*: its inner {what}s are not those"):
                read(files)

    @pytest.mark.parametrize(
        "mark, told", [("inner_node", "leads to a node of another part"), ("_TYPE", "is at a node of another type")]
    )
    def test_edges_at_wrong_nodes(self, files: Path, mark: str, told: str) -> None:
        path = str(files.parent / "part0/graph.dgl")
        g = dgl.load_graphs(path)[0][0]
        src, dst = g.edges(order="eid")
        assert g.edata["inner_edge"][0] == 1
        same = g.ndata[mark] == g.ndata[mark][dst[0]]
        if mark == "inner_node":  # of the same type, so that nothing else is wrong
            same |= g.ndata["_TYPE"] != g.ndata["_TYPE"][dst[0]]
        else:
            same |= g.ndata["inner_node"] == 0
        dst[0] = (~same).nonzero()[0]
        changed = dgl.graph((src, dst), num_nodes=g.num_nodes())
        changed.ndata.update(g.ndata)
        changed.edata.update(g.edata)
        dgl.save_graphs(path, [changed])
        with pytest.raises(ValueError, match=rf"part0/graph\.dgl is altered: an .*edge .*{told}"):
            read(files)

    def test_bytes_added(self, files: Path) -> None:
        path = files.parent / "part1/edge_feat.dgl"
        path.write_bytes(path.read_bytes() + b"0")
        with pytest.raises(ValueError, match=r"part1/edge_feat\.dgl is cut short or altered"):
            read(files)


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
