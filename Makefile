# make run    sets up .venv, then fuses, verifies and times an example on this machine's best device
# make test   sets up .venv, then runs the tests
# make help   lists the rest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REQUIREMENTS := requirements.txt requirements-dev.txt constraints.txt pyproject.toml

# What shows on this machine what epinorm is for: a CPU's product is PyTorch's, so there what stands around it must be most.
EXAMPLE ?= examples/$(if $(shell command -v nvidia-smi),matmul_groupnorm_leakyrelu_sum,groupnorm_rows).py
SCALE ?= 1

# One worker more than two cores: tests wait for other processes.
WORKERS ?= 3
TEST_SECONDS ?= 300
PYTEST := -n $(WORKERS) --dist worksteal --timeout $(TEST_SECONDS) --durations 10
NO_GPU := not gpu and not models

# For the targets that run on a GPU machine as it is, with nothing installed.
PYTHON_HERE := PYTHONPATH=src $${PYTHON:-python3}

.PHONY: help setup run record test test-slow figures matrix models coverage lint format docs test-gpu test-gpus sanitize-gpu fuzz instructions bench-gpu report build clean

help:  ## say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1|/' | \
	  while IFS='|' read -r name what; do printf '  make %-13s %s\n' "$$name" "$$what"; done

setup: $(READY)  ## make .venv with the pinned dependencies and this package (instant when up to date)

$(READY): $(REQUIREMENTS) scripts/setup.sh
	@bash scripts/setup.sh $(VENV)
	@touch $@

run: $(READY)  ## fuse, verify and time the example: table, JSON, picture and page
	@$(BIN)/epinorm bench $(EXAMPLE) --scale $(SCALE) $(ARGS)

record: $(READY)  ## as run, and keep the result as benchmarks/results/make-run.json for docs/results.md
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  $(BIN)/epinorm bench $(EXAMPLE) --scale $(SCALE) --out "$$folder" $(ARGS) && \
	  mkdir -p benchmarks/results && cp "$$folder"/*.json benchmarks/results/make-run.json

test: $(READY)  ## run the tests that need no GPU and take no more than some seconds each
	@$(BIN)/python -m pytest $(PYTEST) -m "$(NO_GPU) and not slow" $(ARGS)
	@echo "Covered: what a CPU can show, CUDA kernels compiled and their launches read; the rest of it by make test-slow." \
	  "Left to a GPU: what kernels compute and how fast (make test-gpu, make sanitize-gpu)."

test-slow: $(READY)  ## run those that take longer: compilers, several processes, whole commands
	@$(BIN)/python -m pytest $(PYTEST) -m "$(NO_GPU) and slow" $(ARGS)

figures: $(READY)  ## compile every kernel that the tests look at, and keep what ptxas says of it
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  EPINORM_CACHE_DIR="$$folder" $(BIN)/python -m pytest $(PYTEST) -m "$(NO_GPU)" -q $$(grep -l kept_figures tests/cuda/test_*.py) && \
	  $(BIN)/python tests/cuda/figures.py "$$folder"

# CPU builds where TORCH_INDEX names their index; PyPI's for Linux hold CUDA, several GB each.
TORCH_VERSIONS ?= 2.9.1 2.10.0 2.11.0 2.14.1 2.15.0
matrix:  ## run the tests that need no GPU against TORCH_VERSIONS, an environment each in .matrix
	@scripts/matrix.sh $(TORCH_VERSIONS) -- $(ARGS)

models: $(READY)  ## compare real architectures, fused, with eager: values, training, state_dict
	@$(BIN)/pip install -q -r requirements.txt -r requirements-models.txt
	@$(BIN)/python -m pytest tests/models -m models -n $(WORKERS) --dist worksteal --timeout $(TEST_SECONDS) $(ARGS)

coverage: $(READY)  ## count, over the same, where Linears reach norms and what is fused
	@$(BIN)/pip install -q -r requirements.txt -r requirements-models.txt
	@$(BIN)/python -W ignore tests/models/coverage.py $(ARGS)

lint: $(READY)  ## check format, lint, types and which way imports run
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

format: $(READY)  ## format and mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Not --quiet: warnings that are not logged are not counted, and `strict` is about those.
docs: $(READY)  ## build the documentation into site/, strictly; `make docs ARGS=serve` shows it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

# Side by side where pytest-xdist is there, on all GPUs; then, one by one, those that measure time.
GPU_WORKERS ?= 12
test-gpu:  ## run tests/gpu with the Python that is there (nothing is installed), GPU_WORKERS on each GPU
	@python=$${PYTHON:-python3}; workers=; failed=0; export PYTHONPATH=src; \
	  gpus=$$($$python -c 'import torch; print(max(1, torch.cuda.device_count()))'); \
	  if $$python -c 'import xdist' 2>/dev/null; then workers="-n $$((gpus * $(GPU_WORKERS))) --dist worksteal"; fi; \
	  $$python -m pytest tests/gpu -m "not alone" $$workers $(ARGS) || failed=$$?; \
	  $$python -m pytest tests/gpu -m alone $(ARGS) || failed=$$?; \
	  exit $$failed

GPUS ?= 2
test-gpus:  ## data and tensor parallel on GPUS GPUs of this machine: gradients, then times (nothing is installed)
	@export PYTHONPATH=src; python=$${PYTHON:-python3}; failed=0; \
	  $$python tests/parallel/on_gpus.py $(GPUS) || failed=$$?; \
	  timeout 300 $$python -m torch.distributed.run --standalone --nproc-per-node $(GPUS) benchmarks/parallel.py $(ARGS) \
	    || failed=$$?; exit $$failed

sanitize-gpu:  ## run every kind of kernel under compute-sanitizer (nothing is installed)
	@for tool in memcheck initcheck racecheck synccheck; do \
	  echo "compute-sanitizer --tool $$tool"; \
	  : "Our launches and PyTorch's ask the driver for things that it may not have: not an error."; \
	  [ $$tool = memcheck ] && quiet="--report-api-errors no" || quiet=; \
	  PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool $$quiet \
	    --error-exitcode 9 $${PYTHON:-python3} tests/gpu/sanitize.py $(ARGS); \
	done

FUZZ_SECONDS ?= 600
fuzz: $(READY)  ## random chains against float64 for FUZZ_SECONDS, on a GPU if there is one
	@$(BIN)/python scripts/fuzz.py --seconds $(FUZZ_SECONDS) $(ARGS)

instructions: $(READY)  ## count what a fused call and one left alone take on the host, by valgrind, without a GPU
	@$(BIN)/python benchmarks/instructions.py $(ARGS)

bench-gpu:  ## time every named shape with the Python that is there (nothing is installed)
	@$(PYTHON_HERE) benchmarks/run.py $(ARGS)

bench-models:  ## verify and time the named whole models with the Python that is there (nothing is installed)
	@$(PYTHON_HERE) benchmarks/models.py $(ARGS)

report: $(READY)  ## rewrite the pictures and generated tables of README and docs from benchmarks/results
	@$(BIN)/python benchmarks/report.py --readme $(ARGS)
	@for part in scale_model plot_precision plot_training; do $(BIN)/python docs/internals/$$part.py; done

build: $(READY)  ## build wheel and sdist into dist/
	@bash scripts/build.sh $(BIN)/python dist

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) .matrix build dist site epinorm-results .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
