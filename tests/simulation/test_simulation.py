"""The engine under simulated faults. A seed that fails is replayed by ``python -m tests.simulation.replay SEED``."""

import threading
import warnings

import pytest
import torch

from .faults import Fault
from .programs import program_of
from .simulate import DEFAULT_SEEDS, NUM_PROGRAMS, simulate, undisturbed
from .whole import on_whole_graph
from .world import DEFECTS, Policy

LONG_SEEDS, SHARDS = 100_000, 200

REGRESSIONS = {
    "a lack of memory while the rows of a message function are tried out was told as a refusal": (
        31,
        Fault("memory", 0, "op", 282),
        Policy(),
    ),
    "an inference that failed left half an output behind": (
        14,
        Fault("cut", 0, "step", 53, other=1),
        Policy(),
    ),
    "a rank that had done its part of a collective was blamed for its end": (
        0,
        Fault("unplug", 1, "step", 92, other=2),
        Policy(polls=True),
    ),
}
"""What went wrong, and where: the number of the program, the fault, and the transport."""


def problems_of(seeds, **settings):
    """What is wrong with the runs of some seeds, in words."""
    found, threads = [], threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            run = simulate(seed, **settings)
            found += [f"{run}: {problem}" for problem in run.problems]
    assert threading.active_count() == threads
    return found


@pytest.mark.parametrize("shard", [1, *(pytest.param(shard, marks=pytest.mark.long) for shard in (0, 2, 3))])
def test_seeds(shard):
    assert problems_of(range(shard, DEFAULT_SEEDS, 4)) == []


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_seeds(shard):
    first = DEFAULT_SEEDS + shard * (LONG_SEEDS // SHARDS)
    assert problems_of(range(first, first + LONG_SEEDS // SHARDS)) == []


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS // 2))
def test_many_seeds_between_devices(shard):  # those of test_many_seeds are half of them
    first = DEFAULT_SEEDS + LONG_SEEDS + shard * (LONG_SEEDS // SHARDS)
    assert problems_of(range(first, first + LONG_SEEDS // SHARDS), is_direct=True) == []


@pytest.mark.parametrize("seed", [11105, 15832, 68854])  # who ended, behind messages between devices?
def test_a_seed_that_has_failed(seed):
    assert problems_of([seed]) == []


@pytest.mark.parametrize("what", REGRESSIONS)
def test_what_has_failed(what):
    number, fault, policy = REGRESSIONS[what]
    run = simulate(0, policy=policy, fault=fault, number=number)
    assert run.happened is not None and run.problems == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_the_transport_is_found(defect):
    assert any(simulate(seed, policy=Policy(defect=defect)).problems for seed in range(60))


@pytest.mark.parametrize("number", range(NUM_PROGRAMS[0]))
def test_undisturbed_it_is_the_whole_graph(number):
    program, found = program_of(number), undisturbed(number)
    if program.kind == "sample":
        pytest.skip("what is drawn depends on the number of ranks")
    whole = on_whole_graph(program)
    for name, right in whole.items():
        if name != "out":
            for result in found.results:
                torch.testing.assert_close(result[name], right, rtol=0, atol=1e-9)
        elif program.kind == "infer":
            torch.testing.assert_close(torch.from_numpy(found.output), right, rtol=0, atol=1e-9)
        else:
            for result in found.results:
                torch.testing.assert_close(result[name], right[result["ids"]], rtol=0, atol=1e-9)


def test_a_seed_is_a_run():
    first, second = ([], [])
    for trace in (first, second):
        simulate(3, trace, fault=Fault(), number=8)
    assert first == second and len(first) > 50
