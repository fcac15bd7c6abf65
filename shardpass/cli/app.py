"""The commands, their options and help texts. What each command does is in a module of its own."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

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
from shardpass.cli.inspecting import run_inspect, run_inspect_layers
from shardpass.cli.launch import Backend, run_ranks, starts_threads
from shardpass.cli.models import Dtype, ModelConfig, ModelName
from shardpass.cli.new import write_script
from shardpass.cli.partitioning import PartitionConfig, partition_rank, read_source
from shardpass.cli.planning import as_json, draw_plan, graph_of, plan_page, prepare_files, ranks_for, title_of
from shardpass.cli.proof.prove import prove_rank
from shardpass.cli.restarts import train_with_restarts
from shardpass.core.ranks import Mode
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

StoreFolder = Annotated[Path, typer.Argument(help="A directory that `shardpass partition` wrote.")]
Layers = Annotated[int, typer.Option(min=1, help="Number of layers.")]
Hidden = Annotated[int, typer.Option(min=1, help="Hidden channels.")]
Heads = Annotated[int, typer.Option(min=1, help="Attention heads (gat).")]
Dropout = Annotated[float, typer.Option(min=0, max=1, help="Dropout between layers.")]
BatchNorm = Annotated[bool, typer.Option(help="BatchNorm between layers, over the nodes of all ranks.")]
Type = Annotated[Dtype, typer.Option(help="Of features and parameters.")]
EdgeWeight = Annotated[str, typer.Option(help="The edge field that gcn takes for weights of edges.")]
BackendName = Annotated[Backend, typer.Option(help="auto: the launcher's if one started this process, else threads.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks to start here, or to expect from the launcher.")]
Threads = Annotated[int, typer.Option(min=1, help="Computing threads per rank.")]
_LONGEST_WAIT = 7 * 24 * 3600.0  # seconds, while rank 0 of `partition` does what the others cannot share
_LOG = ("--log", "--log-file")  # torchrun takes the first, even after the program's name, for options of its own
Mask = Annotated[Path | None, typer.Option(help="Edge lists: .npy of booleans.")]


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
def partition(
    input: Annotated[
        str,
        typer.Argument(
            help=".npz, .json of a DGL partition, edge list (.npy, .parquet, .csv, .txt; the latter also .gz), folder "
            "with edges and features, dataset of OGB (folder or name), demo:digits or demo:powerlaw."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The directory to write.")],
    parts: Annotated[int | None, typer.Option(help="Ranks at most (default: 4; of a .json its own).")] = None,
    method: Annotated[str, typer.Option(help="kaminpar (for any size), metis, random or range.")] = "kaminpar",
    seed: Annotated[int, typer.Option(help="Of the partitioner.")] = 0,
    assignment: Annotated[Path | None, typer.Option(help="An .npy with the part of each node, instead.")] = None,
    node_weights: Annotated[Path | None, typer.Option(help="An .npy of what parts balance (default: bytes).")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a store that is there already.")] = False,
    features: Annotated[Path | None, typer.Option(help="Edge lists: .npy, .parquet or .csv, a row per node.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Edge lists: .npy of class ids, -1 for unlabelled.")] = None,
    train_mask: Mask = None,
    val_mask: Mask = None,
    test_mask: Mask = None,
    weights: Annotated[Path | None, typer.Option(help="Edge lists: .npy of edge weights.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Edge lists without features, labels and masks.")] = None,
    names: Annotated[bool, typer.Option("--names", help="Edge lists: ids are names, as --nodes implies.")] = False,
    nodes: Annotated[Path | None, typer.Option(help="Edge lists: a table of ids, features, label, split.")] = None,
    node_id: Annotated[str | None, typer.Option(help="The column of ids in --nodes, or a field of names.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of labels in --nodes (default: y or label).")] = None,
    src: Annotated[str | None, typer.Option(help="With names: the column of sources (default: src).")] = None,
    dst: Annotated[str | None, typer.Option(help="With names: the column of destinations (default: dst).")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Leave out this field (may be repeated).")] = None,
    threads: Annotated[int, typer.Option(help="kaminpar: with more than 1, the parts differ from run to run.")] = 1,
    memory: Annotated[float, typer.Option(help="Files: GiB for edges on each rank, before temporary files.")] = 1.0,
    backend: BackendName = "auto",
    ranks: Annotated[int | None, typer.Option(min=1, help="Files: ranks to start here, or of the launcher.")] = None,
) -> None:
    """Cut a graph into parts and write them to a directory.

    A graph in files is shared out under `mpirun -n N` or `torchrun --nproc-per-node N --no-python`.
    """
    masks = {"train_mask": train_mask, "val_mask": val_mask, "test_mask": test_mask}
    beside = {"features": features, "labels": labels, "weights": weights, "num_nodes": num_nodes}
    tables = {"nodes": nodes, "node_id": node_id, "label": label, "src": src, "dst": dst}
    options: dict[str, Any] = {"method": method, "seed": seed, "overwrite": overwrite, "threads": threads}
    read = partial(read_source, input, drop or (), masks, names, tables, **beside)
    options["memory_bytes"] = int(memory * 2**30)
    config = PartitionConfig(read, output, parts, assignment, node_weights, options)
    run_ranks(partition_rank, config, backend, ranks, timeout=_LONGEST_WAIT)


@app.command()
def inspect(
    store: StoreFolder,
    ranks: Annotated[int | None, typer.Option(help="Show ranks instead of parts, for a run on this many.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of every file.")] = False,
    layers: Annotated[int | None, typer.Option(help="Show what `graph.layers` saves in a model of so many.")] = None,
    mask: Annotated[str, typer.Option(help="With --layers: the node field of the wanted nodes.")] = "train_mask",
) -> None:
    """Show what a store holds and what its partition costs."""
    run_inspect(store, ranks, verify)
    if layers is not None:
        run_inspect_layers(store, ranks, mask, layers)


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="The script to write, such as train.py.")],
    dgl: Annotated[bool, typer.Option("--dgl", help="For DGL in place of PyG.")] = False,
) -> None:
    """Write a training script with comments, to start your own from."""
    print(write_script(file, dgl))


@app.command()
def train(
    store: StoreFolder,
    model: Annotated[ModelName, typer.Option(help="Of torch_geometric.nn.")] = "sage",
    layers: Layers = 2,
    hidden: Hidden = 64,
    heads: Heads = 4,
    epochs: Annotated[int, typer.Option(min=1, help="The epoch to train up to.")] = 100,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of Adam.")] = 0.0,
    dropout: Dropout = 0.0,
    batch_norm: BatchNorm = False,
    mode: Annotated[Literal[Mode, "auto"], typer.Option(help="sar needs the least memory. The numbers agree.")] = "sar",
    memory_budget: Annotated[str | None, typer.Option(help="With --mode auto: bytes per rank, as in 6GiB.")] = None,
    backend: BackendName = "auto",
    ranks: Ranks = None,
    threads: Threads = 1,
    seed: Annotated[int, typer.Option(help="Of the parameters.")] = 0,
    dtype: Type = "float32",
    edge_weight: EdgeWeight = "",
    mask_prefix: Annotated[str, typer.Option(help="Before train_mask, val_mask and test_mask in field names.")] = "",
    split: Annotated[int, typer.Option(help="The column of masks that have one per split.")] = 0,
    eval_every: Annotated[int, typer.Option(min=1, help="Epochs between two evaluations.")] = 1,
    patience: Annotated[int, typer.Option(min=0, help="Epochs without a better accuracy; 0: no end.")] = 0,
    log: Annotated[str, typer.Option(*_LOG, help="JSON lines; - shows them and nothing else.")] = "",
    log_csv: Annotated[str, typer.Option(help="A table with a row per epoch.")] = "",
    tensorboard: Annotated[str, typer.Option(help="The folder for TensorBoard.")] = "",
    plot: Annotated[str, typer.Option(help="Draw loss, accuracy and memory since the start into this file.")] = "",
    best: Annotated[str, typer.Option(help="The file for the parameters of the best epoch so far.")] = "",
    checkpoint: Annotated[str, typer.Option(help="The file to write while training.")] = "",
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Epochs between two checkpoints.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint, on any ranks.")] = False,
    restarts: Annotated[int, typer.Option(min=0, help="Times to start failed ranks again, from the checkpoint.")] = 0,
    profile: Annotated[str, typer.Option(help="Trace one epoch of each rank, for Perfetto or chrome://tracing.")] = "",
) -> None:
    """Train one of six PyG models on the whole graph, on any number of ranks up to the number of parts.

    For a model of your own, `shardpass new` writes a script. Start this one alone, with --ranks N, or under
    `mpirun -n N` or `torchrun --nproc-per-node N --no-python`.
    """
    if profile and backend == "auto" and starts_threads(backend, ranks):
        backend = "processes"  # threads have one profiler, which traces one of them
    config = TrainConfig(
        model, layers, hidden, heads, dropout, batch_norm, dtype, edge_weight,
        store=str(store), epochs=epochs, lr=lr, weight_decay=weight_decay, mode=mode, memory_budget=memory_budget,
        seed=seed, mask_prefix=mask_prefix, split=split, eval_every=eval_every, patience=patience, log=log,
        log_csv=log_csv, tensorboard=tensorboard, plot=plot, best=best, checkpoint=checkpoint,
        checkpoint_every=checkpoint_every, resume=resume, threads=threads, profile=profile,
        shared_process=not restarts and starts_threads(backend, ranks),
    )  # fmt: skip
    train_with_restarts(config, backend, ranks, restarts)


@app.command()
def plan(
    store: Annotated[Path | None, typer.Argument(help="A store; or give --nodes and --edges.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Nodes of a graph known by its counts, as in 111M.")] = None,
    edges: Annotated[str | None, typer.Option(help="Its edges, as in 3.2B.")] = None,
    features: Annotated[int, typer.Option(help="Its feature channels.")] = 128,
    classes: Annotated[int, typer.Option(help="Its classes.")] = 2,
    cut: Annotated[float | None, typer.Option(help="Its fraction of cut edges (default: random parts).")] = None,
    halo: Annotated[float | None, typer.Option(help="Its halo rows per own node (default: random edges).")] = None,
    model: Annotated[ModelName, typer.Option(help="As in `train`.")] = "sage",
    layers: Layers = 2,
    hidden: Hidden = 64,
    heads: Heads = 4,
    dropout: Dropout = 0.0,
    batch_norm: BatchNorm = False,
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
    config = ModelConfig(model, layers, hidden, heads, dropout, batch_norm)
    built = config.build(*known_sizes(graph))
    torch.set_num_threads(1)  # dry runs are small
    modes: list[Any] = mode  # which the planner checks
    with Steps(Console(stderr=True, highlight=False)) as steps:
        planned = sp.plan(
            built, graph, ranks or ranks_for(graph), modes, budget=budget, ranks_per_host=ranks_per_host,
            progress=partial(steps.tell, "estimates"),
        )  # fmt: skip
    print(as_json(planned) if json else planned)
    if plot is not None:
        draw_plan(planned, title_of(config, graph), plot)
    if page is not None:
        page.write_text(plan_page(planned, title_of(config, graph)), encoding="utf-8")


@app.command()
def infer(
    store: StoreFolder,
    output: Annotated[Path, typer.Argument(help="A row per node in the original order: .npy; .parquet with ids.")],
    weights: Annotated[Path, typer.Option(exists=True, help="Of `train`, or a state_dict: .pt, .safetensors.")],
    model: Annotated[str, typer.Option(help="As in `train`, or FILE.py:FUNCTION that makes it of the graph.")] = "sage",
    layers: Layers = 2,
    hidden: Hidden = 64,
    heads: Heads = 4,
    batch_norm: BatchNorm = False,
    frontend: Annotated[Literal["pyg", "dgl"], typer.Option(help="dgl calls model(graph, x).")] = "pyg",
    mode: Annotated[Mode, typer.Option(help="sar needs the least memory. The numbers agree.")] = "sar",
    backend: BackendName = "auto",
    ranks: Ranks = None,
    threads: Threads = 1,
    dtype: Type = "float32",
    edge_weight: EdgeWeight = "",
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there already.")] = False,
    tag: Annotated[str, typer.Option(help="Any text: a run does not continue one with another tag.")] = "",
) -> None:
    """Write a trained model's output for every node. A run that was ended goes on where it stood."""
    config = InferConfig(
        model, layers, hidden, heads, 0.0, batch_norm, dtype, edge_weight, store=str(store), output=str(output),
        weights=str(weights), frontend=frontend, mode=mode, threads=threads, overwrite=overwrite, tag=tag,
    )  # fmt: skip
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
    output: Annotated[Path, typer.Option(help="The directory for the chart and the numbers.")] = Path("demo-out"),
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the distributed runs.")] = 4,
    nodes: Annotated[int, typer.Option(help="Nodes of the power-law graph of the second stage.")] = 100_000,
) -> None:
    """Train an unmodified GAT in one process and on several ranks; compare memory, loss, accuracy and time."""
    run_demo(output, ranks, nodes)
