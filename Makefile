# `make quickstart` and `make test` make their own environment; everything else here uses the same one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
# Most tests wait for processes to start and end, so two files at a time; each of the two has a Ray of its own.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
SLOW_CLUSTER := $(addprefix tests/cluster/test_,nodes.py measure.py doctor.py composed.py confirm.py ray_tune.py scale.py run_ends.py)
# Overhead of a trial beside torchrun; composed steps beside whole ones; the verdict's false wins and power; the closed
# forms beside published runs and real trials; the samplers on simulated clusters, and what a suggestion costs.
BENCHMARKS := overhead composed verdict prediction search suggest
# Export tests against the parsers of these trainers, which only `test-clients` installs; of the last two without their
# dependencies, which are gigabytes.
OF_TRAINERS := $(addprefix tests/export/test_,lightning.py lightning_run.py deepspeed.py torchtitan.py axolotl.py)
CONFIGS_ALONE := torchtitan axolotl
# What else torchtitan's own trainer needs. The test of it is marked `torchtitan`, which pyproject.toml deselects.
OF_TORCHTITAN := triton datasets tensorboard
# Python:torch of environments that ranks are tested in besides the driver's own; gigabytes, where pip has no CPU build.
RANGE := 3.10:2.7.1 3.12:2.9.1
RANGE_HOME := .torch-range
RANGE_PYTHONS ?= $(subst $(SPACE),:,$(foreach one,$(RANGE),$(CURDIR)/$(RANGE_HOME)/$(subst :,-torch,$(one))/bin/python))
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
DEV := $(VENV)/.dev-installed
RUN := $(VENV)/.installed
CLIENTS := $(VENV)/.clients-installed
TORCHTITAN := $(VENV)/.torchtitan-installed
BROWSER := $(VENV)/.browser-installed

.PHONY: quickstart test test-ranks test-cluster test-faults test-clients test-torchtitan test-torch-range test-browser test-gpu lint benchmark clean

quickstart: $(RUN)  ## tune a small real model on two CPU ranks
	$(BIN)/autotune run quickstart

test: $(DEV)  ## the driver, the exporters, and real trials on a real local Ray; under 6 minutes on two cores
	$(PYTEST) tests/unit tests/export tests/cluster $(SLOW_CLUSTER:%=--ignore=%) $(OF_TRAINERS:%=--ignore=%)

test-ranks: $(DEV)  ## every engine and knob, models and data on real gloo ranks; measure, doctor; gangs over several Ray nodes
	$(PYTEST) tests/ranks $(SLOW_CLUSTER)

test-cluster: $(DEV)  ## real trials on a real local Ray
	$(PYTEST) tests/cluster

test-faults: $(DEV)  ## dead and hanging ranks and nodes, kills and resumption, bad input; under 15 minutes
	$(PYTEST) tests/faults

test-clients: $(CLIENTS)  ## real trainers (plain, Lightning, accelerate, transformers) under the probe, and the parsers of those exported to
	$(PYTEST) tests/clients $(OF_TRAINERS)

test-browser: $(BROWSER)  ## the report's page in Debian's chromium (apt-get install chromium chromium-driver)
	$(BIN)/python -m pytest tests/browser

test-torchtitan: $(TORCHTITAN)  ## torchtitan's own trainer under the probe, on two GPUs, or with a shim on CPUs; a gigabyte more
	$(BIN)/python -m pytest -m '' tests/clients/test_torchtitan.py tests/export/test_torchtitan.py

test-torch-range: $(DEV) $(foreach one,$(RANGE),$(RANGE_HOME)/$(subst :,-torch,$(one))/.installed)  ## ranks under other Pythons and torches than the driver's; needs those Pythons
	RANGE_PYTHONS='$(RANGE_PYTHONS)' $(PYTEST) tests/torch_range

$(RANGE_HOME)/%/.installed:
	python$(firstword $(subst -torch, ,$*)) -m venv $(RANGE_HOME)/$*
	$(RANGE_HOME)/$*/bin/python -m pip install --quiet torch==$(lastword $(subst -torch, ,$*)) numpy
	touch $@

test-gpu: $(DEV)  ## on a machine with a GPU (make the environment with a torch for it); under 8 minutes
	$(BIN)/python -m pytest tests/gpu

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 trials  # ranks may run on it

benchmark: $(DEV)  ## each compares in one run and prints its tables; two hours in all, or BENCHMARKS="composed verdict"
	for name in $(BENCHMARKS); do $(BIN)/python -m tests.benchmarks.$$name || exit 1; done

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

$(CLIENTS): $(DEV)
	@echo "installing the trainers that are tested with: minutes"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev,export-test,clients-test]'
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps $(CONFIGS_ALONE)
	touch $@

$(TORCHTITAN): $(CLIENTS)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) $(OF_TORCHTITAN)
	touch $@

$(BROWSER): $(DEV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev,export-test,browser-test]'
	touch $@

clean:
	rm -rf $(VENV) $(RANGE_HOME) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
