"""What a script leaves on the screen when an error ends it: the lines of the user's own files, then one sentence."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardpass as sp
from shardpass.cli.launch import launcher_environment
from shardpass.errors import InternalError, RefusedError, shorten, shorten_tracebacks, tell_launcher

HEADER = "The lines of your own files (SHARDPASS_DEBUG=1 shows all):"
OF_A_MODEL = "RuntimeError: `x` is float64 and the parameters of GCN are float32"
SENTENCE = "ValueError: rank 0: gather takes one row per own node"
SCRIPT = """
import sys, torch, shardpass as sp

def step(comm, what):
    data = sp.load(sys.argv[1], comm)
    if what == "own":
        raise ValueError("boo")
    if what == "model":
        from torch_geometric.nn import GCN
        return sp.pyg.wrap(GCN(4, 8, 2, 3), comm)(data.x.double(), data)
    return sp.gather(data, data.x[1:])

if __name__ == "__main__":
    if sys.argv[2] == "hook":
        sys.excepthook = lambda *_: print("a hook of my own", file=sys.stderr)
    if sys.argv[2] == "processes":
        sp.spawn(step, 1, "processes", args=("gather",))
    step(sp.connect(), sys.argv[2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown")
    edge_index = torch.stack([torch.arange(20), (torch.arange(20) + 1) % 20])
    sp.partition({"edge_index": edge_index, "x": torch.randn(20, 4)}, path / "parts", parts=2, method="range")
    (path / "train.py").write_text(SCRIPT)
    return path


def shown(folder: Path, what: str, *launcher: str, **env: str) -> list[str]:
    """The lines of the standard error of a script that fails."""
    variables = launcher_environment() | {"OMP_NUM_THREADS": "1", "SHARDPASS_DEBUG": ""} | env
    words = [sys.executable, *launcher, "train.py", "parts", what]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()


@pytest.fixture
def shown_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., list[str]]:
    """As `shown`, in this process, which has the libraries: what a hook prints when Python is about to end."""

    def run(what: str, debug: str = "") -> list[str]:
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr(sys, "argv", ["train.py", "parts", what])
        monkeypatch.chdir(folder)
        monkeypatch.setenv("SHARDPASS_DEBUG", debug)
        try:
            exec(compile(SCRIPT, folder / "train.py", "exec"), {"__name__": "__main__"})
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__.tb_next)
        return capsys.readouterr().err.splitlines()

    return run


def test_an_error_of_ours_shows_the_users_lines_and_ends_with_its_sentence(shown_here: Callable) -> None:
    lines = shown_here("model")
    assert lines[:2] == [HEADER, "Traceback (most recent call last):"] and lines[-1].startswith(OF_A_MODEL)
    files = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert [Path(file).name for file in files] == ["train.py", "train.py"]


@pytest.mark.parametrize(("what", "debug"), [("gather", "1"), ("own", "")])
def test_all_lines_of_any_other_error_and_when_they_are_asked_for(shown_here: Callable, what: str, debug: str) -> None:
    lines = shown_here(what, debug)
    assert HEADER not in lines and lines[-1].startswith("ValueError: boo" if what == "own" else SENTENCE)
    assert any("/shardpass/core/" in line for line in lines) == (what == "gather")


def test_a_hook_of_the_user_stays(shown_here: Callable) -> None:
    assert shown_here("hook") == ["a hook of my own"]


@pytest.mark.processes
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 10**6], ids=["small", "more than a pipe"])
def test_a_script_without_a_main_guard_ends_with_one_sentence(tmp_path: Path, size: int) -> None:
    call = f"sp.spawn(print, 1, 'processes', args=(torch.zeros({size}),))"
    (tmp_path / "train.py").write_text(f"import torch, shardpass as sp\n{call}\n")
    lines = shown(tmp_path, "unguarded")
    assert lines[0] == HEADER and [line for line in lines if "Error" in line] == lines[-1:]
    assert "this one ended there: put the call of spawn" in lines[-1] and 'if __name__ == "__main__":' in lines[-1]


@pytest.mark.long
@pytest.mark.processes
def test_a_spawned_process_shows_where_it_was(folder: Path) -> None:
    lines = shown(folder, "processes")
    assert lines[0] == HEADER and not [line for line in lines if "/shardpass/core/" in line]
    assert any("data.x[1:]" in line for line in lines) and any("sp.spawn(step" in line for line in lines)


@pytest.mark.processes
def test_the_report_of_torchrun_ends_with_the_sentence(folder: Path) -> None:
    lines = shown(folder, "gather", "-m", "torch.distributed.run", "--nproc-per-node", "1")
    assert lines[-1].startswith("====") and SENTENCE in lines[-2] and lines[-2].startswith("  traceback :")


def raised(make: str, folder: Path) -> BaseException:
    """An error from a function whose module has the name of one of ours."""
    names = {"__name__": "shardpass.made_up", "InternalError": InternalError, "RefusedError": RefusedError}
    file = folder / f"made_up_{len(list(folder.iterdir()))}.py"
    file.write_text(f"def fail():\n    {make}")
    exec(compile(file.read_text(), file, "exec"), names)
    try:
        names["fail"]()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError(f"{make} raised nothing")


def test_a_defect_of_ours_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDPASS_DEBUG", raising=False)
    for make in ("{}['x']", "None + 1", "raise InternalError('a defect')"):
        error = raised(make, tmp_path)
        assert not shorten(error) and error.__traceback__ is not None and error.__traceback__.tb_next is not None
    error = raised("raise RefusedError('no') from KeyError('x')", tmp_path)
    assert shorten(error) and error.__traceback__ is not None and error.__traceback__.tb_next is None
    assert error.__cause__ is None and error.__suppress_context__
    monkeypatch.setenv("SHARDPASS_DEBUG", "1")
    assert not shorten(raised("raise RefusedError('no')", tmp_path))


def test_the_hook_is_set_once_and_only_in_the_place_of_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_tracebacks()
    ours = sys.excepthook
    assert ours is not sys.__excepthook__
    shorten_tracebacks()
    assert sys.excepthook is ours
    monkeypatch.setattr(sys, "excepthook", print)
    shorten_tracebacks()
    assert sys.excepthook is print


def test_what_torchrun_knows_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    tell_launcher("first")
    tell_launcher("second")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "first"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no such folder" / "error.json"))
    tell_launcher("first")
