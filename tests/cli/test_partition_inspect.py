"""`shardpass partition` and `shardpass inspect`: what they write, print and refuse."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import passed, refused

import shardpass as sp
from shardpass.cli.graphs import digits, powerlaw
from shardpass.data import inspect_layers, inspect_pairs, open_store, read


def test_npz_is_partitioned(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", **powerlaw(300, 6, channels=3))
    text = passed("partition", tmp_path / "g.npz", tmp_path / "out", "--parts", 3, "--method", "range")
    assert "300 nodes" in text and "3 parts" in text and "of the edges cut" in text
    manifest = open_store(tmp_path / "out").manifest
    assert (manifest.num_parts, manifest.method) == (3, "range")


def test_edge_list_with_features_labels_and_masks(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n1,2\n2,0\n3,0\n")
    for name, array in {"x": np.eye(4, dtype=np.float32), "y": np.arange(4), "m": np.array([1, 0, 1, 0], bool)}.items():
        np.save(tmp_path / f"{name}.npy", array)
    passed(
        "partition", tmp_path / "edges.csv", tmp_path / "out", "--parts", 2, "--method", "random", "--seed", 3,
        "--features", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "--train-mask", tmp_path / "m.npy",
    )  # fmt: skip
    graph = sp.load(tmp_path / "out", sp.connect("local"))
    order = graph.node_ids.argsort()
    assert graph.y[order].tolist() == [0, 1, 2, 3] and graph.train_mask[order].tolist() == [True, False, True, False]


def test_assignment_and_overwrite(tmp_path: Path) -> None:
    np.save(tmp_path / "parts.npy", np.arange(200) % 2)
    arguments = ("partition", "demo:powerlaw:200", tmp_path / "out", "--parts", 2)
    passed(*arguments, "--assignment", tmp_path / "parts.npy")
    assert open_store(tmp_path / "out").manifest.method == "given"
    assert "overwrite" in refused(*arguments)
    passed(*arguments, "--overwrite", "--drop", "val_mask")
    manifest = open_store(tmp_path / "out").manifest
    assert manifest.method == "kaminpar" and manifest.source == "demo:powerlaw:200"
    assert "val_mask" not in manifest.node_fields["node"] and "test_mask" in manifest.node_fields["node"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothere.npz", "o"), "there is no file nothere.npz"),
        (("nothere.csv", "o"), "there is no file nothere.csv"),
        (("demo:cats", "o"), "unknown built-in graph 'demo:cats'; there are demo:digits"),
        (("demo:powerlaw:200", "o", "--method", "magic"), "unknown partition method 'magic'"),
        (("demo:powerlaw:200", "o", "--parts", "0"), "0 parts; expected at least 1"),
        (("demo:powerlaw:200", "o", "--num-nodes", "9"), "belong to edge lists"),
        (("demo:powerlaw:200", "o", "--assignment", "nothere.npy"), "nothere.npy"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused("partition", *arguments)
    assert not (tmp_path / "o").exists()


def test_inspect_shows_parts_ranks_and_verifies(store: Path) -> None:
    text = passed("inspect", store, "--verify")
    assert "every byte of 4 part files" in text and "600 nodes" in text and "balance" in text
    report = sp.inspect(store, 2)
    text = passed("inspect", store, "--ranks", 2)
    assert f"{report.num_cut_edges:,}" in text and "0-1" in text
    for group in report.groups:
        assert f"{group.num_halo_rows:,}" in text


@pytest.mark.parametrize("ranks", [2, None])
def test_inspect_shows_what_partial_sums_save(store: Path, ranks: int | None) -> None:
    halo, fewest = inspect_pairs(store, ranks)
    report = sp.inspect(store, ranks)
    assert halo.sum(1).tolist() == [group.num_halo_rows for group in report.groups]
    assert (fewest <= halo).all() and 0 < fewest.sum() < halo.sum()
    text = passed("inspect", store, "--pairs", *(() if ranks is None else ("--ranks", ranks)))
    assert f"{int(halo.sum()):,} → {int(fewest.sum()):,}" in text and f"{int(halo[0, 1]):,} →" in text


@pytest.mark.parametrize("ranks", [2, 4])
def test_inspect_layers_counts_what_a_run_needs(store: Path, ranks: int) -> None:
    def counts(comm: sp.Communicator) -> list[tuple[int, int, int]]:
        graph = sp.load(store, comm)
        layers = graph.layers(graph.train_mask, 2)
        return [
            (int(e.flow.needed.sum()), int(e.flow.needed[e[1]].sum()), e.flow.plan.num_halo)  # nodes, edges, halo rows
            for e in layers
        ]

    by_rank = sp.spawn(counts, ranks)
    expected = [tuple(sum(column) for column in zip(*layer)) for layer in zip(*by_rank)]
    found = inspect_layers(store, "train_mask", 2, ranks)
    assert [(layer.nodes, layer.edges, layer.halo_rows) for layer in found] == expected
    assert expected[1] < expected[0]
    text = passed("inspect", store, "--ranks", ranks, "--layers", 2)
    assert all(f"{number:,} (" in text for layer in expected for number in layer)


def test_inspect_refuses(store: Path, tmp_path: Path) -> None:
    assert "9 ranks, but the store has 4 parts" in refused("inspect", store, "--ranks", 9)
    assert "there is no directory" in refused("inspect", tmp_path / "nothere")
    words = refused("inspect", store, "--layers", 2, "--mask", "y")
    assert "has no node mask 'y'; there are: " in words and "train_mask" in words


def test_inspect_names_an_altered_file(tmp_path: Path) -> None:
    passed("partition", "demo:powerlaw:200", tmp_path / "out", "--parts", 2, "--method", "random")
    file = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert file.name in refused("inspect", tmp_path / "out", "--verify")


def test_what_a_store_says_of_itself_is_shown_as_text(tmp_path: Path) -> None:
    arrays = powerlaw(60, 4, channels=2)
    graph = replace(read({**arrays, "[/red]": arrays["y"]}), source="[/x] \x1b[2J")
    sp.partition(graph, tmp_path / "out", 2, "range")
    text = passed("inspect", tmp_path / "out")
    assert "from [/x] ?[2J" in text and "[/red]" in text and "\x1b" not in text


def test_demo_graphs_are_what_they_say() -> None:
    arrays = digits()
    assert arrays["x"].shape == (1797, 64) and set(arrays["y"]) == set(range(10))
    arrays = powerlaw(2000, 10)
    src, dst = arrays["edge_index"]
    keys = src.astype(np.int64) * 2000 + dst
    assert len(np.unique(keys)) == len(keys) and not (src == dst).any()
    assert set(keys) == set(dst.astype(np.int64) * 2000 + src), "both directions"
    assert 0.8 < len(keys) / 20_000 < 1.1
    degrees = np.bincount(dst, minlength=2000)
    assert degrees.max() > 8 * degrees.mean(), "hubs"
    assert all((powerlaw(2000, 10)[name] == array).all() for name, array in arrays.items()), "the same again"
