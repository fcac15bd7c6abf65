"""`shardpass test`: it sees every rank, measures what travels, compares a model, and says what is wrong."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import launched, needs_mpirun, passed, refused

from shardpass.cli.proof import limits, prove
from shardpass.cli.proof.links import Link, slowest, steps, stragglers
from shardpass.core.ranks import Ranks


def assert_told(text: str, ranks: int) -> None:
    assert f"{ranks} ranks on 1 host" in text and f"passed: {ranks} ranks in" in text
    error = re.search(r"differ from those of one process by (\S+) at most, in the modes sar, keep, halo", text)
    assert error is not None and float(error[1]) < 1e-12
    assert f"the slowest of all {ranks * (ranks - 1)} pairs" in text and re.search(r"median.*iB/s.* us", text)


@pytest.mark.filterwarnings("error::UserWarning")
def test_alone_and_on_threads() -> None:
    text = passed("test")
    assert "1 rank on 1 host (Local)" in text and "mpirun -n 4 shardpass test" in text and "pairs" not in text
    text = passed("test", "--ranks", 3)
    assert_told(text, 3)
    assert re.search(r"0-2 .*cpu.* GiB .*(cgroup|the host|RLIMIT)", text)


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param("mpirun", "Mpi", marks=[pytest.mark.mpi, pytest.mark.long, needs_mpirun]),
        pytest.param("torchrun", "Torch", marks=[pytest.mark.processes, pytest.mark.long]),
    ],
)
def test_under_a_launcher(launcher: str, backend: str) -> None:
    run = launched(launcher, 2, "test")
    assert run.returncode == 0, run.stdout + run.stderr
    assert_told(run.stdout, 2)
    assert f"({backend})" in run.stdout and "in shared memory" in run.stdout


def test_what_is_wrong_is_one_sentence_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("shardpass.core.training.gradients.summed_tensors", lambda parts, *_: parts)
        assert re.search(
            r"GAT of PyG .* differs from the same model in one process by \de", refused("test", "--ranks", 2)
        )
    exchange, here = Ranks.exchange, prove.Place.of_this_process

    def garbled(self: Any, send: Any, to: int, recv: Any, source: int, tag: int, label: str = "") -> Any:
        return exchange(self, send + 1 if label == "test: ring" and self.rank else send, to, recv, source, tag, label)

    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "exchange", garbled)
        assert "rank 0 on " in (told := refused("test", "--ranks", 2)) and "received other numbers than rank 1" in told
    old = classmethod(lambda cls, comm: replace(here(comm), versions=f"torch 1.{comm.rank}"))
    monkeypatch.setattr(prove.Place, "of_this_process", old)
    assert "runs torch 1.1, but rank 0 on" in (told := refused("test", "--ranks", 3)) and "same versions" in told


def test_no_library_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardpass.cli.proof.exactness._library", lambda: "")
    assert "so no model was compared" in (text := passed("test", "--ranks", 2)) and "passed: 2 ranks" in text


def test_dgl_where_there_is_no_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dgl")
    monkeypatch.setattr("shardpass.cli.proof.exactness._library", lambda: "dgl")
    text = passed("test", "--ranks", 3)
    assert "GAT of DGL on" in text
    assert_told(text, 3)


def test_slow_links_are_named_among_their_own_kind() -> None:
    assert steps(1) == [] and steps(4) == [1, 2, 3] and steps(9)[-1] == 8 and steps(100) == [1, 2, 4, 8, 16, 32, 64]
    hosts = ["a", "a", "b", "b"]
    links = [
        Link(source, target, 1e-4, 1e9 if hosts[source] == hosts[target] else 1e7, True)
        for source in range(4)
        for target in range(4)
        if source != target
    ]
    assert stragglers(links, hosts) == []
    slow = Link(3, 0, 1e-4, 1e6, True)
    links = [slow if (link.source, link.target) == (3, 0) else link for link in links]
    assert slowest(links, 1) == [slow]
    assert stragglers(links, hosts) == ["rank 0 (a) receives from rank 3 (b) 10 times slower than the median"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (0, "")),
        ({"proc/meminfo": "MemTotal:  64 kB\nMemFree: 2 kB\n"}, (64 << 10, "the host")),
        (
            {
                "proc/meminfo": "MemTotal:  64 kB\n",
                "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
                "sys/fs/cgroup/slurm/job_7/memory.max": "40000\n",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
            },
            (40000, "cgroup"),
        ),
        (
            {
                "proc/meminfo": "MemTotal:  64 kB\n",
                "proc/self/cgroup": "4:cpu:/x\n3:memory:/docker/ab\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": "30000\n",
            },
            (30000, "cgroup"),
        ),
        (
            # within a container, whose own group is the root
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "50000\n"},
            (50000, "cgroup"),
        ),
    ],
)
def test_what_bounds_memory(
    files: dict[str, str], expected: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert limits.memory_limit(tmp_path) == expected
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 1000))
    assert limits.memory_limit(tmp_path) == (1000, "RLIMIT_AS")
