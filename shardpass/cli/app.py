"""The commands and their help texts. What each command does is in a module of its own.

Options that say what a command does are the fields of its configuration, which `takes` offers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

import shardpass as sp
from shardpass.cli.black_box import read_black_boxes
from shardpass.cli.config import TrainConfig
from shardpass.cli.console import Steps, fail, sentence
from shardpass.cli.demo.stages import run_demo
from shardpass.cli.diagnosis import diagnose
from shardpass.cli.doctor import run_doctor
from shardpass.cli.inferring import InferConfig, infer_rank
from shardpass.cli.inspecting import run_inspect, run_inspect_layers, run_inspect_pairs
from shardpass.cli.launch import run_ranks, starts_threads
from shardpass.cli.models import ModelConfig
from shardpass.cli.new import write_script
from shardpass.cli.options import BackendName, Ranks, StoreFolder, takes
from shardpass.cli.partitioning import PartitionConfig, partition_rank
from shardpass.cli.planning import as_json, draw_plan, graph_of, plan_page, prepare_files, ranks_for, title_of
from shardpass.cli.proof.prove import prove_rank
from shardpass.cli.restarts import train_with_restarts
from shardpass.errors import shows_tracebacks
from shardpass.planning.sizes import known_sizes


class Commands(TyperGroup):
    """The commands, whose errors end them with one sentence. With ``SHARDPASS_DEBUG=1`` they keep their tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if shows_tracebacks() or hasattr(error, "format_message"):  # what typer itself refuses
                raise
            fail(sentence(error))


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LONGEST_WAIT = 7 * 24 * 3600.0  # seconds, while rank 0 of `partition` does what the others cannot share


def show_version(is_asked: bool) -> None:
    if is_asked:
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"shardpass {sp.__version__} (Python {python}, torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    """Train unmodified PyG models on whole graphs too large for one memory."""


@app.command()
@takes(PartitionConfig)
def partition(
    config: PartitionConfig,
    backend: BackendName = "auto",
    ranks: Annotated[int | None, typer.Option(min=1, help="Files: ranks to start here, or of the launcher.")] = None,
) -> None:
    """Cut a graph into parts and write them to a directory.

    A graph in files is shared out under `mpirun -n N` or `torchrun --nproc-per-node N --no-python`.
    """
    run_ranks(partition_rank, config, backend, ranks, timeout=_LONGEST_WAIT)


@app.command()
def inspect(
    store: StoreFolder,
    ranks: Annotated[int | None, typer.Option(help="Show ranks instead of parts, for a run on this many.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of every file.")] = False,
    layers: Annotated[int | None, typer.Option(help="Show what `graph.layers` saves in a model of so many.")] = None,
    mask: Annotated[str, typer.Option(help="With --layers: the node field of the wanted nodes.")] = "train_mask",
    pairs: Annotated[bool, typer.Option("--pairs", help="Show what partial sums save between each two ranks.")] = False,
) -> None:
    """Show what a store holds and what its partition costs."""
    run_inspect(store, ranks, verify)
    if layers is not None:
        run_inspect_layers(store, ranks, mask, layers)
    if pairs:
        run_inspect_pairs(store, ranks)


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="The script to write, such as train.py.")],
    dgl: Annotated[bool, typer.Option("--dgl", help="For DGL in place of PyG.")] = False,
) -> None:
    """Write a training script with comments, to start your own from."""
    print(write_script(file, dgl))


@app.command()
@takes(TrainConfig)
def train(
    config: TrainConfig,
    backend: BackendName = "auto",
    ranks: Ranks = None,
    restarts: Annotated[int, typer.Option(min=0, help="Times to start failed ranks again, from the checkpoint.")] = 0,
) -> None:
    """Train one of six PyG models on the whole graph, on any number of ranks up to the number of parts.

    For a model of your own, `shardpass new` writes a script. Start this one alone, with --ranks N, or under
    `mpirun -n N` or `torchrun --nproc-per-node N --no-python`.
    """
    if config.profile and backend == "auto" and starts_threads(backend, ranks):
        backend = "processes"  # threads have one profiler, which traces one of them
    config = replace(config, shared_process=not restarts and starts_threads(backend, ranks))
    train_with_restarts(config, backend, ranks, restarts)


@app.command()
@takes(ModelConfig, but=("dtype", "edge_weight"))
def plan(
    config: ModelConfig,
    store: Annotated[Path | None, typer.Argument(help="A store; or give --nodes and --edges.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Nodes of a graph known by its counts, as in 111M.")] = None,
    edges: Annotated[str | None, typer.Option(help="Its edges, as in 3.2B.")] = None,
    features: Annotated[int, typer.Option(help="Its feature channels.")] = 128,
    classes: Annotated[int, typer.Option(help="Its classes.")] = 2,
    cut: Annotated[float | None, typer.Option(help="Its fraction of cut edges (default: random parts).")] = None,
    halo: Annotated[float | None, typer.Option(help="Its halo rows per own node (default: random edges).")] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated (default: 1, 2, 4, 8).")] = None,
    mode: Annotated[list[str], typer.Option(help="A mode (may be repeated).")] = ["sar", "keep", "halo"],  # noqa: B006
    budget: Annotated[str | None, typer.Option(help="Bytes per rank, as in 6GiB.")] = None,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on one host, which share its memory.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this file, such as plan.png.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with sliders for ranks and budget.")] = None,
) -> None:
    """Estimate the peak memory per rank of each mode and number of ranks, before anything runs."""
    graph = graph_of(store, nodes, edges, features, classes, cut, halo)
    prepare_files(plot, page)
    built = config.build(*known_sizes(graph))
    torch.set_num_threads(1)  # dry runs are small
    modes: list[Any] = mode  # which the planner checks
    with Steps(Console(stderr=True, highlight=False)) as steps:
        planned = sp.plan(
            built, graph, ranks or ranks_for(graph), modes, budget=budget, ranks_per_host=ranks_per_host,
            checkpoint=config.checkpoint_of_wrap, progress=partial(steps.tell, "estimates"),
        )  # fmt: skip
    print(as_json(planned) if json else planned)
    if plot is not None:
        draw_plan(planned, title_of(config, graph), plot)
    if page is not None:
        page.write_text(plan_page(planned, title_of(config, graph)), encoding="utf-8")


@app.command()
@takes(InferConfig, but=("dropout", "recompute"))
def infer(config: InferConfig, backend: BackendName = "auto", ranks: Ranks = None) -> None:
    """Write a trained model's output for every node. A run that was ended goes on where it stood."""
    run_ranks(infer_rank, config, backend, ranks)


@app.command()
def doctor(
    files: Annotated[list[Path] | None, typer.Argument(help="Black boxes: the last calls of each rank.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds each self-test may take.")] = 90.0,
) -> None:
    """Say what is installed, and try every way to run several ranks. With files: say which rank failed, and where."""
    if not files:
        raise SystemExit(run_doctor(timeout))
    print(*diagnose(read_black_boxes(files)), sep="\n")


@app.command()
def test(
    backend: BackendName = "auto",
    ranks: Ranks = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for another rank.")] = 120.0,
) -> None:
    """Prove a cluster in a minute: what each rank may use, what travels between ranks, and that a model is exact.

    Started as a training run will be: `mpirun -n 8 shardpass test`, `srun -n 8 shardpass test`, or
    `torchrun --nproc-per-node 8 --no-python shardpass test`. If something is wrong, one sentence says what, and the
    exit code is 1.
    """
    verdict = run_ranks(prove_rank, None, backend, ranks, timeout)
    verdict.end()


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="The directory for the chart and the graphs.")] = Path("demo-out"),
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the distributed runs.")] = 4,
    nodes: Annotated[int, typer.Option(help="Nodes of the power-law graph of the first stage.")] = 100_000,
) -> None:
    """Train an unmodified GAT in one process and on several ranks; compare memory, loss, accuracy and time."""
    run_demo(output, ranks, nodes)
