# `make quickstart` and `make test` make their own environment; everything else here uses the same one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
# Most tests wait for processes to start and end, so two files at a time; each of the two has a Ray of its own.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
SLOW_CLUSTER := $(addprefix tests/cluster/test_,nodes.py measure.py doctor.py composed.py)
# Overhead of a trial beside torchrun; composed steps beside whole ones; the verdict's false wins and power; the closed
# forms beside published runs and real trials; the samplers on simulated clusters.
BENCHMARKS := overhead composed verdict prediction search
DEV := $(VENV)/.dev-installed
RUN := $(VENV)/.installed

.PHONY: quickstart test test-ranks test-cluster test-faults test-clients test-gpu lint benchmark clean

quickstart: $(RUN)  ## tune a small real model on two CPU ranks
	$(BIN)/autotune run quickstart

test: $(DEV)  ## the driver, the exporters, and real trials on a real local Ray; under 6 minutes on two cores
	$(PYTEST) tests/unit tests/export tests/cluster $(SLOW_CLUSTER:%=--ignore=%)

test-ranks: $(DEV)  ## every engine and knob, models and data on real gloo ranks; measure, doctor; gangs over several Ray nodes
	$(PYTEST) tests/ranks $(SLOW_CLUSTER)

test-cluster: $(DEV)  ## real trials on a real local Ray
	$(PYTEST) tests/cluster

test-faults: $(DEV)  ## dead and hanging ranks and nodes, kills and resumption, bad input; under 15 minutes
	$(PYTEST) tests/faults

test-clients: $(DEV)  ## the probe in real trainers on two gloo ranks (plain, Lightning, accelerate, transformers); under 6 minutes
	$(PYTEST) tests/clients

test-gpu: $(DEV)  ## on a machine with a GPU (make the environment with a torch for it); under 8 minutes
	$(BIN)/python -m pytest tests/gpu

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(DEV)  ## each compares in one run and prints its tables; an hour in all, or BENCHMARKS="composed verdict"
	for name in $(BENCHMARKS); do $(BIN)/python -m tests.benchmarks.$$name || exit 1; done

$(RUN): pyproject.toml $(CONSTRAINTS)
	@echo "making the environment in $(VENV): a minute or more"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable .
	touch $@

$(DEV): pyproject.toml $(CONSTRAINTS)
	@echo "making the environment in $(VENV), with what tests need: a minute or more"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev,export-test,clients-test]'
	touch $@ $(RUN)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
