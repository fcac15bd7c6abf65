"""When a run ends badly, each rank writes its last calls, and `shardpass doctor` tells from them which rank it was."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from benchmarks.jobs import mpirun_command
from shardpass.backends import spawn
from shardpass.backends.call_log import CallLog
from shardpass.backends.identity import header_of
from shardpass.cli.app import app

from . import black_box
from .launchers import free_port, needs_mpi

SAYS = {
    "raises": ("said: rank 1 failed first: ValueError: boo", "rank 1 .* was in no call",
               "Look at rank 1 first: the others ended because it failed"),
    "skips": ("the ranks wait for each other", "rank 0 .* had waited .* in all_reduce 'norm'", "rank 1 never came to",
              "Look at rank 1 first: it was in another call than the others .*rank 1 in exchange 'call 7, round 1'",
              "The last that all of them made was all_reduce 'loss' .*collective"),
    "is killed": ("ranks 0 and 2 of 3 left a black box", "rank 1 died first", "rank 1 left no black box",
                  "The last that is known of it: it took part in all_reduce 'loss'", "rank 1 first: its process died"),
    "is late": ("nothing came", "rank 1 .* was in no call", "rank 1 never came to it",
                "Look at rank 1 first. The others waited, and it was in no call"),
}  # fmt: skip


def doctor(*files):
    result = CliRunner().invoke(app, ["doctor", *map(str, files)])
    assert result.exit_code == 0, result.output
    return result.output


def check(what, folder, text):
    """``text`` names a file in ``folder``, and the doctor finds the right rank."""
    named = re.search(r"the last calls of rank \d are in (\S+); `shardpass doctor (\S+)`", text)
    assert named and named[1].startswith(str(folder)) and os.path.exists(named[1]), text
    files = sorted(folder.iterdir())
    assert all(file.match(os.path.basename(named[2])) for file in files), files
    assert len(files) == (2 if what == "is killed" else 3), f"{files}\n{text}"
    said = doctor(*files)
    for words in SAYS[what]:
        assert re.search(words, said), f"not said: {words}\n{said}\n{text}"


@pytest.mark.parametrize("what", ["raises", "skips", "is late"])
def test_threads(what, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDPASS_BLACK_BOX", str(tmp_path))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        spawn(black_box.program, 3, args=(what,), timeout=black_box.TIMEOUT if what == "is late" else None)
    check(what, tmp_path, " ".join(caught.value.__notes__))


def run(command, folder):
    env = os.environ | {"SHARDPASS_BLACK_BOX": str(folder), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    return ended.stdout + ended.stderr


def on(*whats):
    """The first by default, and the others with the long tests: starting processes takes most of the time."""
    return [whats[0], *(pytest.param(what, marks=pytest.mark.long) for what in whats[1:])]


@pytest.mark.processes
@pytest.mark.parametrize("what", on("is killed", "is late", "raises", "skips"))
def test_forked_processes(what, tmp_path):
    check(what, tmp_path, run([sys.executable, black_box.__file__, what, "fork"], tmp_path))


@pytest.mark.long
@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("what", on("raises", "skips", "is killed", "is late"))
def test_mpi(what, tmp_path):
    check(what, tmp_path, run([*mpirun_command(3), sys.executable, black_box.__file__, what], tmp_path))


@pytest.mark.long
@pytest.mark.processes
def test_a_killed_process_of_spawn(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDPASS_BLACK_BOX", str(tmp_path))
    with pytest.raises(RuntimeError, match="was ended by SIGKILL") as caught:
        spawn(black_box.program, 3, "processes", args=("is killed",))
    check("is killed", tmp_path, " ".join(caught.value.__notes__))


def test_nothing_is_written_when_all_is_well_or_when_it_is_not_wanted(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDPASS_BLACK_BOX", str(tmp_path))
    spawn(black_box.program, 3, args=("nothing",))
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SHARDPASS_BLACK_BOX", "")
    with pytest.raises(ValueError) as caught:
        spawn(black_box.program, 3, args=("raises",))
    assert caught.value.__notes__ == ["(raised on rank 1)"]


def log_of(folder):
    log = CallLog(0, 2, "job")
    log.folder = str(folder)
    return log


def test_a_black_box_is_bounded_and_says_if_it_cannot_be_written(tmp_path):
    log = log_of(tmp_path / "new")
    for number in range(5000):
        log.begin("world", "send", header_of("exchange", number, None, label="x" * 111), 1, 1, 8)
    assert "are in" in log.write("boo")
    (file,) = (tmp_path / "new").iterdir()
    assert len(file.read_text().splitlines()) == 1001 and file.stat().st_size < 500_000
    assert "rank 0 (" in doctor(file)
    (tmp_path / "file").write_text("")
    assert "could not be written" in log_of(tmp_path / "file").write("boo")


GOOD = {"black box of shardpass": 1, "job": "j", "rank": 0, "size": 2, "host": "h", "process": 1, "at": 9.0, "why": "w"}
CALL = {"path": "world", "side": "send", "kind": "exchange", "label": "", "call": "exchange (tag 1)", "number": 1,
        "count": 1, "peer": 1, "bytes": 8, "began": 1.0, "waited": 2.0, "ended": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is no black box of a rank"),
        (b"\xff\xfe", "is no black box of a rank"),
        (b"[" * 100_000, "is no black box of a rank"),
        (b"1" * 10_000, "is no black box of a rank"),
        (b" " * (1 << 23) + b"{}", "more than 8,388,608 bytes"),
        ({"black box of shardpass": 2}, "its format is '2'"),
        (GOOD | {"rank": 2}, "rank is '2', but it must be a number in [0, 1]"),
        (GOOD | {"size": 10**12}, "size is"),
        ([GOOD, *[CALL] * 10_000], "more than 10,000 lines"),
        (GOOD | {"at": float("inf")}, "at is 'inf'"),
        (GOOD | {"why": ["w"]}, "why is no text"),
        ([GOOD, CALL | {"peer": 5}], "peer is '5'"),
        ([GOOD, CALL | {"side": "up"}], "the side 'up'"),
        ([GOOD, {}], "'path'"),
        ([GOOD, None], "is no black box of a rank"),
    ],
)
def test_what_is_no_black_box_is_refused(raw, words, tmp_path):
    lines = raw if isinstance(raw, list) else [raw]
    file = tmp_path / "box.jsonl"
    file.write_bytes(raw if isinstance(raw, bytes) else "\n".join(map(json.dumps, lines)).encode())
    result = CliRunner().invoke(app, ["doctor", str(file)])
    assert result.exit_code == 1 and result.stderr.startswith("Error: ") and words in result.stderr, result.output


def test_a_forged_box_takes_little_time(tmp_path):
    forged = GOOD | {"size": 1 << 16}
    (tmp_path / "box").write_text("\n".join(map(json.dumps, [forged, *[CALL | {"side": "", "peer": -1}] * 9000])))
    start = time.monotonic()
    assert "Look at ranks 1, 2, 3" in doctor(tmp_path / "box") and time.monotonic() - start < 30


def test_files_of_different_jobs_and_text_that_moves_the_cursor(tmp_path):
    one, other, twice = (tmp_path / name for name in ("one", "other", "twice"))
    one.write_text(json.dumps(GOOD | {"why": "\x1b[2Jboo\n"}) + "\n" + json.dumps(CALL))
    other.write_text(json.dumps(GOOD | {"job": "k", "rank": 1}))
    twice.write_text(json.dumps(GOOD))
    said = doctor(one)
    assert "\x1b" not in said and "rank 0 said:  [2Jboo" in said
    for file, words in ((other, "give the files of one job"), (twice, "give each once"), (tmp_path, "is a folder")):
        result = CliRunner().invoke(app, ["doctor", str(one), str(file)])
        assert result.exit_code == 1 and words in result.stderr, result.output
