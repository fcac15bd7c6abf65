"""Forged stores: checksums fit, but the store contradicts itself. Each is refused as what it is, in bounded memory."""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from store_helpers import awkward, bipartite, rebuilt

import shardpass as sp
from shardpass.data import open_store, partition, tensor_file, verify
from shardpass.errors import StoreError
from shardpass.testing import run
from tests.forged import changed, document_of, leaves, seal, set_header, set_numbers


@pytest.fixture
def store(tmp_path) -> Path:
    partition(awkward(), tmp_path / "store", 2, method="range")
    return tmp_path / "store"


def all_refuse(store: Path, words: str) -> None:
    for use in (verify, lambda path: run(lambda comm: sp.load(path, comm), 2)):
        with pytest.raises(StoreError, match=words):
            use(store)


HOSTILE = [KeyError, None, True, -1, 10**10, math.inf, "other", "\ud800", [], {}]
_FREE = {"source", "method", "seed", "shardpass_version", "graph_fields", "graph_fingerprint", "sha256"}
_FREE |= {"partition_fingerprint", "tensors", "cut_edges"}  # which are compared with the parts


def test_every_value_of_a_manifest(tmp_path):
    store = tmp_path / "store"
    partition(bipartite(), store, 2, method="range")
    document = document_of(store)
    for path in leaves(document):
        for value in HOSTILE:
            forged = changed(document, path, value)
            seal(store, forged)
            try:
                open_store(store)
            except StoreError:
                continue
            assert forged == document or _FREE.intersection(path), (path, value)


MANIFESTS = {
    "many parts": (("num_parts",), 10**10, "lists 2 files for 10000000000 parts"),
    "many nodes": (("node_types", 0, "num_nodes"), 10**12, "offsets of nodes"),
    "another file": (("files", 0, "name"), "../part-00000.safetensors", "part 0 is in '../part-00000.safetensors'"),
    "a wide field": (("node_types", 0, "fields", 0, "row_shape"), [2**62, 4], "part-00000.safetensors"),
    "an unknown dtype": (("node_types", 0, "fields", 0, "dtype"), "complex32", r"fields\[0\].dtype is 'complex32'"),
    "no counts": (("edge_types", 0, "part_edges"), KeyError, r"edge_types\[0\] has no 'part_edges'"),
    "a cut that is none": (("edge_types", 0, "cut_edges"), 5, "cut edges"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_contradict_themselves_or_their_parts(store, name):
    path, value, words = MANIFESTS[name]
    seal(store, changed(document_of(store), path, value))
    all_refuse(store, words)


def swap_parts(store: Path) -> None:
    document = document_of(store)
    first, second = (store / f"part-{part:05d}.safetensors" for part in range(2))
    first.rename(store / "a")
    second.rename(first)
    (store / "a").rename(second)
    a, b = document["files"]
    a["name"], b["name"] = b["name"], a["name"]
    seal(store, {**document, "files": [b, a]})


def numbers(key, place, value, part=0):
    return lambda store: set_numbers(store, part, key, lambda array: array.__setitem__(place, value))


def entry(key, name, value):
    return lambda store: set_header(store, 0, lambda header: header[key].__setitem__(name, value))


EDGE_KEY = "edge/node,to,node/"
PARTS = {
    "a node twice": (numbers("node_ids/node", 1, 0), "node_ids/node.* ascending"),
    "a negative node": (numbers("node_ids/node", 0, -1), "node_ids/node.* ascending"),
    "a node too many": (numbers("node_ids/node", -1, 8), "node_ids/node.* ascending"),
    "a node of another part": (numbers("node_ids/node", -1, 4), "nodes of type 'node' are not each in one part"),
    "a source too many": (numbers(EDGE_KEY + "src_rows", -1, 4), "src_rows are not among the rows"),
    "a negative source": (numbers(EDGE_KEY + "src_rows", 0, -1), "src_rows are not among the rows"),
    "a source that is no halo row": (numbers(EDGE_KEY + "src_rows", 0, 1, 1), "src_rows are not among the rows"),
    "a halo row too many": (numbers(EDGE_KEY + "halo_rows", 0, 4, 1), "halo_rows are not ascending rows"),
    "a negative halo row": (numbers(EDGE_KEY + "halo_rows", 0, -1, 1), "halo_rows are not ascending rows"),
    "a halo of the part itself": (numbers(EDGE_KEY + "halo_starts", 1, 0, 1), "halo_starts does not fit the 1"),
    "halos that are none": (numbers(EDGE_KEY + "halo_starts", 1, 2**40, 1), "halo_starts does not fit the 1"),
    "a halo that begins late": (numbers(EDGE_KEY + "halo_starts", 0, 1, 1), "halo_starts does not fit the 1"),
    "row pointers that descend": (numbers(EDGE_KEY + "row_starts", 1, 6), "row_starts are not row pointers"),
    "row pointers from 1": (numbers(EDGE_KEY + "row_starts", 0, 1), "row_starts are not row pointers"),
    "negative row pointers": (numbers(EDGE_KEY + "row_starts", 5, -1), "row_starts are not row pointers"),
    "pointers to more edges": (
        numbers(EDGE_KEY + "row_starts", -1, 2**31 - 1),
        "row_starts are pointers to 21474",
    ),
    "an edge too many": (numbers(EDGE_KEY + "edge_ids", 0, 12), r"edge/node,to,node/edge_ids.* \[0, 12\)"),
    "an edge twice": (numbers(EDGE_KEY + "edge_ids", 0, 4), "edges .* are not each in one part"),
    "other numbers": (entry("node_ids/node", "dtype", "U64"), "part-00000.safetensors"),
    "integers for features": (entry("node/node/x", "dtype", "I32"), "part-00000.safetensors"),
    "another shape": (entry("node/node/x", "shape", [3, 4]), "part-00000.safetensors"),
    "overlapping tensors": (entry("node/node/y", "data_offsets", [0, 32]), "part-00000.safetensors"),
    "parts in each other's place": (swap_parts, "part"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_contradict_their_manifest(store, name, monkeypatch):
    monkeypatch.setattr(tensor_file, "_BLOCK_BYTES", 8)  # every check goes across blocks
    forge, words = PARTS[name]
    forge(store)
    all_refuse(store, words)


def test_parts_in_each_others_place_are_noticed_where_they_are_of_one_size(tmp_path):
    ends = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    graph = sp.data.read({"edge_index": ends, "num_nodes": 4})
    partition(graph, tmp_path / "store", 2, method="range")
    swap_parts(tmp_path / "store")
    all_refuse(tmp_path / "store", "src_rows are not among the rows that the part needs")


SPECIAL = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a circle of links": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", ["manifest.json", "part-00001.safetensors"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_not_opened(store, name, kind):
    (store / name).unlink()
    SPECIAL[kind](store / name)
    all_refuse(store, name)


TEXTS = {
    "nested": b"[" * 10**6,
    **{
        f"nested {depth} deep": b'{"format": "shardpass store", "version": ' + b"[" * depth + b"]" * depth + b"}"
        for depth in range(900, 1000, 10)
    },
    "not unicode": b'{"format": "shardpass store\xff"}',
    "a checksum that is no text": b'{"format": "shardpass store", "version": 2, "sha256": "\\ud800"}',
    "a long number": b'{"version": ' + b"9" * 10**5 + b"}",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_manifests_that_are_none(store, kind):
    (store / "manifest.json").write_bytes(TEXTS[kind])
    all_refuse(store, "manifest.json")


def test_a_manifest_of_a_terabyte_is_not_read(store):
    os.truncate(store / "manifest.json", 10**12)
    all_refuse(store, r"manifest.json has 1000000000000 bytes")


def test_a_store_that_is_linked_is_read(store, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in shutil.copytree(store, tmp_path / "copy").iterdir():
        (linked / file.name).symlink_to(file)
    verify(linked)
    assert rebuilt(open_store(linked), 2).num_edges
