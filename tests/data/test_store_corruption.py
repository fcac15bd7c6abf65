"""A missing, torn or altered store is refused by name; never a wrong graph."""

import json
import shutil
from pathlib import Path

import pytest
from store_helpers import awkward, position_of

from shardpass.data import EDGE, NODE, inspect, merge_parts, open_store, partition, verify
from shardpass.data.manifest import read_manifest, write_manifest
from shardpass.data.tally import tally
from shardpass.errors import StoreError


@pytest.fixture
def store(tmp_path) -> Path:
    partition(awkward(), tmp_path / "store", 2, method="range")
    return tmp_path / "store"


def flip(path: Path, position: int, bit: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))


@pytest.mark.parametrize("name", ["manifest.json", "part-00001.safetensors"])
def test_every_flipped_byte_is_refused(store, name):
    path = store / name
    for position in range(path.stat().st_size):
        flip(path, position)
        with pytest.raises(StoreError, match=name):
            verify(store)
        flip(path, position)
    verify(store)


def test_structure_is_refused_on_load_and_fields_on_first_use(store):
    file = open_store(store).files[1]
    for key in file.record.tensors:
        start = position_of(file.path, key)
        flip(file.path, start)
        reopened = open_store(store)  # the header and the size are right
        if key.startswith(("node/", "edgefield/")):
            data = merge_parts(reopened, 1, 0)
            fields = data.node_fields[NODE] if key.startswith("node/") else data.edge_fields[EDGE]
            with pytest.raises(
                StoreError, match=f"part-00001.safetensors is altered: the checksum of the tensor '{key}'"
            ):
                fields[key.rpartition("/")[2]]
        else:
            with pytest.raises(
                StoreError, match=f"part-00001.safetensors is altered: the checksum of the tensor '{key}'"
            ):
                tally(reopened, merge_parts(reopened, 2, 1))
        flip(file.path, start)
    with pytest.raises(StoreError, match="the header"):
        flip(file.path, 20)
        open_store(store)


@pytest.mark.parametrize("change", [-1, 1, -10_000])
def test_wrong_size(store, change):
    path = store / "part-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content + b"\0" if change > 0 else content[: max(0, len(content) + change)])
    with pytest.raises(StoreError, match=r"part-00001.safetensors has \d+ bytes, its manifest says"):
        open_store(store)


def test_missing_things(store, tmp_path):
    with pytest.raises(StoreError, match=r"there is no directory .*nowhere on .*; write a store there"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"is not a shardpass store: manifest.json cannot be read"):
        open_store(tmp_path)
    (store / "part-00000.safetensors").unlink()
    for use in (open_store, verify, inspect):
        with pytest.raises(StoreError, match=r"part-00000.safetensors cannot be read \(No such file or directory\)"):
            use(store)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_torn_manifest(store, keep):
    path = store / "manifest.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StoreError, match=r"manifest.json is altered or torn: it is not JSON"):
        open_store(store)


def test_edited_manifest(store):
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"num_parts": 2', '"num_parts": 1'))
    with pytest.raises(StoreError, match=r"manifest.json is altered: its checksum differs from its contents"):
        open_store(store)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"format": "shardpass store", "version": 3}, "has format version 3, this shardpass reads up to 2; upgrade"),
        (
            {"format": "shardpass store", "version": 1},
            "1, which an older shardpass wrote.* write the store again",
        ),
        ({"format": "shardpass store", "version": 0}, "its format version is 0"),
        ({"format": "shardpass store", "version": 2}, "its checksum differs"),
        ({"part_method": "metis"}, "is not the manifest of a shardpass store: it lacks format"),
        ([], "is not the manifest of a shardpass store"),
    ],
)
def test_other_manifests(store, document, message):
    (store / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match=message):
        open_store(store)


def test_files_of_another_partition_are_refused(store, tmp_path):
    partition(awkward(), tmp_path / "other", 2, method="random", seed=3)
    shutil.copy(tmp_path / "other" / "part-00001.safetensors", store)
    with pytest.raises(StoreError, match=r"part-00001.safetensors"):
        merge_parts(open_store(store), 1, 0)


def test_manifest_with_another_number_of_parts(store):
    manifest = read_manifest(store)
    write_manifest(manifest.__class__(**{**vars(manifest), "num_parts": 3}), store / "manifest.json")
    with pytest.raises(StoreError, match="lists 2 files for 3 parts"):
        open_store(store)
