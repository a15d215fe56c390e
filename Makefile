# `make quickstart` and `make test` make their own environment; everything else here uses the same one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
DEV := $(VENV)/.dev-installed
RUN := $(VENV)/.installed

.PHONY: quickstart test test-ranks test-cluster test-faults lint benchmark clean

quickstart: $(RUN)  ## tune a small real model on two CPU ranks
	$(BIN)/autotune run quickstart

test: $(DEV)  ## all tests that CI needs to pass; under 6 minutes on two cores
	$(BIN)/python -m pytest tests --ignore=tests/benchmarks --ignore=tests/faults

test-ranks: $(DEV)  ## the conformance suite on real gloo ranks
	$(BIN)/python -m pytest tests/ranks

test-cluster: $(DEV)  ## real trials on a real local Ray
	$(BIN)/python -m pytest tests/cluster

test-faults: $(DEV)  ## runs that are killed, stopped and resumed; minutes
	$(BIN)/python -m pytest tests/faults

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(DEV)  ## overhead of a trial beside torchrun; prints tables, minutes
	$(BIN)/python -m tests.benchmarks.overhead

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
