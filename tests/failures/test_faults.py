"""A few of the faults that `make faults` injects into running jobs."""

import pytest

from benchmarks import faults

from .training import LIMIT

pytestmark = pytest.mark.processes
FAULTS = [
    ("fork", "loaders", "exit"), ("fork", "save", "kill"), ("fork", "forward", "stop"),
    ("torchrun", "gradient sum", "exit"), ("torchrun", "backward", "kill"), ("torchrun", "save", "launcher"),
    ("mpirun", "infer", "raise"), ("mpirun", "loaders", "kill"),
    ("namespaces", "backward", "link"), ("namespaces", "infer", "exit"),
]  # fmt: skip


@pytest.mark.long  # what becomes of the others when a rank ends: by default in tests/backends
@pytest.mark.parametrize(("how", "phase", "fault"), FAULTS)
def test_a_fault_is_named_by_every_other_rank(store, how, phase, fault):
    if why := faults.why_not(how, fault):
        pytest.skip(why)
    found = faults.inject(store, how, phase, fault, limit=LIMIT)
    assert not found.problems, "\n".join(found.problems)


def test_the_table():
    good, bad = faults.Injected("fork", "save", "kill", [0.5, 1.25]), faults.Injected("fork", "load", "kill")
    bad.problems.append("1 processes were left")
    text = faults.table([good, bad], {"mpirun": "there is no mpirun"})
    for line in ("2 faults, 1 of them with a problem", "| save | 1.2 |", "| load | problem |",
                 "Not on this machine: mpirun: there is no mpirun.", "* fork, load, kill: 1 processes"):  # fmt: skip
        assert line in text
