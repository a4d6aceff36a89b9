# Everything runs in .venv, which the targets make themselves; nothing but Python, gcc and make
# has to be there before. A second run of a target installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test check format lint types house docs rest fix accuracy bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## set up, then show the GPUs of this machine and of an emulated one
	@echo '$$ oomph gpus'
	@$(BIN)/oomph gpus || test $$? -eq 4 # 4: this machine has no driver; it has said so
	@echo
	@echo '$$ oomph gpus --emulate 8xa100-80gb'
	@$(BIN)/oomph gpus --emulate 8xa100-80gb

test: $(VENV)/.installed-dev ## set up, then run the tests
	$(BIN)/python -m pytest

check: format lint types house docs rest ## format, lint, types, house, docs and tests: what CI runs

format: $(VENV)/.installed-dev ## is everything formatted? (make fix formats)
	$(BIN)/ruff format --check .

lint: $(VENV)/.installed-dev ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev ## mypy --strict
	$(BIN)/mypy

house: $(VENV)/.installed-dev ## do imports flow one way?
	$(BIN)/python -m pytest -q tests/test_house.py

docs: $(VENV)/.installed-dev ## are the docs true?
	$(BIN)/python -m pytest -q tests/test_docs.py

rest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --ignore tests/test_house.py --ignore tests/test_docs.py

fix: $(VENV)/.installed-dev ## format, mend what ruff can mend, write the generated parts of the docs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m docs.generate

accuracy: $(VENV)/.installed-dev ## predictions beside published GPU measurements
	$(BIN)/python -m accuracy

bench: $(VENV)/.installed-dev ## what a reading and a start cost, beside nvitop and gpustat
	$(BIN)/python -m benchmarks

clean: ## remove everything that the targets made
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache tests/nvml/build

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "oomph needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed
