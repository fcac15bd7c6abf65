"""`shardpass` as a real program: its own processes, torchrun, mpirun, a kill and a resume, the doctor."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from cli_helpers import MODULE, epochs, launched, needs_mpirun, passed, records

from shardpass.backends import hosts
from shardpass.cli import doctor, launch
from shardpass.cli.launch import launch_command, launcher_environment, typed_command
from shardpass.errors import PeerFailure, StoreError

COMMON = ("--model", "gat", "--hidden", 8, "--dtype", "float64", "--eval-every", 10)


@pytest.fixture(scope="module")
def curve(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of six epochs on three ranks (threads of this process)."""
    return in_process(store, tmp_path_factory.mktemp("curve") / "log", 6)


def in_process(store: Path, log: Path, last: int) -> list[float]:
    passed("train", store, *COMMON, "--epochs", last, "--ranks", 3, "--log", log)
    return [record["loss"] for record in epochs(log)]


def assert_trained(text: str, log: Path, curve: list[float], backend: str) -> None:
    assert [record["loss"] for record in epochs(log)] == pytest.approx(curve, rel=1e-9)
    summary = records(log)[-1]
    assert summary["backend"] == backend and not summary["peak_is_of_all_ranks"]
    assert "peak memory per rank" in text and text.count("loss") >= 6


@pytest.mark.processes
def test_processes(store: Path, tmp_path: Path, curve: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    words = ("train", store, *COMMON, "--epochs", 6, "--ranks", 2, "--backend", "processes", "--log", tmp_path / "log")
    passed(*words)
    assert_trained(capfd.readouterr().out, tmp_path / "log", curve, "torch")


LAUNCHERS = [
    pytest.param("mpirun", marks=[pytest.mark.mpi, needs_mpirun]),
    pytest.param("torchrun", marks=[pytest.mark.processes, pytest.mark.long]),
]


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_under_a_launcher(launcher: str, store: Path, tmp_path: Path, curve: list[float]) -> None:
    run = launched(launcher, 2, "train", store, *COMMON, "--epochs", 6, "--log-file", tmp_path / "log")
    assert run.returncode == 0, run.stdout + run.stderr
    assert_trained(run.stdout, tmp_path / "log", curve, {"mpirun": "mpi", "torchrun": "torch"}[launcher])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_error_of_all_ranks_is_told_once_and_ends_all(launcher: str, tmp_path: Path) -> None:
    run = launched(launcher, 2, "train", tmp_path / "nothere", timeout=480)
    assert run.returncode != 0
    told = run.stderr.count("there is no directory")  # a rank that mpirun ends may say whose error it was
    assert told - run.stderr.count("rank 0 failed first: StoreError: there is no directory") <= 1 <= told <= 2
    assert "Traceback" not in run.stderr or launcher == "torchrun"  # its own


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_partitioning_under_a_launcher(launcher: str, tmp_path: Path) -> None:
    edges = np.random.default_rng(0).integers(0, 500, (2, 6000))
    np.save(tmp_path / "edges.npy", edges)
    words = ("partition", tmp_path / "edges.npy", "--num-nodes", 500, "--memory", 0.0001, "--method", "random")
    passed(*words, tmp_path / "one")
    run = launched(launcher, 2, *words, tmp_path / "two")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("500 nodes and 6,000 edges in 4 parts") == 1
    stores = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert stores[0] == stores[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.npy", "one", "two"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreError("no store"), "Error: rank 1 failed first: StoreError: no store"),
        (PeerFailure("rank 0 failed first: ValueError: boo"), ""),  # which rank 0 says
        (PeerFailure("rank 0 died first: its process ended without a word"), "Error: rank 0 died first"),
        (PeerFailure("rank 1 failed first: it was told to end (SIGTERM)"), "Error: rank 1 failed first"),
    ],
)
def test_each_failure_is_told_by_some_rank(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Comm:
        rank, size = 1, 2

        def abort(self, reason: str) -> None:
            raise PeerFailure(f"rank 1 failed first: {reason}")

        def close(self) -> None:
            pass

    def work(comm: Comm, config: None) -> None:
        raise error

    monkeypatch.setattr(launch, "connect", lambda *args, **options: Comm())
    monkeypatch.setattr(launch, "_HEAD_START", 0.0)
    with pytest.raises(SystemExit):
        launch.run_ranks(work, None, "torch_distributed", 2)
    said = capsys.readouterr().err
    assert said.startswith(told) and bool(said) == bool(told)


@pytest.mark.long
@pytest.mark.mpi
@needs_mpirun
def test_kill_and_resume_on_another_number_of_ranks(store: Path, tmp_path: Path) -> None:
    log, checkpoint = tmp_path / "log", tmp_path / "c.safetensors"
    words = ("train", store, *COMMON, "--log", log, "--checkpoint", checkpoint, "--resume")
    command = [*(launch_command("mpirun", 2, MODULE) or []), *map(str, words), "--epochs", "100000"]
    child = subprocess.Popen(command, env=launcher_environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = monotonic() + 480
        while not (log.exists() and log.read_text().count("\n") >= 2):
            assert child.poll() is None and monotonic() < deadline
            sleep(0.02)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    sleep(1.0)  # ranks that lost their mpirun end by themselves
    before = len(epochs(log))
    last = before + 2
    assert "continuing from" in passed(*words, "--epochs", last, "--ranks", 3)
    found = {record["epoch"]: record["loss"] for record in epochs(log)}
    assert sorted(found) == list(range(1, last + 1))
    expected = in_process(store, tmp_path / "whole", last)
    assert [found[epoch] for epoch in sorted(found)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.processes
def test_the_doctor_knows_dgl_and_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dgl")
    found = {finding.name: finding for finding in doctor.packages()}
    assert found["dgl"].good and found["dgl"].text.startswith("1.1.3") and "numba" in found
    monkeypatch.setattr(doctor, "_DGL", "import no_such_module")
    broken = doctor.packages()[-1]
    assert not broken.good and "no_such_module" in broken.text and "pip install 'dgl>=1.1.3,<2'" in broken.advice
    monkeypatch.setattr(doctor, "_DGL", "print('fine')")
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.1.0")
    assert doctor.packages()[-1].text == "2.1.0, but shardpass supports 1.1.3"


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.processes
def test_doctor() -> None:
    run = launched("none", 1, "doctor")
    assert run.returncode == 0, run.stdout + run.stderr
    for name in ("torch", "torch_geometric", "mpi4py", "kaminpar", "threads", "processes (gloo)", "torchrun (gloo)"):
        assert name in run.stdout
    assert "dgl" in run.stdout and "numba" in run.stdout
    assert run.stdout.count("self-test passed") >= 3 and "healthy: all that is required works" in run.stdout


@pytest.mark.long
@pytest.mark.parametrize("active", [True, False])
def test_the_command_that_the_demo_ends_with_works_as_typed(active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(Path(sys.executable).parent)] if active else []
    monkeypatch.setenv("PATH", os.pathsep.join([*folders, "/usr/bin", "/bin"]))
    typed = typed_command()
    assert typed == "shardpass" or not active
    run = subprocess.run(f"{typed} --help", shell=True, capture_output=True, text=True, timeout=480, check=False)
    assert run.returncode == 0 and "whole graphs" in run.stdout, run.stderr


@pytest.mark.long
def test_without_typer_one_sentence_with_the_pip_command(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-m", MODULE], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.strip() == (
        "Error: the shardpass command needs the package 'typer', which is not installed: pip install typer rich "
        "(shardpass's extra 'cli')"
    )


@pytest.mark.parametrize(("mode", "good"), [("madvise", False), ("always", True), ("never", False), ("", False)])
def test_the_doctor_tells_of_huge_pages(mode: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "huge_pages", lambda: mode)
    monkeypatch.setattr(hosts, "huge_pages", lambda: mode)
    monkeypatch.setattr(doctor.Path, "read_text", lambda path, errors: "PATH=/bin\0MALLOC_MMAP_THRESHOLD_=33554432\0")
    found = doctor._huge_pages()
    assert found.good == good and not found.required
    export = "export THP_MEM_ALLOC_ENABLE=1 MALLOC_TRIM_THRESHOLD_=67108864 before"
    assert (export in found.advice) == (mode == "madvise")
