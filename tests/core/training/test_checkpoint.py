"""Checkpoints: what is saved comes back, and whatever does not fit is refused on every rank."""

import threading

import pytest
import torch
from checkpoint_cases import OPTIMIZERS, Net, begin, train
from torch import nn

from shardpass.backends import RecordingCommunicator
from shardpass.core.ranks import Ranks
from shardpass.core.training import load_checkpoint, read_verified, save_checkpoint, sync_gradients, write_verified
from shardpass.errors import CheckpointError
from shardpass.testing import run

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")


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


@pytest.mark.ranks(2)
def test_extra_comes_back_with_its_types(comm, tmp_path):
    extra = {
        "best": 0.5, "nan": float("inf"), "text": "ä", 3: (1, [True, None, (2.5,)]), "t": torch.arange(3)[::2],
        "half": torch.ones(2, 2).bfloat16().T, "empty": torch.zeros(0, 3), "z": torch.tensor(1), "nested": {"a": {}},
        "a": {"b": torch.tensor([1.0]), "b+": torch.tensor([2.0])}, "a/b": torch.tensor([3.0]),
    }  # fmt: skip
    model = Net()
    save_checkpoint(tmp_path / "a", comm, model, extra=extra)
    found = load_checkpoint(tmp_path / "a", comm, model)["extra"]
    assert found.keys() == extra.keys() and {key: float(t) for key, t in found["a"].items()} == {"b": 1, "b+": 2}
    assert found[3] == extra[3] and type(found[3]) is tuple
    for key, value in extra.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value) and found[key].dtype == value.dtype
        elif key != "a":
            assert found[key] == value


@pytest.mark.ranks(1)
def test_the_random_state_is_restored(comm, tmp_path):
    save_checkpoint(tmp_path / "a", comm, Net())
    expected = torch.rand(3)
    load_checkpoint(tmp_path / "a", comm, Net())
    assert torch.equal(torch.rand(3), expected)


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
    saving = {"checkpoint verdict", "the same model on every rank", "checkpoint random states", "checkpoint random/cpu"}
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


@pytest.mark.ranks(3)
def test_rows_owned_by_ranks_are_kept_per_rank(comm, tmp_path):
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
    assert all(torch.equal(left[key], right[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.ranks(2)
def test_rows_owned_by_ranks_in_a_module_whose_name_has_slashes(comm, tmp_path):
    model, other = (nn.ModuleDict({"author/writes/paper": Table(comm.rank + 1, value)}) for value in (comm.rank, 7))
    save_checkpoint(tmp_path / "a", comm, model, graph=PARTITION)
    load_checkpoint(tmp_path / "a", comm, other, graph=PARTITION)
    assert torch.equal(other["author/writes/paper"].table, model["author/writes/paper"].table)


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
        words = r"'table' is float32 \[3, 2\] in the checkpoint, missing in the model.* \(found on rank 2\)"
        model = nn.Identity() if comm.rank == 2 else Table(comm.rank + 1, 0)
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path / "a", comm, model, graph=PARTITION)

    run(body, 3)


@pytest.mark.ranks(2)
def test_a_table_of_the_model_is_none_of_the_checkpoint(comm, tmp_path):
    """It was an ordinary parameter with as many rows as the ranks have together."""
    model = Table(3, 0)
    model.table.shardpass_local = False
    save_checkpoint(tmp_path / "a", comm, model, graph=PARTITION)
    words = r"'table' is float32 \[3, 2\] in the checkpoint, float32 \[1, 2\] in the model.* \(found on rank 0\)"
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path / "a", comm, Table(comm.rank + 1, 0), graph=PARTITION)


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


@pytest.mark.ranks(2)
def test_state_that_is_no_tensor(comm, tmp_path):
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


@pytest.mark.ranks(2)
def test_modules_are_told_the_version_of_what_they_load(comm, tmp_path):
    class Versioned(Net):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
            self.found = local_metadata["version"]
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    model = Versioned()
    save_checkpoint(tmp_path / "a", comm, model)
    load_checkpoint(tmp_path / "a", comm, model)
    assert model.found == 7
