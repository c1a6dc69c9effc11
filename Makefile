# The few commands a person types. Each target calls a real tool; `make` alone lists them.

# A working uv: the one on PATH if it runs here and is new enough (a version manager's shim may be neither),
# else one of our own, installed into .tools/.
UV := $(shell uv cache dir >/dev/null 2>&1 && echo uv || echo .tools/bin/uv)
BIN := .venv/bin
ARGS ?=

# uv fills the lock in, and git takes another size for another content: when the committed form is the same, say so.
LOCK_IS_CLEAN := if [ -e .git ] && ! git diff-files --quiet uv.lock && git diff --quiet uv.lock; \
  then git add uv.lock; fi 2>/dev/null || true

# Ray and the engines start many processes: without bytecode each of them compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all lint format docs bench bench-peers engines lock build clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(filter .tools/%,$(UV)) ## Install uv if missing, then everything the lock pins into .venv/ (about a second when done)
	@[ ! -e .git ] || git config --local filter.neutral-lock.clean 'python3 scripts/neutral_lock.py' 2>/dev/null || true
	@if $(UV) sync --check --quiet 2>/dev/null; then $(UV) sync; else \
	  echo "installing what the lock pins and compiling its bytecode: two to four minutes the first time"; \
	  $(UV) sync --compile-bytecode; fi
	@$(LOCK_IS_CLEAN)

.tools/bin/uv:
	python3 -m venv --clear .tools || python3.12 -m venv --clear .tools
	.tools/bin/python -m pip install --quiet 'uv>=0.9'

train: setup ## Train the quick start: make train ARGS="mode=colocate seed=1"
	$(BIN)/relax train configs/quickstart.yaml $(ARGS)

# SGLang has kernels for x86-64 Linux only, and needs a C compiler for the stand-in of libcuda that it loads here.
ENGINES := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),$(if $(shell command -v cc gcc),engines))

# Two workers, a file to each in turn: much of the time of tests is waiting. ARGS="-n 0" runs them in one process.
test: lint $(ENGINES) ## Lint, then every test but the slow ones: make test ARGS="-k queue"
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" --hypothesis-profile=ci \
	  --durations=10 $(ARGS)

test-all: lint $(ENGINES) docs ## Lint, docs, and every test, slow ones too
	$(BIN)/python -m pytest --durations=10 $(ARGS)

lint: setup ## ruff, basedpyright and the import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --warnings
	$(BIN)/lint-imports --no-logo

format: setup ## Fix what ruff can fix, then format
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

docs: setup ## Build the site into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(UV) run --isolated --only-group docs mkdocs build --strict

bench: $(filter .tools/%,$(UV)) ## Run benchmarks/*.py in turn, a JSON line per claim (see bench-peers)
	@$(UV) sync --inexact --quiet
	@set -e; for script in $(filter-out %/claims.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script $(ARGS); done

bench-peers: $(filter .tools/%,$(UV)) ## Install the peers of the benchmarks: trl until the next setup, the rest into .bench/
	$(UV) sync --compile-bytecode --group bench
	$(UV) venv --quiet --allow-existing --python $(BIN)/python .bench/queue
	$(UV) pip sync --quiet --compile-bytecode --python .bench/queue/bin/python benchmarks/queue_sides/requirements.txt
	@command -v redis-server >/dev/null || \
	  echo "redis-server is missing: install it with the system's package manager (apt-get install redis-server)"

engines: setup ## Install SGLang and megatron-bridge for their tests into .engines/ (make test does, where they run)
	@[ -e .engines/sglang ] || echo "installing SGLang for its tests, beside what the workspace has: a minute or two"
	$(UV) venv --quiet --allow-existing --python $(BIN)/python .engines/sglang
	$(UV) pip sync --quiet --compile-bytecode --python .engines/sglang/bin/python tests/engines/requirements-sglang.txt
	$(UV) pip install --quiet --no-deps --python $(BIN)/python --target .engines/megatron-bridge -r tests/engines/requirements-megatron-bridge.txt

lock: setup ## Move every pin that docs/decisions/0002 leaves free; the only way to change pins
	$(UV) lock --upgrade

build: setup ## Wheels of all packages into dist/
	$(UV) build --all-packages --wheel --out-dir dist

clean: ## Remove what the other commands made, but not .venv/ nor runs/
	rm -rf dist build site .hypothesis .ruff_cache .pytest_cache .import_linter_cache
