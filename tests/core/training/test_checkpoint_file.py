"""The file of a checkpoint: nested state as JSON and tensors, and what is refused of either."""

import json

import pytest
import torch

from shardpass.core.training import read_verified, write_verified
from shardpass.core.training.checkpoint_file import FORMAT, decode, encode, read_file, write_file
from shardpass.errors import CheckpointError

ONE, TWO = torch.ones(1), torch.tensor([[2, 3]])


def manifest(**changes):
    whole = {
        "format": FORMAT, "ranks": 2, "epoch": 3, "local": ["rows"], "graph": None, "partition": None,
        "model": {"dict": [["weight", {"tensor": "model/weight"}]]}, "model_metadata": {"dict": []}, "extra": None,
        "optimizer": None,
    }  # fmt: skip
    return {**whole, **changes}


def stored():
    return {"model/weight": TWO, "rows@0": torch.zeros(2, 1), "rows@1": ONE.view(1, 1)}


def test_the_tree_of_nested_state():
    tensors = {}
    state = {"a": [1, 2.5, "x", None, True, (ONE,)], 3: {"b": TWO, "c": {}}, "d": []}
    tree = encode(state, "extra", tensors)
    assert tree == {
        "dict": [
            ["a", {"list": [1, 2.5, "x", None, True, {"tuple": [{"tensor": "extra/a/5/0"}]}]}],
            [3, {"dict": [["b", {"tensor": "extra/3/b"}], ["c", {"dict": []}]]}],
            ["d", {"list": []}],
        ]
    }
    assert tensors == {"extra/a/5/0": ONE, "extra/3/b": TWO}
    found = decode(json.loads(json.dumps(tree)), tensors)
    assert found == state and type(found["a"][5]) is tuple and type(found["d"]) is list and found["a"][4] is True


def test_names_that_are_taken_get_another():
    tensors = {}
    tree = encode([ONE, TWO, {"0": ONE}], "x", tensors)
    again = encode({"0": TWO, "0+": ONE}, "x", tensors)
    assert list(tensors) == ["x/0", "x/1", "x/2/0", "x/0+", "x/0++"]
    assert decode(tree, tensors) == [ONE, TWO, {"0": ONE}] and decode(again, tensors) == {"0": TWO, "0+": ONE}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [ONE.to_sparse()]}, "extra/a/0 is a sparse tensor, which a checkpoint cannot hold"),
        ({"a": {2.5: 1}}, "extra/a has the key 2.5; keys in a checkpoint are strings or integers"),
        ([{1}], "extra/0 is a set; a checkpoint holds tensors, numbers, strings, None, dicts, lists, tuples"),
    ],
)
def test_what_cannot_be_stored(value, words):
    with pytest.raises(CheckpointError, match=f"^{words}$"):
        encode(value, "extra", {})


def test_what_is_written_is_read_and_rows_of_ranks_are_joined(tmp_path):
    write_file(tmp_path / "a", stored(), manifest())
    tensors = {}
    found = read_file(tmp_path / "a", tensors)
    shapes = {"model/weight": ["int64", [1, 2]], "rows": ["float32", [3, 1]]}
    assert found == {**manifest(), "columns": {}, "tensors": shapes} and list(found["tensors"]) == sorted(shapes)
    assert tensors.keys() == shapes.keys() and tensors["rows"].view(-1).tolist() == [0, 0, 1]
    assert json.loads(read_verified(tmp_path / "a")[0]) == manifest()


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match=rf"^the checkpoint '{tmp_path}' could not be written: .* is a folder"):
        write_file(tmp_path, stored(), manifest())


OPTIMIZER = {"class": "SGD", "shapes": [[[1, 2]]], "state": {"dict": []}}
REFUSED = [
    (manifest(format=2), "it has format 2, this version reads format 1"),
    ({"ranks": 2}, "it has format None, this version reads format 1"),
    ([], "it is a list"),
    ({key: value for key, value in manifest().items() if key != "epoch"}, "it has no 'epoch'"),
    (manifest(ranks=0), "ranks is 0"),
    (manifest(ranks=2**31), f"ranks is {2**31}"),
    (manifest(ranks=3), "'rows@2'"),
    (manifest(epoch=1.5), "epoch is 1.5"),
    (manifest(local="rows"), "local is 'rows'"),
    (manifest(local=[1]), r"local\[0\] is 1"),
    (manifest(local=["else"]), "'else@0'"),
    (manifest(graph=1), "graph is 1"),
    (manifest(partition=1), "partition is 1"),
    (manifest(model={"list": []}), "model has no 'dict'"),
    (manifest(model={"dict": {}}), "model.dict is a dict"),
    (manifest(model={"dict": [["a", {"tensor": "else"}]]}), "'else'"),
    (manifest(model_metadata=[]), "model_metadata is a list"),
    (manifest(model_metadata={"tensor": "else"}), "'else'"),
    (manifest(extra={"tensor": "else"}), "'else'"),
    (manifest(extra={"tensor": "model/weight", "more": 1}), "too many values to unpack"),
    (manifest(optimizer={}), "optimizer has no 'class'"),
    (manifest(optimizer={**OPTIMIZER, "class": 1}), "optimizer.class is 1"),
    (manifest(optimizer={**OPTIMIZER, "shapes": [[[-1]]]}), r"optimizer.shapes\[0\]\[0\]\[0\] is -1"),
    (manifest(optimizer={**OPTIMIZER, "state": []}), "optimizer.state is a list"),
    (manifest(optimizer={**OPTIMIZER, "state": {"tensor": "else"}}), "'else'"),
]


@pytest.mark.parametrize(("document", "words"), REFUSED)
def test_manifests_that_do_not_fit(document, words, tmp_path):
    write_verified(tmp_path / "a", stored(), json.dumps(document))
    with pytest.raises(CheckpointError, match=f"a' is not as save_checkpoint writes it: .*{words}"):
        read_file(tmp_path / "a", {})


@pytest.mark.parametrize(("text", "words"), [("{", "line 1"), ('{"a": }', "line 1"), ("[" * 10**6, "recursion")])
def test_manifests_that_are_no_json(text, words, tmp_path):
    write_verified(tmp_path / "a", stored(), text)
    with pytest.raises(CheckpointError, match=rf"a' is not as save_checkpoint writes it: .*{words}"):
        read_file(tmp_path / "a", {})


def test_an_optimizer_is_read(tmp_path):
    document = manifest(optimizer={**OPTIMIZER, "state": {"tensor": "model/weight"}}, local=[])
    write_file(tmp_path / "a", {"model/weight": TWO}, document)
    assert read_file(tmp_path / "a", {})["optimizer"] == document["optimizer"]


def test_files_that_are_no_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match=f"^there is no checkpoint '{tmp_path / 'a'}'$"):
        read_file(tmp_path / "a", {})
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"^the checkpoint '{tmp_path / 'a'}' is torn, or something else: "):
        read_file(tmp_path / "a", {})
    write_verified(tmp_path / "a", stored())
    with pytest.raises(CheckpointError, match=f"^'{tmp_path / 'a'}' is no checkpoint: it has no manifest$"):
        read_file(tmp_path / "a", {})
