# Every target sets itself up: `make train` and `make test` work on a fresh clone.
#   PYTHON=python3.12   interpreter of the virtual environment (default: the best one found)
#   CONFIG=, ARGS=      configuration of `make train`, and key=value overrides
#   TESTS=              what `make test` runs
VENV   ?= .venv
EXTRAS ?= test
CONFIG ?= configs/quickstart.yaml
ARGS   ?=
TESTS  ?= tests
WORKERS ?= 2
RUN     = $(VENV)/bin/python

.PHONY: help train test test-fast lint types format setup clean

help:
	@sed -n '1,6p' Makefile; echo "Targets: train test test-fast lint types format setup clean"

setup:
	@sh scripts/venv.sh $(VENV) $(EXTRAS) $(PYTHON)

train: setup
	@$(RUN) -m train $(CONFIG) $(ARGS)

test: setup
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

test-fast: setup
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(TESTS)

lint: EXTRAS = dev
lint: setup
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

types: EXTRAS = dev
types: setup
	@$(RUN) -m pyright --pythonpath $(RUN)

format: EXTRAS = dev
format: setup
	@$(RUN) -m ruff check --fix . && $(RUN) -m ruff format .

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
