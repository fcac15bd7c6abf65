"""Whether the quick tests notice small defects in the modules where a defect gives wrong numbers and no error.

    python -m benchmarks.mutants                      # every module of mutants.toml: about two hours on two cores
    python -m benchmarks.mutants journal windows      # these alone
    python -m benchmarks.mutants --again journal      # only what was not killed, and changed functions
    python -m benchmarks.mutants --coverage           # only which lines and branches the same tests reach
    python -m benchmarks.mutants --report             # writes benchmarks/reports/ from what was found so far

mutmut makes the mutants, each with one operator, constant, argument or statement changed, and runs the tests that call
the changed function. A mutant is killed if one of them fails, or takes far longer than without it. One that survives
is a test that is missing, or is explained in mutants_explained.toml. Lines that hold only words of a message are left
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "mutants"
CONFIGURATION, EXPLAINED = ROOT / "benchmarks" / "mutants.toml", ROOT / "benchmarks" / "mutants_explained.toml"
KILLED = ("killed", "timeout", "segfault")
BAR = 90
PYTEST = ["-m", "not long", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--timeout=30"]
PYTEST += ["--hypothesis-profile=no shrinking"]  # which takes long, and tells nothing here
# mutmut collects the tests several times in one process. An iterator that parametrize was given is empty after the
# first, and a test that is not found counts as one that fails: every mutant would seem to be killed.
PYTEST += ["-o", "empty_parameter_set_mark=fail_at_collect"]
ONLY_WORDS = r'^\s*f?"[^"]*"$'

Mutant = dict[str, str]


class Found(NamedTuple):
    """What became of the mutants of a module."""

    total: int
    killed: int
    explained: list[Mutant]
    left: list[Mutant]

    @property
    def percent(self) -> float:
        """The share that is killed."""
        return 100 * self.killed / self.total


def modules() -> dict[str, dict[str, Any]]:
    """The modules by name: their file, and the tests that judge them."""
    return tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))


def judge(name: str, file: str, tests: list[str], again: bool) -> None:
    """Make the mutants of a module in a folder of their own, and run the tests on each."""
    place = PLACE / name
    if not again:
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    for linked in ("shardpass", "tests"):
        if not (place / linked).exists():
            (place / linked).symlink_to(ROOT / linked)
    settings = {
        "source_paths": ["shardpass"],
        "only_mutate": [file],
        "pytest_add_cli_args": PYTEST,
        "pytest_add_cli_args_test_selection": tests,
        "process_isolation": "fork",
        "do_not_mutate_patterns": [ONLY_WORDS],
        "timeout_multiplier": 5.0,
        "timeout_constant": 6.0,
    }
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (place / "pyproject.toml").write_text(project + "\n[tool.mutmut]\n" + "".join(lines), encoding="utf-8")
    (place / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)  # tests may have changed
    if again:
        _forget(place / "mutants" / f"{file}.meta", {key for key, how in statuses(name, file).items() if how in KILLED})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    mutmut = Path(sys.executable).with_name("mutmut")
    subprocess.run([mutmut, "run", "--max-children", "1"], cwd=place, env=environment, check=True)


def _forget(meta: Path, killed: set[str]) -> None:
    """Have mutmut judge again what was not killed; by itself it does so with functions that have changed."""
    if meta.exists():
        known = json.loads(meta.read_text())
        known["exit_code_by_key"] = {
            key: code if key in killed else None for key, code in known["exit_code_by_key"].items()
        }
        meta.write_text(json.dumps(known))


def statuses(name: str, file: str) -> dict[str, str]:
    """What became of each mutant of a module; nothing if none was made."""
    from mutmut.stats import status_by_exit_code

    meta = PLACE / name / "mutants" / f"{file}.meta"
    if not meta.exists():
        return {}
    return {key: status_by_exit_code[code] for key, code in json.loads(meta.read_text())["exit_code_by_key"].items()}


def found(name: str, file: str) -> Found:
    """The mutants of a module, those that were not killed with what they change."""
    from mutmut.configuration import reset_config
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    explained = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get(name, [])
    known = {(each["function"], each["was"], each["becomes"]): each["why"] for each in explained}
    every = statuses(name, file)
    living = [key for key, status in every.items() if status not in KILLED]
    result = Found(len(every), len(every) - len(living), [], [])
    with chdir(PLACE / name):
        reset_config()
        for key in living:
            lines = get_diff_for_mutant(key, path=file).splitlines()[3:]
            was, becomes = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
            function, owner = orig_function_and_class_names_from_key(key)
            function = f"{owner}.{function}" if owner else function
            mutant = {"function": function, "was": was, "becomes": becomes, "key": key, "status": every[key]}
            why = known.get((function, was, becomes))
            (result.left if why is None else result.explained).append({**mutant, "why": why or ""})
    return result


def coverage() -> dict[str, dict[str, Any]]:
    """What the tests of all modules reach: by file, as coverage.py says it."""
    PLACE.mkdir(parents=True, exist_ok=True)
    files = [each["file"] for each in modules().values()]
    tests = sorted({test for each in modules().values() for test in each["tests"] if not test.startswith("-")})
    environment = {**os.environ, "COVERAGE_FILE": str(PLACE / "coverage"), "OMP_NUM_THREADS": "1"}
    tool = [sys.executable, "-m", "coverage"]
    include = "--include=" + ",".join(files)
    slowly = "--timeout=300"  # tests take a multiple of their time while they are traced
    run = [*tool, "run", "--branch", include, "-m", "pytest", "-q", *PYTEST, slowly, *tests]
    subprocess.run(run, cwd=ROOT, env=environment, check=True)
    subprocess.run([*tool, "report", "--show-missing"], cwd=ROOT, env=environment, check=True)
    written = PLACE / "covered.json"
    subprocess.run([*tool, "json", "-q", "-o", written], cwd=ROOT, env=environment, check=True)
    return {file: each["summary"] for file, each in json.loads(written.read_text())["files"].items()}


def report(results: dict[str, Found], reached: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown, and every mutant that is left."""
    today = date.today().isoformat()
    lines = [
        f"# Mutants and coverage, {today}",
        "",
        "Of each module, how many small defects the quick tests notice, and which lines and branches they reach. "
        "Made by `make mutants` (`benchmarks/mutants.py`); a mutant that nothing can notice is explained in "
        "`benchmarks/mutants_explained.toml`.",
        "",
        "| module | mutants | killed | | explained | left | lines | branches |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in results.items():
        file = modules()[name]["file"]
        summary = reached[file]
        statements = 100 * summary["covered_lines"] / summary["num_statements"]
        branches = 100 * summary["covered_branches"] / max(1, summary["num_branches"])
        lines.append(
            f"| `{file.removeprefix('shardpass/')}` | {each.total} | {each.killed} | {each.percent:.1f} % | "
            f"{len(each.explained)} | {len(each.left)} | {statements:.1f} % | {branches:.1f} % |"
        )
    lines += ["", "What mutmut does not change: properties, defaults of dataclasses, constants of a module."]
    for name, each in results.items():
        if each.left:
            lines += ["", f"## Left in {name}", ""]
            lines += [f"- `{m['function']}`: `{m['was']}` becomes `{m['becomes']}` ({m['status']})" for m in each.left]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODULE", help="of mutants.toml; all by default")
    parser.add_argument("--again", action="store_true", help="only what was not killed the last time")
    parser.add_argument("--coverage", action="store_true", help="only which lines and branches the tests reach")
    parser.add_argument("--report", action="store_true", help="judge nothing, and write what was found so far")
    arguments = parser.parse_args()
    chosen = {name: modules()[name] for name in arguments.names or modules()}
    if arguments.coverage:
        coverage()
        return
    for name, each in chosen.items():
        if not arguments.report:
            judge(name, each["file"], each["tests"], arguments.again)
        result = found(name, each["file"])
        print(f"{name}: {result.total} mutants, {result.killed} killed, {len(result.explained)} explained")
        for mutant in result.left:
            print(f"  {mutant['key']} ({mutant['status']})\n    - {mutant['was']}\n    + {mutant['becomes']}")
    if arguments.report or not arguments.names:
        written = ROOT / "benchmarks" / "reports" / f"mutation-{date.today().isoformat()}.md"
        results = {name: found(name, each["file"]) for name, each in chosen.items()}
        written.write_text(report(results, coverage()), encoding="utf-8")
        short = [name for name, each in results.items() if each.percent < BAR or each.left]
        sys.exit(f"below the bar: {', '.join(short)}" if short else None)


if __name__ == "__main__":
    main()
