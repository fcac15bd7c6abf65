"""The command as a whole: its version, its help, and how it tells what nobody has foreseen."""

import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from cli_helpers import cli, passed, refused

import shardpass as sp
from shardpass.cli import app as app_module
from shardpass.cli.main import main
from shardpass.errors import InternalError, StoreError

COMMANDS = sorted(typer.main.get_command(app_module.app).commands)  # type: ignore[attr-defined]


def test_version() -> None:
    told = passed("--version").strip()
    assert told.startswith(f"shardpass {sp.__version__} (Python 3.") and torch.__version__ in told


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_whole_sentences(command: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets are markup, which swallows the words in them."""
    monkeypatch.setenv("COLUMNS", "200")
    text = passed(*([] if command is None else [command]), "--help")
    assert not re.search(r"\w[ ,]+\.(\s|$)", text), text
    if command is None:
        assert "--install-completion" in text and "--version" in text


@pytest.mark.parametrize("kind", [RuntimeError, InternalError, KeyError])
def test_what_nobody_has_foreseen_is_one_sentence_too(
    kind: type[Exception], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise kind("the engine has a hole")

    monkeypatch.delenv("SHARDPASS_DEBUG", raising=False)
    monkeypatch.setattr(app_module, "run_inspect", fail)
    told = refused("inspect", store)
    assert "the engine has a hole" in told and "test_command.py:" in told
    assert told.endswith("SHARDPASS_DEBUG=1 shows the traceback)")
    monkeypatch.setenv("SHARDPASS_DEBUG", "1")
    assert isinstance(cli("inspect", store).exception, kind)


def test_a_failing_rank_of_the_command_is_one_sentence(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> float:
        raise RuntimeError("expected m1 and m2 to have the same dtype")

    monkeypatch.delenv("SHARDPASS_DEBUG", raising=False)
    monkeypatch.setattr("shardpass.cli.training.TrainingRun.step", fail)
    assert "RuntimeError: expected m1" in refused("train", store, "--ranks", 2, "--epochs", 1)


@pytest.fixture(autouse=True)
def format_of_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` is a process of its own, and says for all of it how warnings look."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)


def test_a_warning_of_the_data_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "edges.npy", np.array([[0], [1]]))
    words = f"partition {tmp_path}/edges.npy {tmp_path}/parts --num-nodes 2 --parts 3 --method range"
    monkeypatch.setattr(sys, "argv", ["shardpass", *words.split()])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        warnings.simplefilter("default")
        monkeypatch.setattr(
            warnings, "showwarning", lambda *found: sys.stderr.write(warnings.formatwarning(*found[:4]))
        )
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 0 and told.startswith("Warning: the graph is written, but:\n1 of 3 parts have no node")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train parts --epoch 3", "Error: shardpass train: no such option: --epoch .*--epochs.*"),
        ("trian parts", "Error: shardpass: no such command 'trian'.*"),
        ("train parts --model gatt", "Error: shardpass train: invalid value for '--model': .*'gatt' is not one of .*"),
        ("train", "Error: shardpass train: missing argument .*"),
    ],
)
def test_what_is_typed_wrongly_is_one_sentence(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardpass", *words.split()])
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and re.fullmatch(rf"{told} `shardpass.* --help` tells what it takes", line), line


def test_the_command_alone_shows_its_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in {"": 2, "--help": 0, "--version": 0}.items():
        monkeypatch.setattr(sys, "argv", ["shardpass", *words.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = "".join(capsys.readouterr())
        assert ended.value.code == code and ("Usage: shardpass" in shown or shown.startswith("shardpass 0."))


def test_a_black_box_that_is_not_there(tmp_path: Path) -> None:
    assert "none.jsonl: doctor takes the files that the errors of a failed run name" in refused(
        "doctor", tmp_path / "none.jsonl"
    )


def test_errors_have_no_traceback_unless_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardpass", "inspect", str(tmp_path / "nothere")])
    monkeypatch.setenv("SHARDPASS_DEBUG", "1")
    with pytest.raises(StoreError, match="there is no directory"):  # of which Python shows the traceback
        main()
    monkeypatch.setenv("SHARDPASS_DEBUG", "")
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith("Error: there is no directory")
