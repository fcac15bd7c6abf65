"""Launching on several hosts: scripts of ``examples/cluster`` run, YAML fits its schemas, pages quote what runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardpass as sp
from benchmarks.jobs import why_no_namespaces
from shardpass.cli.launch import launcher_environment

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
MANIFESTS = sorted(CLUSTER.glob("*.yaml"))

TRAINER = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
"""The fields of `TrainJob.spec.trainer` in trainer.kubeflow.org/v1alpha1."""

JOB_SET = {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend"}
CONTAINER = {"name", "image", "command", "args", "env", "volumeMounts", "readinessProbe", "resources"}
POLICIES = {
    "torch": {"numProcPerNode"},
    "mpi": {"numProcPerNode", "mpiImplementation", "sshAuthMountPath", "runLauncherAsNode"},
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(pytest.importorskip("yaml").safe_load_all(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert os.access(script, os.X_OK)


@pytest.mark.long
@pytest.mark.processes
def test_a_slurm_script_trains(tmp_path: Path) -> None:
    """With a stand-in for srun, on two ranks."""
    pytest.importorskip("torch_geometric")
    pytest.importorskip("typer")
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {
        "srun": f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "fake_srun.py"}" "$@"\n',
        "shardpass": f'#!/bin/bash\nexec "{sys.executable}" -m shardpass.cli "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    ring = torch.stack([torch.arange(40), (torch.arange(40) + 1) % 40])
    graph = {
        "edge_index": ring,
        "x": torch.randn(40, 4),
        "y": torch.arange(40) % 2,
        "train_mask": torch.ones(40).bool(),
    }
    sp.partition(graph, tmp_path / "parts", parts=2, method="range")
    slurm = {"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0"}
    kept = {name: value for name, value in os.environ.items() if not re.match(r"RANK$|WORLD_SIZE$|OMPI_|PMI", name)}
    words = ["bash", str(CLUSTER / "slurm-4-nodes.sh"), "parts", "--model", "sage", "--epochs"]
    done = subprocess.run(
        [*words, "2"], cwd=tmp_path, capture_output=True, text=True, timeout=480, check=False,
        env={**kept, **slurm, "VENV": str(tmp_path / "venv"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stdout and (tmp_path / "run.ckpt").exists()


PROGRAM = """
import sys
import shardpass as sp, torch
from torch_geometric.nn import GAT

comm = sp.connect()
graph = sp.load(sys.argv[1], comm)
torch.manual_seed(0)
model = sp.pyg.wrap(GAT(4, 8, 2, 2), comm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(3):
    loss = sp.cross_entropy(model(graph.x, graph.edge_index), graph.y, None, comm)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {comm.rank} of {comm.size}, beside {comm.local_ranks}: {loss.item():.6f}", flush=True)
"""

ON_EACH_HOST = """
for rank in 0 1; do
    in_host="nsenter -t ${NAMESPACES%% *} -n unshare -u"  # a name of its own too, as hosts that share memory have one
    NAMESPACES=${NAMESPACES#* }
    $in_host bash -c "echo host$rank > /proc/sys/kernel/hostname; exec $1 $rank $2" & started[$rank]=$!
done
wait ${started[0]} && wait ${started[1]}
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces() or "-")
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    """The command of the page, in network namespaces: the numbers are those of one process."""
    pytest.importorskip("torch_geometric")
    page = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^torchrun (--nnodes 2 .*)$", page, re.M)
    line = line.replace("--nproc-per-node 4", "--nproc-per-node 2").replace("host0", "10.9.0.10")
    before, after = line.split("--node-rank 0")
    (tmp_path / "train.py").write_text(PROGRAM)
    draw = torch.Generator().manual_seed(0)
    edges, x = torch.randint(60, (2, 300), generator=draw), torch.randn(60, 4, generator=draw)
    sp.partition({"edge_index": edges, "x": x, "y": torch.arange(60) % 2}, tmp_path / "parts", parts=4, method="range")
    env = launcher_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def said(*command: str) -> list[tuple[str, str, str]]:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=480, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(re.findall(r"rank (\d of \d), beside \(([\d, ]+)\): ([\d.]+)", done.stdout))

    ((_, _, loss),) = said(sys.executable, "train.py", "parts")
    hosts = ["unshare", "-rn", "bash", str(ROOT / "benchmarks" / "three_hosts.sh"), "bash", "-c", ON_EACH_HOST, "-"]
    found = said(*hosts, f"{sys.executable} -m torch.distributed.run {before}--node-rank", after)
    assert [(rank, beside) for rank, beside, _ in found] == [
        ("0 of 4", "0, 1"), ("1 of 4", "0, 1"), ("2 of 4", "2, 3"), ("3 of 4", "2, 3"),
    ]  # fmt: skip
    assert [float(of_rank) for *_, of_rank in found] == pytest.approx([float(loss)] * 4, abs=2e-6)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_fields_of_their_schemas(path: Path) -> None:
    by_kind = {found["kind"]: found for found in documents(path)}
    for found in by_kind.values():
        assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found["metadata"]["name"])
    if path.name.startswith("trainjob"):
        check_training(by_kind["TrainingRuntime"], by_kind["TrainJob"])
    elif path.name == "pytorchjob.yaml":
        check_operator(by_kind["PyTorchJob"])
    elif path.name == "network-policy.yaml":
        policy = by_kind["NetworkPolicy"]
        assert policy["apiVersion"] == "networking.k8s.io/v1"
        assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    else:
        pod = by_kind["Job"]["spec"]["template"]["spec"]
        check_pod(pod)
        check_command(pod["containers"][0]["command"])
        assert by_kind["PersistentVolumeClaim"]["metadata"]["name"] == "graphs"


def check_training(runtime: dict[str, Any], job: dict[str, Any]) -> None:
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert job["spec"]["runtimeRef"] == reference
    assert set(job["spec"]) == {"runtimeRef", "trainer"} and set(job["spec"]["trainer"]) <= TRAINER
    assert set(runtime["spec"]) == {"mlPolicy", "template"}
    (policy,) = set(runtime["spec"]["mlPolicy"]) - {"numNodes"}
    assert set(runtime["spec"]["mlPolicy"][policy]) <= POLICIES[policy]
    job_set = runtime["spec"]["template"]["spec"]
    assert set(job_set) <= JOB_SET
    trained = [
        replicated["name"]
        for replicated in job_set["replicatedJobs"]
        if replicated["template"]
        .get("metadata", {})
        .get("labels", {})
        .get("trainer.kubeflow.org/trainjob-ancestor-step")
    ]
    assert trained == ["launcher" if policy == "mpi" else "node"], "the job whose command the TrainJob gives"
    for replicated in job_set["replicatedJobs"]:
        assert replicated["template"]["spec"]["backoffLimit"] == 0
        pod = replicated["template"]["spec"]["template"]["spec"]
        check_pod(pod)
        assert [container["name"] for container in pod["containers"]] == ["node"], "Trainer looks for this name"
    trainer = job["spec"]["trainer"]
    ranks = trainer["numNodes"] * trainer["numProcPerNode"]
    words = [*trainer["command"], *trainer["args"]]
    check_command(words)
    assert policy == "torch" or words[words.index("-n") + 1] == str(ranks)
    threads = int(words[words.index("--threads") + 1])
    assert threads * trainer["numProcPerNode"] <= int(trainer["resourcesPerNode"]["requests"]["cpu"])


def check_operator(job: dict[str, Any]) -> None:
    """The schema, and what only the operator's own checks find: kinds of replicas and the container's name."""
    (schema,) = documents(ROOT / "tests" / "pytorchjob_schema.yaml")
    fits(job, schema, "job")
    assert job["apiVersion"] == "kubeflow.org/v1"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert {one["restartPolicy"] for one in replicas.values()} <= {"Always", "ExitCode", "Never", "OnFailure"}
    pods = sum(one["replicas"] for one in replicas.values())
    assert job["spec"]["runPolicy"]["backoffLimit"] == 3 * pods + 1
    for one in replicas.values():
        pod = one["template"]["spec"]
        check_pod(pod)
        (container,) = pod["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        words = [*container["command"], *container["args"]]
        check_command(words)
        options = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(words)))
        threads = int(words[words.index("--threads") + 1])
        assert int(options["nnodes"]) == pods
        assert threads * int(options["nproc-per-node"]) <= int(container["resources"]["requests"]["cpu"])


def fits(value: Any, schema: dict[str, Any], where: str) -> None:
    """Fails unless a value is of the schema's type, with the fields that it requires and no others."""
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    assert type(value) is types[schema["type"]], f"{where} is {value!r}, not of type {schema['type']}"
    if isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        assert set(schema.get("required", ())) <= set(value), f"{where} has not all of {schema['required']}"
        assert others or set(value) <= set(fields), f"{where} has the fields {set(value) - set(fields)}"
        for name, one in value.items():
            fits(one, fields.get(name, others), f"{where}.{name}")
    for number, one in enumerate(value if isinstance(value, list) else ()):
        fits(one, schema["items"], f"{where}[{number}]")


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (("spec", "runPolicy"), {"backofLimit": 3}, "has the fields {'backofLimit'}"),
        (("spec", "runPolicy"), {"backoffLimit": "3"}, "is '3', not of type integer"),
        (("spec",), {}, "has not all of"),
    ],
)
def test_what_does_not_fit_the_schema_is_found(place: tuple[str, ...], wrong: dict[str, Any], words: str) -> None:
    (job,), (schema,) = documents(CLUSTER / "pytorchjob.yaml"), documents(ROOT / "tests" / "pytorchjob_schema.yaml")
    within = job
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = wrong
    with pytest.raises(AssertionError, match=words):
        fits(job, schema, "job")


def check_pod(pod: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert set(container) <= CONTAINER
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(isinstance(word, str) for word in [*container.get("command", ()), *container.get("args", ())])


def check_command(words: list[str]) -> None:
    """The `shardpass` command line among these words is one that the command takes."""
    typer = pytest.importorskip("typer")
    from shardpass.cli.app import app

    place = next(index for index, word in enumerate(words) if Path(word).name == "shardpass")
    _, name, *arguments = words[place:]
    typer.main.get_command(app).commands[name].make_context(name, arguments)


def test_the_page_quotes_the_files() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w.-]+)`:\n\n```\w+\n(.*?)^```", text, re.S | re.M)
    assert {name for name, _ in quoted} >= {path.name for path in SCRIPTS}
    for name, block in quoted:
        assert block in (CLUSTER / name).read_text(encoding="utf-8"), f"{name} has changed"
    for path in CLUSTER.iterdir():
        assert path.name in text, f"docs/clusters.md does not name {path.name}"


def test_the_dockerfile_copies_what_there_is_and_installs_extras_that_exist() -> None:
    text = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = ", project, re.M) for extra in extras.split(","))
    assert text.index("TORCH_INDEX") < text.index(extras), "torch first: else the resolver takes another build"
