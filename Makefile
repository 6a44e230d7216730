# `make demo` and `make test` do all their set-up themselves. DEMO_ARGS=--fast makes the demo short.
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test quick test-gpu check setup clean

demo: setup
	$(BIN)/tltlab demo --out demo $(DEMO_ARGS)

# First what starts no engine (run that line after every change), beside lint and types; then engines, Ray and trainers.
# Engines wait for each other and for processes: three side by side keep two cores busy.
# What fails runs once more by itself. Of all tests two may pass only then, and the end names them: `tests/again.py`.
test: setup
	$(MAKE) -j 2 check quick
	$(BIN)/pytest -n 3 --again --durations 10 -m engine

quick: setup
	@rm -f .pytest_cache/v/again/names
	$(BIN)/pytest -n 2 --again --durations 10 -m "not engine"

# On a machine with a CUDA device, in an environment of its own (PYTHON=...) with a CUDA build of torch; what needs vLLM
# is skipped, with the reason, where vLLM or its CUDA build is missing.
test-gpu: PYTHON ?= python
test-gpu:
	$(PYTHON) -m pytest -m gpu -rs tests/gpu

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/volume.py

setup:
	@.ci/setup

clean:
	rm -rf .venv demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
