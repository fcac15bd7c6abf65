"""Checkpoint files: torn, forged and unfitting ones are refused by name, and a failed write leaves the old one."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from checkpoint_cases import OPTIMIZERS, Net, begin, train
from torch import nn

from shardpass.core.training import load_checkpoint, read_verified, save_checkpoint, write_verified
from shardpass.errors import CheckpointError, DivergenceError
from shardpass.testing import run
from tests.forged import changed, leaves

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")


def write(path, ranks=2, **options):
    def body(comm):
        model, optimizer = begin(comm)
        train(model, optimizer, comm, 1)
        save_checkpoint(path, comm, model, optimizer, **options)

    run(body, ranks)


def refused(path, text, make=Net, optimizer=None, ranks=2, **options):
    def body(comm):
        model = make()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=text):
            load_checkpoint(path, comm, model, optimizer and optimizer(model.parameters()), **options)
        return all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    assert all(run(body, ranks))


def test_missing_torn_and_altered_files_are_refused_by_name(tmp_path):
    path = tmp_path / "good"
    refused(path, r"there is no checkpoint '.*good' \(found on rank 0\)")
    write(path)
    content = path.read_bytes()
    (tmp_path / "torn").write_bytes(content[: len(content) // 2])
    refused(tmp_path / "torn", r"torn' is torn, or something else: .*found on rank 0")
    (tmp_path / "altered").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(tmp_path / "altered", "altered' was altered or damaged: its checksum")


HOSTILE = [KeyError, None, True, -1, 10**30, "other", [], {}, [["a", {"tensor": 1}]], {"dict": [[[], 1]]}]


def test_forged_checkpoints_are_refused_or_load(tmp_path, monkeypatch):
    """The checksum fits, and any value of the manifest is another one."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"best": [1, (2.0, torch.ones(1))]}
    run(lambda comm: save_checkpoint(tmp_path / "a", comm, model, optimizer, extra=extra), 1)
    text, tensors = read_verified(tmp_path / "a")
    documents = [changed(json.loads(text), path, value) for path in leaves(json.loads(text)) for value in HOSTILE]

    def body(comm):
        refusals = 0
        for document in documents:
            write_verified(tmp_path / "b", tensors, json.dumps(document))
            try:
                load_checkpoint(tmp_path / "b", comm, model, optimizer)
            except CheckpointError:
                refusals += 1
        return refusals

    assert run(body, 1)[0] > len(documents) / 2


SPECIAL = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path, kind):
    SPECIAL[kind](tmp_path / "a")
    refused(tmp_path / "a", "no regular file|is a folder|there is no checkpoint", ranks=1)

    def body(comm):
        with pytest.raises(CheckpointError, match=r"could not be written: .*(no regular file|is a folder)"):
            save_checkpoint(tmp_path / "a", comm, Net())

    run(body, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and not (tmp_path / "a").is_file()


@pytest.mark.parametrize(
    ("make", "optimizer", "text"),
    [
        (
            lambda: Net(5),
            None,
            r"^the checkpoint '.*a' does not fit the model: 'tied' is float64 \[4, 4\] .*, float64 \[5, 5\] in the",
        ),
        (
            lambda: Net(dtype=torch.float32),
            None,
            r"is float64 \[4, 4\] in the checkpoint, float32 \[4, 4\] in the model",
        ),
        (lambda: nn.Linear(1, 1), None, r"'weight' is missing in the checkpoint, float32 \[1, 1\] in the model"),
        (nn.Identity, None, r"'tied' is float64 \[4, 4\] in the checkpoint, missing in the model"),
        (Net, OPTIMIZERS["sgd"], r"^the checkpoint '.*a' holds the state of AdamW, not of SGD"),
        (
            Net,
            lambda p: OPTIMIZERS["adam"](list(p)[:2]),
            r"^the checkpoint '.*a' does not fit the optimizer: its parameter groups were .* they are",
        ),
        (Net, lambda p: OPTIMIZERS["adam"](list(p)[::-1]), "build it over the same parameters in the same order"),
        (
            Net,
            lambda p: torch.optim.AdamW([{"params": [next(p)]}, {"params": p}], lr=0.1),
            "does not fit the optimizer: its parameter groups were",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, make, optimizer, text):
    write(tmp_path / "a")
    refused(tmp_path / "a", text, make, optimizer)


def test_a_checkpoint_without_optimizer_state_says_so(tmp_path):
    run(lambda comm: save_checkpoint(tmp_path / "a", comm, Net()), 2)
    refused(
        tmp_path / "a",
        r"^the checkpoint '.*a' holds no optimizer state: load it without an optimizer",
        Net,
        OPTIMIZERS["adam"],
    )


def test_only_the_same_graph_and_partition_fit(tmp_path):
    graph = SimpleNamespace(fingerprint="g1", partition_fingerprint="p1")
    write(tmp_path / "a", graph=graph)
    assert run(lambda comm: load_checkpoint(tmp_path / "a", comm, Net(), graph=graph)["epoch"], 3) == [0, 0, 0]
    assert run(lambda comm: load_checkpoint(tmp_path / "a", comm, Net())["epoch"], 1) == [0]
    other = SimpleNamespace(fingerprint="g2", partition_fingerprint="p1")
    refused(
        tmp_path / "a",
        r"^the checkpoint '.*a' was written for another graph: g1, this is g2. To go on training, load it",
        graph=other,
    )
    other = SimpleNamespace(fingerprint="g1", partition_fingerprint="p2")
    refused(tmp_path / "a", "was written for another partition: p1, this is p2", graph=other)


def test_one_rank_that_does_not_fit_is_told_on_all(tmp_path):
    write(tmp_path / "a")

    def body(comm):
        model = Net(4 + comm.rank)
        with pytest.raises(CheckpointError, match=r"float64 \[5, 5\] in the model.* \(found on rank 1\)"):
            load_checkpoint(tmp_path / "a", comm, model)

    run(body, 2)


@pytest.mark.ranks(2)
def test_what_cannot_be_stored_is_named(comm, tmp_path):
    with pytest.raises(CheckpointError, match=r"extra/a/0 is a object; a checkpoint holds .*\(found on rank 1\)"):
        save_checkpoint(tmp_path / "a", comm, Net(), extra={"a": [object()]} if comm.rank == 1 else None)
    assert not list(tmp_path.iterdir())


def test_a_state_that_torch_refuses_is_told_on_all(tmp_path):
    class Picky(Net):
        def load_state_dict(self, *args, **kwargs):
            raise RuntimeError("picky")

    write(tmp_path / "a")
    refused(tmp_path / "a", "the state could not be restored: picky", Picky)


@pytest.mark.ranks(3)
def test_parameters_that_drifted_apart_are_not_saved(comm, tmp_path):
    model = Net()
    if comm.rank == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-2
    with pytest.raises(DivergenceError, match="parameter 'tied' is not the same on rank 0 and rank 1"):
        save_checkpoint(tmp_path / "a", comm, model)
    assert not (tmp_path / "a").exists()
