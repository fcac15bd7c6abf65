"""`shardpass train` in this process: what it logs, prints and refuses; the same losses on every number of ranks."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import epochs, misused, passed, records, refused
from torch_geometric.nn import GraphSAGE

import shardpass as sp
from shardpass.cli import reporter
from shardpass.cli.graphs import powerlaw
from shardpass.data import partition


def losses(log: Path) -> list[float]:
    return [record["loss"] for record in epochs(log)]


def run(store: Path, log: Path, *arguments: object) -> str:
    return passed("train", store, "--hidden", 8, "--lr", 0.02, "--log", log, "--dtype", "float64", *arguments)


LATER = [pytest.param(model, marks=pytest.mark.long) for model in ("gcn", "sage", "gin", "pna", "edgecnn")]


@pytest.mark.parametrize("model", ["gat", *LATER])
def test_every_model_gives_the_same_losses_on_three_ranks_as_on_one(model: str, store: Path, tmp_path: Path) -> None:
    for ranks in (1, 3):
        run(store, tmp_path / f"{ranks}.jsonl", "--model", model, "--epochs", 3, "--ranks", ranks)
    one, three = losses(tmp_path / "1.jsonl"), losses(tmp_path / "3.jsonl")
    assert len(one) == 3 and one[2] < one[0]
    assert three == pytest.approx(one, rel=1e-9)


def test_log_and_output(store: Path, tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log.jsonl"
    text = run(store, log, "--epochs", 4, "--ranks", 2, "--batch-norm", "--dropout", 0.1, "--eval-every", 2)
    lines = epochs(log)
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert "test" not in lines[0] and {"train", "val", "test", "seconds", "bytes_sent"} <= set(lines[1])
    summary = records(log)[-1]
    assert summary["event"] == "summary" and summary["ranks"] == 2 and summary["loss"] == lines[-1]["loss"]
    assert len(summary["peak_bytes"]) == 2 and summary["peak_is_of_all_ranks"] and summary["config"]["dropout"] == 0.1
    assert sum(summary["nodes"]) == 600 and all(sent > 0 for sent in summary["bytes_sent"])
    assert "2 ranks" in text and "epoch    4/4" in text and f"{lines[-1]['test']:.4f}" in text
    assert "they share one process" in text


@pytest.mark.long
@pytest.mark.processes
def test_a_trace_of_one_epoch_of_each_rank_shows_the_rounds(store: Path, tmp_path: Path) -> None:
    trace = tmp_path / "folder" / "trace.json"
    common = ("--epochs", 3, "--eval-every", 3, "--model", "gat", "--profile", trace)
    run(store, tmp_path / "log", *common, "--ranks", 2)
    assert not records(tmp_path / "log")[-1]["peak_is_of_all_ranks"], "they are processes"
    written = sorted(trace.parent.iterdir())
    assert [file.name for file in written] == ["trace.rank0.json", "trace.rank1.json"]
    rounds = (
        "send in round 0 (",
        "compute own block (",
        "wait for block 1 (",
        "compute block 1 (",
        "wait for gradients",
    )
    for file in written:
        names = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
        assert not [words for words in rounds if not any(name.startswith(words) for name in names)]
    told = refused("train", store, *common, "--ranks", 2, "--backend", "threads")
    assert "--profile cannot trace ranks that are threads" in told


def test_modes_agree(store: Path, tmp_path: Path) -> None:
    for mode in ("sar", "keep", "halo"):
        run(store, tmp_path / mode, "--epochs", 2, "--ranks", 2, "--mode", mode, "--model", "gat", "--eval-every", 2)
    run(store, tmp_path / "again", "--epochs", 2, "--ranks", 2, "--recompute", "--model", "gat", "--eval-every", 2)
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "sar"), rel=1e-9)
    assert losses(tmp_path / "keep") == pytest.approx(losses(tmp_path / "sar"), rel=1e-9)
    assert losses(tmp_path / "halo") == pytest.approx(losses(tmp_path / "sar"), rel=1e-9)


def test_resume_on_another_number_of_ranks_continues_the_curve(store: Path, tmp_path: Path) -> None:
    common = ("--epochs", 6, "--eval-every", 6)
    run(store, tmp_path / "whole", *common, "--ranks", 3)
    checkpoint = ("--checkpoint", tmp_path / "c.safetensors", "--eval-every", 6)
    text = run(store, tmp_path / "parts", *checkpoint, "--epochs", 2, "--ranks", 4, "--resume")
    assert "no checkpoint at" in text and "starting at epoch 1" in text
    for ranks, last in ((2, 4), (1, 6)):
        text = run(store, tmp_path / "parts", *checkpoint, "--epochs", last, "--ranks", ranks, "--resume")
        assert f"at epoch {last - 1}" in text
    assert [line["epoch"] for line in epochs(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    run(store, tmp_path / "parts", *checkpoint, "--epochs", 6, "--ranks", 1, "--resume")
    assert len(epochs(tmp_path / "parts")) == 6, "nothing is left to do"


def test_resume_refuses_what_does_not_fit(store: Path, tmp_path: Path) -> None:
    checkpoint = ("--checkpoint", tmp_path / "c")
    run(store, tmp_path / "log", "--epochs", 1, *checkpoint)
    assert "does not fit the model" in refused("train", store, "--hidden", 16, "--epochs", 2, *checkpoint, "--resume")
    assert "give its name" in refused("train", store, "--resume")
    again = ("train", store, "--hidden", 8, "--dtype", "float64", "--epochs", 2, *checkpoint)
    for option, words in (
        (("--lr", 0.5), "has --lr 0.02, and 0.5 would not take effect: give --lr 0.02"),
        ((), "has --lr 0.02, and 0.01 would not take effect"),
        (("--lr", 0.02, "--seed", 3), "has --seed 0, and 3 would not"),
        (("--lr", 0.02, "--weight-decay", 0.1), "has --weight-decay 0.0, and 0.1 would not"),
        (("--lr", 0.02, "--mask-prefix", "a"), "the store has no node field"),
    ):
        assert words in refused(*again, *option, "--resume")
    passed(*again, "--lr", 0.02, "--patience", 7, "--resume")
    assert "begins anew" in refused(*again, "--resume", "--overwrite")


def test_a_file_of_another_run_is_not_overwritten(store: Path, tmp_path: Path) -> None:
    for option in ("--checkpoint", "--best"):
        run(store, tmp_path / "log", "--epochs", 3, option, tmp_path / "c")
        before = (tmp_path / "c").read_bytes()
        told = refused("train", store, "--epochs", 1, option, tmp_path / "c", "--ranks", 2)
        assert (
            f"{option} {tmp_path / 'c'} is there already, from another run" in told
            and "--overwrite begins anew" in told
        )
        assert ("--resume goes on" in told) == (option == "--checkpoint") and (tmp_path / "c").read_bytes() == before
        run(store, tmp_path / "log", "--epochs", 1, option, tmp_path / "c", "--overwrite")
        assert (tmp_path / "c").read_bytes() != before
        (tmp_path / "c").unlink()
    script = tmp_path / "of a script"
    sp.spawn(lambda comm: sp.save_checkpoint(script, comm, GraphSAGE(12, 64, 2, 4), None), 1)
    words = refused("train", store, "--checkpoint", script, "--resume")
    assert "holds no optimizer state" in words


def test_early_stopping_keeps_the_best_and_goes_on_after_a_break(store: Path, tmp_path: Path) -> None:
    stops = ("--patience", 4, "--eval-every", 2, "--epochs", 80)
    files = ("--best", tmp_path / "best", "--plot", tmp_path / "p.png", "--log-csv", tmp_path / "table.csv")
    text = run(store, tmp_path / "whole", *stops, *files, "--ranks", 2)
    summary, table = records(tmp_path / "whole")[-1], (tmp_path / "table.csv").read_text().splitlines()
    best = summary["best"]
    assert summary["epochs"] == best["epoch"] + 4 < 80 and summary["ended_early"] and "ended early: no better" in text
    assert table[0] == "epoch,loss,train,val,test,seconds,bytes_sent" and len(table) == 1 + summary["epochs"]
    first, second = (dict(zip(table[0].split(","), row.split(","))) for row in table[1:3])
    assert first["epoch"] == "1" and first["val"] == "" and float(second["val"]) > 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    passed("infer", store, tmp_path / "out.npy", "--weights", tmp_path / "best", "--hidden", 8, "--dtype", "float64")
    arrays = powerlaw(600, 8, channels=12, classes=4)
    right = np.load(tmp_path / "out.npy").argmax(1) == arrays["y"]
    assert right[arrays["val_mask"]].mean() == pytest.approx(best["val"])
    for last, ranks in ((best["epoch"] + 2, 3), (80, 2), (80, 1)):  # a break, the end, and after the end
        resumed = ("--checkpoint", tmp_path / "c", "--resume", "--log-csv", tmp_path / "parts.csv")
        run(store, tmp_path / "parts", *stops, *resumed, "--ranks", ranks, "--epochs", last)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    assert len((tmp_path / "parts.csv").read_text().splitlines()) == len(table), "one header, and each epoch once"


def test_tensorboard_or_a_sentence(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    told = refused("train", store, "--tensorboard", tmp_path / "runs", "--ranks", 2)
    assert "--tensorboard needs the package 'tensorboard', which is not installed: pip install tensorboard, or" in told
    points: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "runs")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            points.append((name, value, step))

        def close(self) -> None:
            points.append(("closed", 0, 0))

    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(SummaryWriter=Writer))
    run(store, tmp_path / "log", "--tensorboard", tmp_path / "runs", "--epochs", 2, "--ranks", 2)
    expected = [(key, line[key], line["epoch"]) for line in epochs(tmp_path / "log") for key in ("loss", "val")]
    assert set(expected) < set(points) and points[-1][0] == "closed"
    assert [name for name, *_ in points].count("peak_bytes_of_rank") == 2


@pytest.mark.parametrize("option", ["--checkpoint", "--profile", "--log", "--best", "--log-csv", "--plot"])
def test_files_that_cannot_be_written_are_told_before_training(option: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    suffix = ".png" if option == "--plot" else ""
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"folder{suffix}").mkdir()
    for name, words in (("a file/c", "cannot be written"), ("folder", "is a folder"), ("zero", "no regular file")):
        if option in ("--log", "--log-csv") and name == "zero":
            continue  # a log may go to a device
        assert words in refused("train", tmp_path / "no store yet", option, tmp_path / f"{name}{suffix}")
    passed("train", store, "--epochs", 1, option, tmp_path / "new" / "folder" / f"c{suffix}")
    assert (tmp_path / "new" / "folder" / f"c{suffix}").is_file()


def test_a_picture_of_a_kind_that_nobody_draws(tmp_path: Path) -> None:
    told = refused("train", tmp_path / "no store yet", "--plot", tmp_path / "run.doc", "--ranks", 2)
    assert "--plot" in told and "a picture ends in ." in told and ".png" in told


def test_a_loss_that_is_not_finite_ends_training_on_all_ranks(store: Path, tmp_path: Path) -> None:
    arrays = powerlaw(120, 6, channels=3)
    arrays["x"][5, 1:] = np.nan, np.inf
    partition(arrays, tmp_path / "nan", 2, "random")
    for ranks in (1, 2):
        told = refused("train", tmp_path / "nan", "--ranks", ranks, "--checkpoint", tmp_path / "c")
        assert "the loss is nan, and training has ended" in told and ": 2 values of x are NaN or infinite" in told
    assert not (tmp_path / "c").exists()
    assert "try a lower --lr" in refused("train", store, "--lr", 1e30, "--ranks", 2)


def test_classes_without_nodes_are_told(store: Path, tmp_path: Path) -> None:
    assert "\n4 classes\n" in passed("train", store, "--epochs", 1)
    arrays = powerlaw(120, 6, channels=3, classes=3)
    partition(arrays | {"y": 10 + 10 * arrays["y"]}, tmp_path / "tens", 2, "random")
    told = " ".join(passed("train", tmp_path / "tens", "--epochs", 1, "--ranks", 2).split())
    assert "31 classes, of which 28 have no node, such as 0: the model has an output for each" in told


def test_missing_fields_are_named(tmp_path: Path) -> None:
    arrays = powerlaw(120, 6, channels=3)
    masks = {name: arrays.pop(name) for name in list(arrays) if name.endswith("_mask")}
    cases = {
        "x": ({k: v for k, v in arrays.items() if k != "x"} | masks, "has no node features: no node field 'x'"),
        "y": ({k: v for k, v in arrays.items() if k != "y"} | masks, "has no labels: no node field 'y'"),
        "mask": (arrays, "has no node field 'train_mask' (node fields: x, y): partition with masks: --train-mask"),
        "made": (arrays | {f"made_{k}": v for k, v in masks.items()}, "use --mask-prefix made_"),
        "float": (
            arrays | masks | {"y": np.ones(120, np.float32)},
            "if they are class ids, write them as integers (2, not 2.0) and nothing or -1 for none; else",
        ),
        "column": (arrays | masks | {"y": arrays["y"][:, None]}, "on this rank: partition with y.squeeze(1)"),
        "two": (
            arrays | masks | {"y": np.ones((120, 2), np.float32)},
            "write a training script for other targets, which `shardpass new`",
        ),
    }
    for name, (data, words) in cases.items():
        partition(data, tmp_path / name, 2, "random")
        if name == "mask":
            data = arrays | {"train_mask": masks["train_mask"]}
            partition(data, tmp_path / "no val", 2, "random")
            assert "no node field 'val_mask'" in refused("train", tmp_path / "no val", "--patience", 3)
        assert words in refused("train", tmp_path / name, "--ranks", 2)
    passed("train", tmp_path / "made", "--mask-prefix", "made_", "--epochs", 1)


def test_the_first_compilation_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(reporter.kernels, "__file__", str(tmp_path / "__init__.py"))
    assert "compiles loops" in reporter.first_compilation()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "loops.nbc").touch()
    assert reporter.first_compilation() == ""


def test_the_names_of_dgl(tmp_path: Path) -> None:
    """A graph of DGL has ``feat`` and ``label``, and trains and predicts as one with ``x`` and ``y`` does."""
    arrays = powerlaw(120, 6, channels=3)
    partition(arrays, tmp_path / "pyg", 2, "random")
    arrays["feat"], arrays["label"] = arrays.pop("x"), arrays.pop("y")
    arrays["train_mask"] = arrays["train_mask"].astype(np.uint8)  # as DGL writes booleans to files
    partition(arrays, tmp_path / "dgl", 2, "random")
    outputs = []
    for name in ("pyg", "dgl"):
        log, best, out = (tmp_path / f"{name}{ending}" for ending in (".jsonl", ".ckpt", ".npy"))
        passed("train", tmp_path / name, "--epochs", 3, "--ranks", 2, "--log", log, "--best", best)
        passed("infer", tmp_path / name, out, "--weights", best)
        outputs.append(([epoch["loss"] for epoch in epochs(log)], np.load(out)))
    assert outputs[0][0] == outputs[1][0] and np.array_equal(outputs[0][1], outputs[1][1])


def test_splits_and_unlabelled_nodes(tmp_path: Path) -> None:
    arrays = powerlaw(120, 6, channels=3)
    arrays["train_mask"] = np.stack([np.zeros(120, bool), arrays["train_mask"]], 1)
    arrays["y"][arrays["test_mask"].nonzero()[0][:5]] = -1
    partition(arrays, tmp_path / "s", 2, "random")
    passed("train", tmp_path / "s", "--split", 1, "--epochs", 1, "--ranks", 2)
    assert "--split is in [0, 2), got 5" in refused("train", tmp_path / "s", "--split", 5)
    assert "train_mask selects no node with a label" in refused("train", tmp_path / "s", "--split", 0)

    arrays["y"][arrays["test_mask"]] = -1  # labels that are kept secret
    arrays["val_mask"][:] = False
    partition(arrays, tmp_path / "secret", 2, "random")
    told = passed("train", tmp_path / "secret", "--split", 1, "--epochs", 1, "--ranks", 2)
    assert "loss" in told and "test" not in told
    refusal = refused("train", tmp_path / "secret", "--split", 1, "--patience", 3)
    assert "val_mask selects no node with a label" in refusal


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gat", "--hidden", "6", "--heads", "4"), "--hidden 6 is not a multiple of --heads 4"),
        (("--ranks", "5"), "5 ranks, but the store has 4 parts"),
        (("--backend", "mpi", "--ranks", "3"), "ranks=3, but 1 process was started; start with `mpirun -n 3`"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str, store: Path) -> None:
    assert words in refused("train", store, *arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--model", "foo"), ("--mode", "fast"), ("--backend", "smoke"), ("--dtype", "int8"), ("--dropout", "1.5"),
     ("--epochs", "0")],
)  # fmt: skip
def test_options_out_of_range(option: str, value: str, store: Path) -> None:
    assert f"Invalid value for '{option}'" in misused("train", store, option, value)


def test_a_log_of_lines_instead_of_the_display(store: Path) -> None:
    lines = passed("train", store, "--epochs", 2, "--ranks", 2, "--hidden", 8, "--log", "-").splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["epoch", "epoch", "summary"]


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no directory" in refused("train", tmp_path / "nothere", "--ranks", 2)
