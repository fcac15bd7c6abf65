"""Start an example as SAR's documentation starts its own: ``start.py EXAMPLE --rank 0 --world-size 2 --ip-file ...``.

Under torchrun and mpirun, the rank is that of the launcher. With ``--fork``, this process forks one for each rank. A
late rank sleeps before it does anything.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch

EXAMPLES = ("basic", "advanced", "sampling", "rgcn", "rgcn_mfg", "sign")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--partitioning-json-file", required=True)
    parser.add_argument("--ip-file", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--port", type=int, default=12345)
    parser.add_argument("--late", type=int, default=-1)
    parser.add_argument("--fork", action="store_true")
    return parser.parse_args()


def run(args: argparse.Namespace, rank: int) -> None:
    args.rank = rank
    if rank == args.late:
        time.sleep(3)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    example = importlib.import_module(f"frontends.sar_examples.{args.example}")
    torch.save(example.main(args), Path(f"{args.out}.{rank}"))


def main() -> None:
    args = parsed()
    if not args.fork:
        own = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", args.rank))
        return run(args, int(own))
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(args, rank)) for rank in range(args.world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
