# Rankscope: every target that a person or a script needs. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB_VENV := $(if $(RANKSCOPE_LAB_VENV),$(RANKSCOPE_LAB_VENV),.venv-vllm)
STAMP := $(VENV)/.rankscope-installed
PORT ?= 8700
HOLD ?= 180
MINUTES ?= 30
BENCH ?=
METHOD ?=
BOOT ?=
RUNS ?=
OPEN ?= $(if $(DISPLAY)$(WAYLAND_DISPLAY),--open)
PYTEST_ARGS ?=

.PHONY: help setup lab-setup lab-v2-setup lab-environments run demo test test-without-vllm test-fast test-vllm check format bench lab lab-down e2e e2e-baseline e2e-canary e2e-mid-drift e2e-v2 e2e-detect boots soak test-soak docs matrix lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml lab/pyproject.toml exporter/pyproject.toml server/pyproject.toml server/requirements.lock tests/requirements.txt
	@echo "setup: environment for server and tools in $(VENV) (about a minute the first time)" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r server/requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -e exporter -e server -e lab -r tests/requirements.txt
	@touch $@

setup: $(STAMP) ## Environment for server, exporter and tools (.venv)

lab-setup: setup ## Environment with a real vLLM on CPU (.venv-vllm, 3.3 GB, minutes)
	@$(BIN)/python -m rankscope_lab setup

lab-v2-setup: setup ## Environment with the vLLM whose V2 runner is tested (.venv-vllm-v2; it shares most files with the first)
	@$(BIN)/python -m rankscope_lab setup --release 0.32.0

run: lab-setup ## Server and lab: two real vLLM engines, and the page that shows them
	@$(BIN)/python -m rankscope_lab run --port $(PORT) --hold $(HOLD) $(OPEN)

demo: setup ## The same pages with simulated ranks, in seconds, without vLLM
	@$(BIN)/python -m rankscope_lab.demo --port $(PORT) $(OPEN)

lab: lab-setup ## The two engines, their exporters and traffic, without the server
	@$(BIN)/python -m rankscope_lab up --hold $(HOLD)

lab-down: setup ## End whatever a lab that crashed has left behind
	@$(BIN)/python -m rankscope_lab down

# The lab's environments are made while the tests run that need none.
test: setup ## All tests, real vLLM and browser included; a missing tool is a failure
	@$(MAKE) --no-print-directory -j 2 test-without-vllm lab-environments
	@RANKSCOPE_REQUIRE_ALL=1 $(BIN)/python -m pytest -m "vllm and not soak" --ignore tests/vllm/equivalence $(PYTEST_ARGS)
	@$(BIN)/uv pip install --quiet --python $(LAB_VENV)/bin/python -r tests/requirements-vllm.txt
	@RANKSCOPE_REQUIRE_ALL=1 $(LAB_VENV)/bin/python -m pytest tests/vllm/equivalence $(PYTEST_ARGS)

test-without-vllm: setup
	@RANKSCOPE_REQUIRE_ALL=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not vllm" --ignore tests/vllm/equivalence $(PYTEST_ARGS)

lab-environments: setup
	@$(BIN)/python -m rankscope_lab setup
	@$(BIN)/python -m rankscope_lab setup --release 0.32.0

test-fast: setup ## Tests that need neither vLLM nor a browser
	@$(BIN)/python -m pytest -m "not vllm and not browser" $(PYTEST_ARGS)

check: setup ## Lint, format, types, import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=exporter:server $(BIN)/lint-imports --no-cache

format: setup ## Format the code
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: $(if $(filter-out step_share lab_calls,$(BENCH)),setup,lab-setup) ## Benchmarks, one JSON line a figure; BENCH=hotpath for one
	@status=0; for file in tests/bench/bench_$(if $(BENCH),$(BENCH),*).py; do $(BIN)/python $$file || status=$$?; done; exit $$status

e2e: lab-setup ## Baseline, canary and mid-drift on real vLLM, one JSON line a figure
	@$(BIN)/python tests/e2e/run.py baseline canary mid-drift

e2e-baseline e2e-canary e2e-mid-drift: e2e-%: lab-setup
	@$(BIN)/python tests/e2e/run.py $*

e2e-v2: lab-v2-setup ## The V2 runner against an independent trace, by method, and a rank that fails; METHOD=eagle3 for one
	@$(BIN)/python tests/e2e/run_v2.py $(if $(METHOD),$(METHOD),none ngram_gpu eagle3 fault)

e2e-detect: lab-environments ## Ten wedges found, and how soon; ten fixed runs, ten without drafts and V2 with nothing found; RUNS=1 for a short one
	@$(BIN)/python tests/e2e/run_detect.py $(if $(RUNS),--runs $(RUNS))

boots: lab-setup lab-v2-setup ## Stock vLLM of several releases, identities and metrics against the run; BOOT=fork for one
	@$(BIN)/python tests/e2e/run_boots.py $(BOOT)

test-soak: lab-setup ## The soak in its short form, as a test
	@RANKSCOPE_REQUIRE_ALL=1 $(BIN)/python -m pytest tests/vllm/test_soak.py $(PYTEST_ARGS)

soak: lab-setup ## Restarts, a full file system and a stopped rank under traffic, MINUTES=30; one JSON line a figure
	@$(BIN)/python tests/soak/run.py --minutes $(MINUTES)

docs: setup ## Generate docs/metrics.md from the metric contract
	@$(BIN)/rankscope-exporter metrics-doc > docs/metrics.md

matrix: setup ## What hooks and fix find in each vLLM release (2 GB of wheels the first time); writes docs/compatibility.md
	@$(BIN)/python -m rankscope_lab.matrix --write docs/compatibility.md

lock: setup ## Pin the server's dependencies anew
	@echo 'rankscope-exporter @ file://$(CURDIR)/exporter' > $(VENV)/local.txt
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --no-annotate --no-header --no-emit-package rankscope-exporter --no-emit-index-url --no-emit-find-links --override $(VENV)/local.txt -o server/requirements.lock server/pyproject.toml

clean: ## Remove environments and what runs have left
	@rm -rf $(VENV) .venv-vllm .venv-vllm-* var .mypy_cache .ruff_cache .pytest_cache .hypothesis
