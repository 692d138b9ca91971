# One command each. Every target makes `.venv` itself; a finished one costs a file's timestamp.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
EXTRAS := worker,remote,demo,bench,dev
TEST_PROCESSES ?= 3

# What is shipped. Of low severity bandit finds assertions, random pauses and words like "token".
PRODUCT := admin api client/millstream_client dispatcher fleet gateway gpu_worker jobs millstream \
  registry simulation streams

.PHONY: serve test test-transformers sweep chaos adversary check format bench bench-engine bench-gpu \
  browser node

serve: $(READY)
	$(BIN)/millstream up $(ARGS)

test: $(READY) browser node
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-transformers: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.engine.transformers_versions $(ARGS)

# Every architecture of transformers, tiny and random, against `generate`; writes docs/models.md.
sweep: $(READY)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.sweep $(ARGS)

# Every fault, for half an hour or so; ARGS="--fault worker-kill --seed 7" replays one run.
chaos: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.chaos $(ARGS)

# Every class of credential against a running cell, some minutes; ARGS="--nodes 3 --json".
adversary: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.adversary $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --severity-level medium --recursive $(PRODUCT)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m bench $(ARGS)

# MILLSTREAM_BENCH_VLLM names a Python that has vLLM, MILLSTREAM_BENCH_TRACE a trace.
bench-engine: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m bench engine $(if $(MILLSTREAM_BENCH_TRACE),mixed) $(ARGS)

# On a machine with a GPU; needs no .venv where PYTHON has torch and the worker's packages.
bench-gpu:
	bench/gpu.sh $(ARGS)

$(READY): pyproject.toml client/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3"; exit 1; }
	@echo "Installing into .venv; the first time takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --editable '.[$(EXTRAS)]' --editable client
	@touch $@

# One test drives the page in a real browser.
browser:
	@{ command -v chromium && command -v chromedriver; } >/dev/null \
	  || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y chromium chromium-driver; } \
	  || { echo "the browser test needs chromium and chromedriver on the PATH"; exit 1; }

# One test runs the producer in JavaScript that `tenants add --producer` writes.
node: build/node/node_modules

build/node/node_modules: millstream/tenants/examples/package.json
	@{ command -v node && command -v npm; } >/dev/null \
	  || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y nodejs npm; } \
	  || { echo "the test of the JavaScript producer needs node and npm on the PATH"; exit 1; }
	mkdir -p build/node && cp $< build/node/
	npm install --prefix build/node --no-audit --no-fund --loglevel error && touch $@
