# `make quickstart` and `make test` make their own environment; everything else here uses the same one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
SLOW_CLUSTER := tests/cluster/test_nodes.py tests/cluster/test_measure.py
DEV := $(VENV)/.dev-installed
RUN := $(VENV)/.installed

.PHONY: quickstart test test-ranks test-cluster test-faults test-gpu lint benchmark clean

quickstart: $(RUN)  ## tune a small real model on two CPU ranks
	$(BIN)/autotune run quickstart

test: $(DEV)  ## the driver, the exporters, and real trials on a real local Ray; under 6 minutes on two cores
	$(BIN)/python -m pytest tests/unit tests/export tests/cluster $(SLOW_CLUSTER:%=--ignore=%)

test-ranks: $(DEV)  ## every engine and knob, models and data on real gloo ranks; measure by hand; gangs over several Ray nodes
	$(BIN)/python -m pytest tests/ranks $(SLOW_CLUSTER)

test-cluster: $(DEV)  ## real trials on a real local Ray
	$(BIN)/python -m pytest tests/cluster

test-faults: $(DEV)  ## dead and hanging ranks and nodes, kills and resumption, bad input; under 15 minutes
	$(BIN)/python -m pytest tests/faults

test-gpu: $(DEV)  ## on a machine with a GPU, with the torch that is installed there; under 8 minutes
	$(BIN)/python -m pytest tests/gpu

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(DEV)  ## overhead of a trial beside torchrun, and the search on simulated clusters; prints tables, minutes
	$(BIN)/python -m tests.benchmarks.overhead
	$(BIN)/python -m tests.benchmarks.search --seeds 3

$(RUN): pyproject.toml $(CONSTRAINTS)
	@echo "making the environment in $(VENV): a minute or more"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable .
	touch $@

$(DEV): pyproject.toml $(CONSTRAINTS)
	@echo "making the environment in $(VENV), with what tests need: a minute or more"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev,export-test]'
	touch $@ $(RUN)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
