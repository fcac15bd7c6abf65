"""Checkpoints: what is saved comes back, and whatever does not fit is refused on every rank."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardpass.backends.recording import RecordingCommunicator
from shardpass.core.ranks import Ranks
from shardpass.core.training.checkpoint import load_checkpoint, save_checkpoint
from shardpass.core.training.gradients import note_forward, sync_gradients, sync_parameters
from shardpass.core.training.verified_file import read_verified, write_verified
from shardpass.errors import CheckpointError
from shardpass.testing.run import run
from tests.forged import changed, leaves

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.05),
}


class Net(nn.Module):
    def __init__(self, width=4, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(3, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.last = nn.Linear(width, width, dtype=dtype)
        self.tied = self.last.weight
        self.scale = nn.Parameter(torch.ones(2, dtype=dtype))
        self.register_buffer("flag", torch.tensor(True))
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.scale.sum()


def train(model, optimizer, comm, steps):
    rows = torch.arange(12.0, dtype=torch.float64).view(4, 3).sin()
    losses = []
    for _ in range(steps):
        note_forward(model)
        optimizer.zero_grad()
        loss = (model(rows) ** 2).sum() / comm.size
        loss.backward()
        sync_gradients(model, comm)
        optimizer.step()
        losses.append(loss.item() * comm.size)
    return losses


def begin(comm, optimizer="adam"):
    model = Net()
    sync_parameters(model, comm)
    return model, OPTIMIZERS[optimizer](model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_stopped(tmp_path, name, ranks):
    def first(comm):
        model, optimizer = begin(comm, name)
        train(model, optimizer, comm, 3)
        save_checkpoint(tmp_path / "a", comm, model, optimizer, epoch=3)
        return train(model, optimizer, comm, 3)

    def second(comm):
        model, optimizer = begin(comm, name)
        found = load_checkpoint(str(tmp_path / "a"), comm, model, optimizer)
        assert found["epoch"] == 3 and found["extra"] is None
        assert found["random"] == ("restored" if comm.size == 2 else "derived")
        assert model.tied is model.last.weight and model.flag.item()
        return train(model, optimizer, comm, 3)

    expected = run(first, 2)[0]
    for losses in run(second, ranks):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_extra_comes_back_with_its_types(tmp_path):
    extra = {
        "best": 0.5, "nan": float("inf"), "text": "ä", 3: (1, [True, None, (2.5,)]), "t": torch.arange(3)[::2],
        "half": torch.ones(2, 2).bfloat16().T, "empty": torch.zeros(0, 3), "z": torch.tensor(1), "nested": {"a": {}},
        "a": {"b": torch.tensor([1.0]), "b+": torch.tensor([2.0])}, "a/b": torch.tensor([3.0]),
    }  # fmt: skip

    def body(comm):
        model = Net()
        save_checkpoint(tmp_path / "a", comm, model, extra=extra)
        return load_checkpoint(tmp_path / "a", comm, model)["extra"]

    for found in run(body, 2):
        assert found.keys() == extra.keys() and {key: float(t) for key, t in found["a"].items()} == {"b": 1, "b+": 2}
        assert found[3] == extra[3] and type(found[3]) is tuple
        for key, value in extra.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[key], value) and found[key].dtype == value.dtype
            elif key != "a":
                assert found[key] == value


def test_the_random_state_is_restored(tmp_path):
    def body(comm):
        save_checkpoint(tmp_path / "a", comm, Net())
        expected = torch.rand(3)
        load_checkpoint(tmp_path / "a", comm, Net())
        return torch.equal(torch.rand(3), expected)

    assert run(body, 1) == [True]


def test_on_another_number_of_ranks_the_random_state_is_derived_reproducibly(tmp_path):
    run(lambda comm: save_checkpoint(tmp_path / "a", comm, Net()), 2)

    def body(comm):
        draws = []
        for _ in range(2):
            load_checkpoint(tmp_path / "a", comm, Net())
            draws.append(torch.rand(3).tolist())
        return draws

    ((first, second),) = run(body, 1)
    assert first == second


def test_derived_random_numbers_differ_by_rank_and_number_of_ranks(tmp_path, monkeypatch):
    """Ranks that are threads draw from one generator: what each seeds it with is noted."""

    def seeds(path, ranks):
        noted = {}
        with monkeypatch.context() as patch:

            def load(comm):
                patch.setattr(torch, "manual_seed", lambda seed: noted.__setitem__(threading.get_ident(), seed))
                load_checkpoint(path, comm, Net())
                return noted[threading.get_ident()]

            return run(load, ranks)

    for number in (1, 2):
        torch.manual_seed(number)
        run(lambda comm: save_checkpoint(tmp_path / str(number), comm, Net()), 2)  # noqa: B023
    text, tensors = read_verified(tmp_path / "1")
    tensors["random/cpu@1"] = tensors["random/cpu@1"].flip(0)
    write_verified(tmp_path / "other rank", tensors, text)
    three = seeds(tmp_path / "1", 3)
    assert len({*three}) == 3 and seeds(tmp_path / "1", 3) == three == seeds(tmp_path / "other rank", 3)
    assert len({*three, *seeds(tmp_path / "2", 3), *seeds(tmp_path / "1", 1), *seeds(tmp_path / "1", 4)}) == 11


def test_a_random_state_that_torch_refuses_is_told(tmp_path):
    run(lambda comm: save_checkpoint(tmp_path / "a", comm, Net()), 2)
    text, tensors = read_verified(tmp_path / "a")
    tensors |= {f"random/cpu@{rank}": torch.zeros(3, dtype=torch.uint8) for rank in range(2)}
    write_verified(tmp_path / "a", tensors, text)

    def body(comm):
        with pytest.raises(CheckpointError, match=r"the random state could not be restored: .*\(found on rank 0\)"):
            load_checkpoint(tmp_path / "a", comm, Net())

    run(body, 2)


def test_only_the_first_rank_reaches_the_file(tmp_path):
    (tmp_path / "a file").touch()

    def body(comm):
        path = tmp_path / "a file" / "a" if comm.rank else tmp_path / "a"
        save_checkpoint(path, comm, Net(), epoch=4)
        return load_checkpoint(path, comm, Net())["epoch"]

    assert run(body, 3) == [4, 4, 4]


def test_what_ranks_exchange_says_so(tmp_path):
    """The words by which an error names the collective that a rank is missing from."""

    def body(inner):
        comm = Ranks(RecordingCommunicator(inner))
        model, optimizer = table_step(comm, 1)
        del comm.inner.messages[:]
        save_checkpoint(tmp_path / "a", comm, model, optimizer, graph=PARTITION)
        saving = {message.label for message in comm.inner.messages}
        del comm.inner.messages[:]
        load_checkpoint(tmp_path / "a", comm, model, optimizer, graph=PARTITION)
        return saving, {message.label for message in comm.inner.messages}

    state = {f"checkpoint optimizer/state/0/{name}" for name in ("exp_avg", "exp_avg_sq")}
    saving = {"checkpoint verdict", "checkpoint parameters", "checkpoint random states", "checkpoint random/cpu"}
    loading = {"checkpoint verdict", "checkpoint manifest", "checkpoint rows", "load_checkpoint"}
    assert run(body, 2) == [({*saving, *state, "checkpoint model/table"}, loading)] * 2


class Partition:
    fingerprint, partition_fingerprint = "of a graph", "of a partition"


PARTITION = Partition()


class Table(nn.Module):
    def __init__(self, num_rows, value):
        super().__init__()
        self.table = nn.Parameter(torch.full((num_rows, 2), float(value)))
        self.table.shardpass_local = True
        self.shared = nn.Parameter(torch.ones(2))


def table_step(comm, value):
    model = Table(comm.rank + 1, value)
    optimizer = torch.optim.Adam(model.parameters())
    ((model.table * model.shared).sum() * (comm.rank + 1)).backward()
    sync_gradients(model, comm)
    optimizer.step()
    return model, optimizer


def test_rows_owned_by_ranks_are_kept_per_rank(tmp_path):
    def body(comm):
        model, optimizer = table_step(comm, comm.rank)
        save_checkpoint(tmp_path / "a", comm, model, optimizer, graph=PARTITION)
        other, other_optimizer = table_step(comm, 7)
        with pytest.raises(CheckpointError, match="belong to the nodes of one partition: pass graph="):
            load_checkpoint(tmp_path / "a", comm, other, other_optimizer)
        load_checkpoint(tmp_path / "a", comm, other, other_optimizer, graph=PARTITION)
        assert torch.equal(other.table, model.table)
        alone = Table(comm.rank + 1, 9)
        assert load_checkpoint(tmp_path / "a", comm, alone, graph=PARTITION)["random"] == "restored"
        assert torch.equal(alone.table, model.table)
        left, right = optimizer.state[model.table], other_optimizer.state[other.table]
        return all(torch.equal(left[key], right[key]) for key in ("step", "exp_avg", "exp_avg_sq"))

    assert all(run(body, 3))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_owned_by_ranks_load_on_any_number_of_ranks(tmp_path, ranks):
    def save(comm):
        model, optimizer = table_step(comm, comm.rank)
        save_checkpoint(tmp_path / "a", comm, model, optimizer, graph=PARTITION)
        return model.table.detach(), optimizer.state[model.table]["exp_avg"]

    saved = run(save, 3)
    share = {1: [6], 2: [1, 5], 4: [2, 0, 3, 1]}[ranks]

    def elsewhere(comm):
        model = Table(share[comm.rank], 0)
        optimizer = torch.optim.Adam(model.parameters())
        load_checkpoint(tmp_path / "a", comm, model, optimizer, graph=PARTITION)
        return model.table.detach(), optimizer.state[model.table]["exp_avg"]

    for mine, theirs in zip(zip(*saved), zip(*run(elsewhere, ranks))):
        assert torch.equal(torch.cat(mine), torch.cat(theirs))

    def of_another_length(comm):
        with pytest.raises(CheckpointError, match=r"'table' is float32 \[6, 2\] in the checkpoint, float32 \[5, 2\]"):
            load_checkpoint(tmp_path / "a", comm, Table(5, 0), graph=PARTITION)

    run(of_another_length, ranks)


class Alike(Table):
    """A table under two names, and ordinary parameters that look like it."""

    def __init__(self, num_rows, value):
        super().__init__(num_rows, value)
        self.tied = self.table
        self.shared, self.table2 = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.full((2, 2), 3.0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_looks_like_a_table_is_none(ranks, tmp_path):
    def save(comm):
        model = Alike(2, comm.rank)
        optimizer = torch.optim.Adam(model.parameters())
        (model.table.sum() * (comm.rank + 1) + model.shared.sum() + model.table2.sum()).backward()
        sync_gradients(model, comm)
        optimizer.step()
        save_checkpoint(tmp_path / "a", comm, model, optimizer, graph=PARTITION)
        save_checkpoint(tmp_path / "b", comm, model, graph=PARTITION)
        return [*model.state_dict().values()], [optimizer.state[p]["exp_avg"] for p in model.parameters()]

    def load(comm):
        model = Alike(4 // comm.size, 9)
        optimizer = torch.optim.Adam(model.parameters())
        alone = Alike(4 // comm.size, 9)
        load_checkpoint(tmp_path / "a", comm, model, optimizer, graph=PARTITION)
        load_checkpoint(tmp_path / "b", comm, alone, graph=PARTITION)
        assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))
        return [*model.state_dict().values()], [optimizer.state[p]["exp_avg"] for p in model.parameters()]

    names = [[*Alike(2, 0).state_dict()], [name for name, _ in Alike(2, 0).named_parameters()]]
    for kind, saved, found in zip(names, zip(*run(save, 2)), zip(*run(load, ranks))):
        for name, *tensors in zip(kind, zip(*saved), zip(*found)):
            before, after = (torch.cat(parts) if name in ("table", "tied") else parts[-1] for parts in tensors)
            assert torch.equal(before, after), name


def test_a_rank_without_the_table_is_told_on_all(tmp_path):
    run(lambda comm: save_checkpoint(tmp_path / "a", comm, table_step(comm, 1)[0], graph=PARTITION), 2)

    def body(comm):
        words = r"'table' is float32 \[3, 2\] in the checkpoint, missing in the model \(found on rank 2\)"
        model = nn.Identity() if comm.rank == 2 else Table(comm.rank + 1, 0)
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path / "a", comm, model, graph=PARTITION)

    run(body, 3)


def test_a_table_of_the_model_is_none_of_the_checkpoint(tmp_path):
    """It was an ordinary parameter with as many rows as the ranks have together."""

    def body(comm):
        model = Table(3, 0)
        model.table.shardpass_local = False
        save_checkpoint(tmp_path / "a", comm, model, graph=PARTITION)
        words = r"'table' is float32 \[3, 2\] in the checkpoint, float32 \[1, 2\] in the model \(found on rank 0\)"
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path / "a", comm, Table(comm.rank + 1, 0), graph=PARTITION)

    run(body, 2)


class Extra(nn.Linear):
    """A module whose state is more than tensors."""

    def __init__(self, value):
        super().__init__(1, 1)
        nn.init.ones_(self.weight), nn.init.ones_(self.bias)
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def test_state_that_is_no_tensor(tmp_path):
    def body(comm):
        save_checkpoint(tmp_path / "a", comm, Extra({"seen": 3}))
        save_checkpoint(tmp_path / "b", comm, Extra(torch.ones(2)))
        model = Extra({"seen": 0})
        load_checkpoint(tmp_path / "a", comm, model)
        assert model.value == {"seen": 3}
        words = r"'_extra_state' is {} in the checkpoint, {} in the model"
        with pytest.raises(CheckpointError, match=words.format("no tensor", r"float32 \[2\]")):
            load_checkpoint(tmp_path / "a", comm, Extra(torch.ones(2)))
        with pytest.raises(CheckpointError, match=words.format(r"float32 \[2\]", "no tensor")):
            load_checkpoint(tmp_path / "b", comm, model)

    run(body, 2)


def test_modules_are_told_the_version_of_what_they_load(tmp_path):
    class Versioned(Net):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
            self.found = local_metadata["version"]
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def body(comm):
        model = Versioned()
        save_checkpoint(tmp_path / "a", comm, model)
        load_checkpoint(tmp_path / "a", comm, model)
        return model.found

    assert run(body, 2) == [7, 7]


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
    for size in (0, 5, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "torn").write_bytes(content[:size])
        refused(tmp_path / "torn", r"torn' is torn, or something else: .*found on rank 0")
    for position in (-1, -1000, content.index(b"epoch") + 10):
        altered = bytearray(content)
        altered[position] ^= 1
        (tmp_path / "altered").write_bytes(bytes(altered))
        refused(tmp_path / "altered", "altered' (was altered or damaged: its checksum|is torn)")
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "other")
    refused(tmp_path / "other", "other' is no file of shardpass")


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


@pytest.mark.parametrize(
    "text", ["[" * 10**6, "{", "[]", "1", '{"format": 2}', '{"format": 1}', json.dumps({"format": 1, "local": {}})]
)
def test_manifests_that_are_none(tmp_path, text):
    write_verified(tmp_path / "a", {"rows": torch.ones(1)}, text)
    refused(tmp_path / "a", "a' is not as save_checkpoint writes it: ")


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


def test_missing_folders_are_made(tmp_path):
    write(tmp_path / "new" / "folder" / "a")
    assert run(lambda comm: load_checkpoint(tmp_path / "new" / "folder" / "a", comm, Net())["epoch"], 1) == [0]


def test_another_file_of_shardpass_is_no_checkpoint(tmp_path):
    write_verified(tmp_path / "entry", {"rows": torch.ones(1)})
    refused(tmp_path / "entry", "entry' is no checkpoint")


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
        r"^the checkpoint '.*a' was written for another graph: g1, this is g2. Load it with the store",
        graph=other,
    )
    other = SimpleNamespace(fingerprint="g1", partition_fingerprint="p2")
    refused(tmp_path / "a", "was written for another partition: p1, this is p2", graph=other)


def test_one_rank_that_does_not_fit_is_told_on_all(tmp_path):
    write(tmp_path / "a")

    def body(comm):
        model = Net(4 + comm.rank)
        with pytest.raises(CheckpointError, match=r"float64 \[5, 5\] in the model \(found on rank 1\)"):
            load_checkpoint(tmp_path / "a", comm, model)
        return True

    assert all(run(body, 2))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"a": [object()]}, "extra/a/0 is a object; a checkpoint holds tensors, numbers"),
        ({1.5: 1}, "extra has the key 1.5; keys in a checkpoint are strings or integers"),
        (torch.eye(2).to_sparse(), "extra is a sparse tensor"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path, extra, text):
    def body(comm):
        with pytest.raises(CheckpointError, match=text + r".*\(found on rank 1\)"):
            save_checkpoint(tmp_path / "a", comm, Net(), extra=extra if comm.rank == 1 else None)
        return True

    assert all(run(body, 2))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path / "a", epoch=1)
    content = (tmp_path / "a").read_bytes()

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)

    def body(comm):
        with pytest.raises(CheckpointError, match=r"a' could not be written: no space left .*\(found on rank 0\)"):
            save_checkpoint(tmp_path / "a", comm, Net())
        with pytest.raises(CheckpointError, match="could not be written"):
            save_checkpoint(tmp_path / "a" / "b", comm, Net())
        return True

    assert all(run(body, 2))
    assert (tmp_path / "a").read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shardpass.core.training.checkpoint.FORMAT", 9)
    write(tmp_path / "a")
    monkeypatch.undo()
    refused(tmp_path / "a", "has format 9, this version reads format 1")


def test_the_header_is_plain_json(tmp_path):
    from safetensors import safe_open

    write(tmp_path / "a", epoch=4)
    with safe_open(tmp_path / "a", framework="pt") as file:
        manifest = json.loads(file.metadata()["shardpass"])
    assert manifest["epoch"] == 4 and manifest["ranks"] == 2 and manifest["optimizer"]["class"] == "AdamW"


def test_a_state_that_torch_refuses_is_told_on_all(tmp_path):
    class Picky(Net):
        def load_state_dict(self, *args, **kwargs):
            raise RuntimeError("picky")

    write(tmp_path / "a")
    refused(tmp_path / "a", "the state could not be restored: picky", Picky)


def test_parameters_that_drifted_apart_are_not_saved(tmp_path):
    def work(comm):
        model = Net()
        if comm.rank == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-6
        with pytest.raises(CheckpointError, match="differs between rank 0 and rank 1"):
            save_checkpoint(tmp_path / "a", comm, model)
        return (tmp_path / "a").exists()

    assert run(work, 3) == [False] * 3
