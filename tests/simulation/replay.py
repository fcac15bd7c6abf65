"""``python -m tests.simulation.replay SEED``: run a seed of the simulator again, and print each of its steps.

``direct`` after the seed runs it with messages between devices, which have no tags.
"""

import sys
import warnings

import torch

from .simulate import simulate


def main(seed: int, is_direct: bool | None = None) -> int:
    """Print the steps of a seed and what is wrong with it. The number of problems."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trace: list[str] = []
    run = simulate(seed, trace, is_direct=is_direct)
    print("\n".join(trace))
    for process in run.world.processes:
        print(f"\nrank {process.rank} {process.state}: {process.error!r}\n{process.stack}")
    print(run, run.policy, sep="\n")
    print("\n".join(f"PROBLEM {problem}" for problem in run.problems) or "no problem")
    return len(run.problems)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), "direct" in sys.argv[2:] or None) > 0)
