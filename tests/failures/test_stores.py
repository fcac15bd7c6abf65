"""Damaged, replaced or unsuitable stores, and graphs that cannot be stored: told in words, nothing left or changed."""

import json
import shutil

import numpy as np
import pytest
import torch

import shardpass as sp
from shardpass.data import open_store, parts_of_rank, verify
from shardpass.errors import DivergenceError, PeerFailure, StoreError

from .training import NODES, PARTS, RANKS, Turn, begin, random_graph, run_ranks


@pytest.fixture
def copy(store, tmp_path):
    """A store of this test's own, to be damaged."""
    return shutil.copytree(store, tmp_path / "copy")


def load_and_train(paths, steps=2):
    """Each rank loads the store at ``paths(rank)`` and trains."""

    def work(comm):
        turn = begin(comm, paths(comm.rank))
        for turn.epoch in range(steps):
            Turn.step(turn)
        return turn.losses

    return run_ranks(work)


def contents(path):
    return {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def flip(path, kind):
    """Change one byte of the part's structure or of its features; the name of the tensor."""
    number = int(path.stem.split("-")[1])
    file = open_store(path.parent).files[number]
    key = next(k for k in file.record.tensors if (k.endswith("/x") if kind == "features" else k.endswith("src_rows")))
    with open(path, "r+b") as raw:
        length = 8 + int.from_bytes(raw.read(8), "little")
        raw.seek(8)
        raw.seek(length + json.loads(raw.read(length - 8))[key]["data_offsets"][0])
        byte = raw.read(1)[0]
        raw.seek(-1, 1)
        raw.write(bytes([byte ^ 1]))
    return key


def owner_of_part(path, part):
    return next(rank for rank in range(RANKS) if part in parts_of_rank(PARTS, RANKS, rank))


def test_a_missing_part_file(copy):
    (copy / "part-00002.safetensors").unlink()
    before = contents(copy)
    outcome = load_and_train(lambda rank: copy)
    outcome.assert_all_say(
        "part-00002.safetensors cannot be read (No such file or directory)", "needs all its part files"
    )
    assert contents(copy) == before


@pytest.mark.parametrize("kind", ["structure", "features"])
def test_a_flipped_byte(copy, kind):
    key = flip(copy / "part-00003.safetensors", kind)
    rank, before = owner_of_part(copy, 3), contents(copy)
    outcome = load_and_train(lambda rank: copy)
    outcome.assert_all_say(
        f"part-00003.safetensors is altered: the checksum of the tensor '{key}' differs", "shardpass.part"
    )
    for other, error in enumerate(outcome.errors):
        assert isinstance(error, StoreError if other == rank else PeerFailure), outcome.words()
        assert other == rank or f"rank {rank}" in str(error)
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("field", "change", "words"), [("edge_index", lambda ends: ends.flip(0), ""), ("x", lambda x: x + 1, "contents")]
)
def test_another_store_on_one_rank(store, tmp_path, field, change, words):
    data = random_graph()
    data[field] = change(data[field])
    sp.partition(data, tmp_path / "other", PARTS, method="random")
    outcome = load_and_train(lambda rank: tmp_path / "other" if rank == 1 else store)
    outcome.assert_all_say("every rank must load the same store: rank 0 has one with", "rank 1 has one with", words)
    assert isinstance(outcome.raised, DivergenceError)


def test_copies_of_a_store_are_the_same(store, copy):
    assert len(load_and_train(lambda rank: copy if rank == 1 else store).results) == RANKS


def test_a_part_file_of_another_store(copy, tmp_path):
    data = random_graph()
    data.x = data.x + 1
    sp.partition(data, tmp_path / "other", PARTS, method="random")
    shutil.copy(tmp_path / "other" / "part-00003.safetensors", copy / "part-00003.safetensors")
    load_and_train(lambda rank: copy).assert_all_say("part-00003.safetensors is altered", "checksum")


def test_other_options_on_one_rank(store):
    outcome = run_ranks(lambda comm: sp.load(store, comm, sp.Options(mode="keep" if comm.rank == 1 else "sar")))
    outcome.assert_all_say("every rank must load the same options: rank 0", "'mode': 'sar'", "rank 1", "'mode': 'keep'")


def test_no_store_at_all(tmp_path):
    load_and_train(lambda rank: tmp_path / "nothing").assert_all_say("nothing")


def test_more_ranks_than_parts(store):
    before = contents(store)
    outcome = run_ranks(lambda comm: sp.load(store, comm), ranks=PARTS + 1)
    outcome.assert_all_say(f"{PARTS + 1} ranks", f"{PARTS} parts")
    assert contents(store) == before


@pytest.mark.parametrize("damage", ["during load", "between epochs"])
def test_a_store_is_not_changed_by_a_run_that_fails(copy, damage):
    before = contents(copy)

    def work(comm):
        turn = begin(comm, copy)
        if damage == "between epochs":
            turn.step()
        turn.x.add_(1)  # writing to a feature that is mapped from the file must not reach it
        if comm.rank == 1:
            raise ValueError("boo")
        turn.step()

    run_ranks(work).assert_began_on(1, ValueError, "boo")
    assert contents(copy) == before
    verify(copy)


def with_edge(values, dtype):
    edge_index = random_graph().edge_index.to(dtype)
    edge_index[:, 7] = torch.tensor(values, dtype=dtype)
    return edge_index


@pytest.mark.parametrize(
    ("edge_index", "words"),
    [
        (with_edge([float("nan"), 1], torch.float32), ["float", "nan at position 7"]),
        (with_edge([1, 2], torch.float64), ["float64", "integers"]),
        (with_edge([1.5, 2], torch.float32), ["float32", "1.5 at position 7"]),
        (with_edge([NODES, 1], torch.int64), ["source", f"{NODES} at position 7", f"[0, {NODES})"]),
        (with_edge([1, -1], torch.int64), ["destination", "-1 at position 7", f"[0, {NODES})"]),
        (with_edge([2**40, 1], torch.int64), ["source", f"{2**40} at position 7", f"[0, {NODES})"]),
    ],
)
@pytest.mark.parametrize(("reader", "method"), [("pyg", "metis"), ("dict", "random")])
def test_edges_that_are_none(tmp_path, edge_index, words, reader, method):
    if method == "metis":
        pytest.importorskip("pymetis")
    data = random_graph()
    data.edge_index, data.num_nodes = edge_index, NODES
    if reader == "dict":
        data = {"edge_index": edge_index.numpy(), "x": np.asarray(data.x), "num_nodes": NODES}
    with pytest.raises((TypeError, ValueError)) as caught:
        sp.partition(data, tmp_path / "store", PARTS, method=method)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not list(tmp_path.iterdir()), "nothing is left on disk"
