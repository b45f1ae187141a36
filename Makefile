# make demo     the main job: a tiny model learns addition on this machine
# make set-up   the environment alone (.venv), to plan and simulate
# make test     the tests, on two workers     make check    format, lint, types, layers
# make test-PACKAGE  the tests of one package, such as test-rollout
# make test-ranks    several processes that train one model
# make test-slow     large cases of tests that `make test` has small ones of
# make test-browser  pages in a headless Chromium (`make test` has them where one is installed)
# make test-engines  real inference servers (an environment of their own, 3 GB; FLOWRL_SGLANG_PYTHON
#               names one that is there; with FLOWRL_VLLM_PYTHON vLLM too)
# make learn    every program learns from a warm start (`make test-slow` has two of them)
# make soak     ten million events against the rollout scheduler, on all cores
# make bounds   the bounds of schedules and of planned rollouts by simulation, over whole grids
#               (the tests run parts)
# make chaos    kills processes of real runs at random moments, 50 times (the tests make three)
# make bench    the benchmarks, quickly
# make bench-trl  flowrl and TRL in turns on one thread each (TRL gets an environment of its own)
# make format   formats the code   make lock     makes requirements/lock.txt anew
#
# Each sets up .venv first, and again when pyproject.toml or the lock has changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := demo

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
LOCK := requirements/lock.txt

# pip shows errors and real warnings only.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
QUIETLY := 2>&1 | sed -e '/^WARNING: Location .* is ignored/d'
PIP = $(BIN)/python -m pip --quiet

# Seconds after which a test run that hangs is stopped; the learning tests take about 25 minutes.
TEST_LIMIT_S ?= 1800
LEARN_LIMIT_S ?= 5400
TEST = timeout --kill-after=30 $(TEST_LIMIT_S) $(BIN)/python -m pytest -q --durations=30
# Large cases have targets of their own.
QUICK = -m "not learn and not grid and not slow"
# Processes that share the tests; a file's tests stay in one of them.
TEST_WORKERS ?= 2
SHARED = -n $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder

# What `make soak` plays; another seed plays other events.
SOAK_EVENTS ?= 10000000
SOAK_SEED ?= 0

.PHONY: demo test test-browser test-slow test-engines test-ranks learn soak bounds chaos check format bench bench-trl lock set-up clean

demo: set-up
	$(BIN)/flowrl run configs/quickstart.yaml
	$(BIN)/flowrl report "$$(ls -td runs/quickstart*/ | head -n 1)"

test: set-up
	$(TEST) $(QUICK) $(SHARED)

test-slow: set-up
	$(TEST) -m slow $(SHARED)

test-ranks: set-up
	$(TEST) tests/backend/test_balance.py tests/plan/test_ranks.py tests/runtime/test_ranks.py \
	  tests/runtime/test_rank_runs.py tests/torch_backend/test_ranks.py

test-browser: set-up
	@$(BIN)/python -c 'import sys; from tests.browser.chromium import find_chromium; \
	  sys.exit(not find_chromium() and "no Chromium: apt install chromium, or set CHROMIUM=PATH")'
	$(TEST) tests/browser

test-%: set-up
	$(TEST) $(QUICK) tests/$*

test-engines: set-up $(if $(FLOWRL_SGLANG_PYTHON),,.venv-sglang/.set-up)
	FLOWRL_SGLANG_PYTHON=$(or $(FLOWRL_SGLANG_PYTHON),$(CURDIR)/.venv-sglang/bin/python) \
	  $(TEST) tests/engines

# Without the packages that SGLang requires for GPUs; tests/engines has a stand-in for its kernels.
.venv-sglang/.set-up: requirements/sglang.txt
	@test -x .venv-sglang/bin/python || requirements/make_venv.sh .venv-sglang
	@echo "installing SGLang into .venv-sglang"
	@.venv-sglang/bin/python -m pip --quiet install "$$(grep '^torch==' $<)" $(QUIETLY)
	@.venv-sglang/bin/python -m pip --quiet install --no-deps -r $< $(QUIETLY)
	@touch $@

learn: set-up
	timeout --kill-after=30 $(LEARN_LIMIT_S) $(BIN)/python -m pytest -q tests/learning \
	  -o faulthandler_timeout=$(LEARN_LIMIT_S)

# About an hour of processor time, shared out over the cores.
soak: set-up
	$(BIN)/python -m tests.proofs.scheduler_fuzz --events $(SOAK_EVENTS) --seed $(SOAK_SEED) \
	  --jobs "$$(nproc)"

bounds: set-up
	$(BIN)/python -m tests.proofs.schedule_bounds --whole
	$(BIN)/python -m tests.proofs.rollout_grid --whole
	timeout --kill-after=30 $(TEST_LIMIT_S) $(BIN)/python -m pytest -q -m grid

# Half an hour on two cores.
chaos: set-up
	$(BIN)/python -m tests.proofs.chaos --kills 38 --seed 0 --executor ray
	$(BIN)/python -m tests.proofs.chaos --kills 12 --seed 1 --executor local

check: set-up
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: set-up
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: set-up
	$(BIN)/python benchmarks/decoder.py --batches 1 8 64 --repetitions 2

# About ten minutes on a quiet machine; TRL takes nearly all of it.
bench-trl: set-up .venv-trl/.set-up
	$(BIN)/python benchmarks/vs_trl_cpu.py --results benchmarks/results

.venv-trl/.set-up: requirements/trl.txt
	@test -x .venv-trl/bin/python || requirements/make_venv.sh .venv-trl
	@echo "installing TRL into .venv-trl"
	@.venv-trl/bin/python -m pip --quiet install "$$(grep '^torch==' $<)" $(QUIETLY)
	@.venv-trl/bin/python -m pip --quiet install -r $< $(QUIETLY)
	@touch $@

# Byte code, also where Python is told to write none: without it every command starts twice as late.
set-up: $(STAMP)
	@$(BIN)/python -m compileall -q flowrl graphs backends

# torch comes first and alone: with the others beside it, pip may settle on another build of it.
$(STAMP): pyproject.toml $(LOCK)
	@test -x $(BIN)/python || requirements/make_venv.sh $(VENV)
	@echo "installing pinned packages into $(VENV) (a few minutes the first time)"
	@$(PIP) install -c $(LOCK) "$$(grep '^torch==' $(LOCK))" $(QUIETLY)
	@$(PIP) install -r $(LOCK) $(QUIETLY)
	@$(PIP) install --no-deps --no-build-isolation --editable . $(QUIETLY)
	@touch $@

# The lock is what a fresh environment resolves to today, within pyproject.toml's ranges.
lock:
	rm -rf build/lock-venv
	requirements/make_venv.sh build/lock-venv
	build/lock-venv/bin/pip -q install -c requirements/constraints.txt torch $(QUIETLY)
	build/lock-venv/bin/pip -q install -c requirements/constraints.txt '.[torch,dev]' $(QUIETLY)
	{ echo '# Made by `make lock`; do not edit.'; \
	  build/lock-venv/bin/pip list --format=freeze --exclude flowrl --exclude pip \
	    2>/dev/null | sed -e 's/+[a-z0-9.]*$$//'; } > $(LOCK)
	rm -rf build/lock-venv

clean:
	rm -rf $(VENV) .venv-trl .venv-sglang build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
