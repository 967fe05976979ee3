# Needs only make and Python >= 3.11. `make help` lists the targets.

.PHONY: help quickstart test test-all gpu tpu aot lint venv
.DEFAULT_GOAL := help

# On the command line: PYTHON=python3.12, ACCELERATOR=cpu|cuda12|cuda13|tpu, ARGS="...".
PYTHON ?= python3.13 python3.12 python3.11 python3
ARGS ?=
ifndef ACCELERATOR
ACCELERATOR := $(shell sh .ci/accelerator.sh)
endif

BIN := .venv/bin
# The tests of a file share a worker, in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile --no-loadscope-reorder
# One stamp per kind of device: .venv may be shared by a machine with and one without.
STAMP := .venv/.installed-$(ACCELERATOR)
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input install
# True for a Python that is new enough and complete (some systems split off ensurepip).
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1:/p' Makefile | awk -F: '{ printf "%-18s%s\n", $$1, $$2 }'
	@echo 'Variables: PYTHON=python3.12  ACCELERATOR=cpu|cuda12|cuda13|tpu  ARGS="more arguments"'

quickstart: venv ## the default RL run on this machine's devices, into runs/quickstart
	@echo 'Default run -> runs/quickstart; the same command resumes it.'
	@$(BIN)/python -m experiments.train --config=experiments/configs/countdown.py \
	  --workdir=runs/quickstart $(ARGS)

test: venv ## the test suite, on the CPU as 8 devices
	@echo 'Test suite on the CPU: some minutes, less when its programs are compiled already.'
	@$(PYTEST) $(or $(ARGS),tests)

test-all: venv ## the test suite with its slowest cases
	@$(PYTEST) --all $(or $(ARGS),tests)

gpu: venv ## tests and benchmarks of an NVIDIA GPU, 50 minutes; resumes
	@$(BIN)/python -m benchmarks.accelerator --kind=gpu $(ARGS)

tpu: venv ## the same for a TPU
	@$(BIN)/python -m benchmarks.accelerator --kind=tpu $(ARGS)

aot: .venv-aot/.installed ## large programs compiled for TPUs and GPUs, without the devices
	@.venv-aot/bin/python -m dev.aot $(ARGS)

.venv-aot/.installed: requirements-aot.txt $(STAMP)
	@echo 'Installing compilers for TPUs and GPUs into .venv-aot: 1.3 GB, some minutes, once.'
	@$(BIN)/python -m venv --clear .venv-aot
	@p='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$p" > "$$(.venv-aot/bin/python -c "$$p")/venv.pth"
	@.venv-aot/bin/python -m pip -qq --disable-pip-version-check --no-input install \
	  -r requirements-aot.txt
	@touch $@

lint: $(STAMP) ## ruff
	@$(BIN)/ruff check . $(ARGS)

venv: $(STAMP) ## .venv with what requirements.txt names, and jax for this machine
	@sh .ci/accelerator.sh check $(ACCELERATOR)

$(STAMP): requirements.txt
	@if ! $(BIN)/python -c 'import pip; $(USABLE)' 2>/dev/null; then \
	  for p in $(PYTHON); do \
	    if "$$p" -c '$(USABLE)' 2>/dev/null; then found=$$p; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No Python >= 3.11 with venv found (tried $(PYTHON)).' >&2; \
	    echo 'Install one (Debian, Ubuntu: apt install python3-venv), or name it: make PYTHON=/path/to/python3.12' >&2; \
	    exit 1; \
	  fi; \
	  "$$found" -m venv --clear .venv; \
	fi
	@echo "Installing into .venv ($$($(BIN)/python -V), $(ACCELERATOR)): 1 to 5 minutes, once."
	@$(PIP) -r requirements.txt
ifneq ($(ACCELERATOR),cpu)
	@echo 'Adding jax[$(ACCELERATOR)]: up to 3 GB, some minutes more.'
	@$(PIP) -r requirements.txt 'jax[$(ACCELERATOR)]' || \
	  echo 'No jax[$(ACCELERATOR)] could be installed (see above); going on without.' >&2
endif
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" | \
	  { read -r site; pwd > "$$site/tlt_jax_checkout.pth"; } # commands in any folder
	@touch $@
