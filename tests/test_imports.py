"""Importing shardpass needs no extra and does nothing else; a missing extra is one sentence."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

BLOCK = '''
import importlib.metadata, re, sys

def tops(names):
    """Top-level modules of these distributions and of all that they require."""
    seen, todo = set(), list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [re.split(r"[ ;<>=!~\\[(]", r)[0] for r in requires if "extra ==" not in r]
    return {
        top
        for top, owners in importlib.metadata.packages_distributions().items()
        if any(re.sub(r"[-_.]+", "-", owner).lower() in seen for owner in owners)
    }

ALLOWED = tops(["torch", "numpy", "safetensors"]) | {"shardpass"}

class Block:
    """Makes every third-party package that shardpass does not require look as if it were not installed."""

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ALLOWED or top in sys.modules:
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
'''

OPTIONAL = (
    "torch_geometric", "dgl", "mpi4py", "numba", "kaminpar", "pymetis", "typer", "rich", "click", "matplotlib",
    "sklearn", "scipy", "pandas", "pyarrow", "duckdb",
)  # fmt: skip


def python(code: str, *arguments: str) -> str:
    """What `code` prints, run in a fresh interpreter at the root of the repository."""
    kept = {k: v for k, v in os.environ.items() if not re.match(r"RANK$|WORLD_SIZE$|MASTER_|OMPI_|PMI|SLURM", k)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=480
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_without_extras() -> None:
    code = "from shardpass import *; import shardpass; print(set(shardpass.__all__) - set(dir(shardpass)))"
    out = python(BLOCK + code)
    assert out.strip() == "set()"


def test_import_has_no_side_effects() -> None:
    """No thread, no environment variable, no log level, no hook, no random number, no file; nor has reading arrays."""
    found = python("""
import atexit, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch.distributed

def state():
    known = logging.root.manager.loggerDict.items()
    loggers = {name: logger.level for name, logger in known if hasattr(logger, "level")}
    return {
        "threads": sorted(t.name for t in threading.enumerate()),
        "system threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "environment": dict(os.environ),
        "root logger": [logging.root.level, len(logging.root.handlers), logging.root.disabled],
        "loggers": loggers,
        "warnings": [str(f) for f in warnings.filters],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.meta_path), atexit._ncallbacks()],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),
                  torch.get_rng_state().sum().item(), torch.are_deterministic_algorithms_enabled()],
        "random": [hash(random.getstate()), hash(str(numpy.random.get_state()))],
        "directory": [os.getcwd(), os.umask(os.umask(0o22))],
    }

import importlib, pkgutil
before, loaded = state(), set(sys.modules)
import shardpass, shardpass.testing, shardpass.data, shardpass.core.aggregation.sharded_call, shardpass.backends.threads
shardpass.data.read({"edge_index": torch.zeros(2, 1).long(), "x": torch.zeros(2, 1)})
after = state()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps([changed, sorted({m.partition(".")[0] for m in set(sys.modules) - loaded})]))
""")
    changed, new = json.loads(found)
    assert not changed
    assert not set(new) & set(OPTIONAL), f"optional packages were imported: {sorted(set(new) & set(OPTIONAL))}"


MISSING = {
    "pyg": ("torch_geometric", "import shardpass\nshardpass.pyg", {}),
    "mpi": ("mpi4py", "import shardpass\nshardpass.connect('mpi')", {}),
    "mpirun": ("mpi4py", "import shardpass\nshardpass.connect()", {"OMPI_COMM_WORLD_SIZE": "2"}),
    "kaminpar": (
        "kaminpar",
        "import shardpass\n"
        "shardpass.partition({'edge_index': [[0, 1, 2], [1, 2, 0]], 'num_nodes': 3}, sys.argv[1] + '/s', 2)",
        {},
    ),
}


TELL = f"""{BLOCK}
import json, os
from shardpass.errors import MissingDependencyError

told = {{}}
for name, (code, variables) in json.loads(sys.argv[2]).items():
    os.environ.update(variables)
    try:
        exec(code)
    except MissingDependencyError as error:
        told[name] = str(error)
    for variable in variables:
        del os.environ[variable]
print(json.dumps(told))
"""


def test_a_missing_extra_is_one_sentence(tmp_path: Path) -> None:
    """All of them in one interpreter: starting one takes longer than all the rest."""
    cases = {name: (code, variables) for name, (_, code, variables) in MISSING.items()}
    told = json.loads(python(TELL, str(tmp_path), json.dumps(cases)))
    for name, (package, _, _) in MISSING.items():
        sentence = told[name]
        assert f"pip install {package} (shardpass's extra " in sentence
        assert "\n" not in sentence and ". " not in sentence, f"{name}: not one sentence: {sentence}"
        assert ("method='metis'" in sentence) == (name == "kaminpar")
    assert os.listdir(tmp_path) == []


def test_the_command_line_tells_of_its_extra() -> None:
    """Without typer the command ends with the sentence, or with the error that holds it."""
    told = python(
        f"{BLOCK}\nimport contextlib, io\nout = io.StringIO()\n"
        "with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):\n"
        "    try:\n"
        "        from shardpass.cli.main import main\n"
        "        sys.argv = ['shardpass', '--help']\n"
        "        main()\n"
        "    except (ImportError, SystemExit) as error:\n"
        "        print(error)\n"
        "print(out.getvalue())\n"
    )
    assert "pip install typer rich (shardpass's extra 'cli')" in told and "Traceback" not in told
