# Segue: `make help` lists what there is. Python >= 3.11 and make are all it needs; nothing here needs root.
PYTHON ?= python3
NAME ?= 2
VENV := .venv
BIN := $(VENV)/bin
SERVICES := router worker catalog ingress
LIBS := tunnel pool controller continuation chunks service
COMMANDS := cache decisions top
ARGS ?=
# What runs with the worker's extra alone; tests/worker_storage publishes to a real catalog and needs that one's too.
TESTS_worker := tests/worker tests/worker_runtime

.DEFAULT_GOAL := help
.PHONY: help setup up demo test $(addprefix test-,$(SERVICES) $(LIBS) $(COMMANDS) e2e) prove compiled peers k8s-check lint format protos lock clean

help:  ## this list
	@grep -hE '^[a-z0-9%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'
	@echo "  test-NAME    one unit's tests alone, in its own .venv-NAME ($(SERVICES)), or in .venv ($(LIBS) $(COMMANDS) e2e)"

# pip prints nothing for minutes otherwise; torch is the large one (docs/deploy.md: how to take the CPU build).
$(VENV)/.installed: pyproject.toml requirements.lock
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	@touch $@

setup: $(VENV)/.installed  ## everything into .venv

up: setup  ## two workers serving a real model behind the OpenAI API (ARGS="--workers 3 --port 8080")
	@$(BIN)/segue up $(ARGS)

demo: setup  ## a conversation survives a killed worker; table, picture, reports/demo.json
	@$(BIN)/segue demo $(ARGS)

# Two processes (tests/fixtures/lanes.py says which test runs in which); ARGS="-n 0" for one.
test: setup  ## every test, on real etcd and S3 processes and the tiny model
	@$(BIN)/python -m pytest -n 2 $(ARGS) tests

$(addprefix .venv-,$(SERVICES)): .venv-%: pyproject.toml requirements.lock
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[$*,test]'
	@touch $@

$(addprefix test-,$(SERVICES)): test-%: .venv-%
	@.venv-$*/bin/python -m pytest $(ARGS) $(or $(TESTS_$*),tests/$*)

$(addprefix test-,$(LIBS) $(COMMANDS) e2e): test-%: setup
	@$(BIN)/python -m pytest $(ARGS) tests/$*

prove: setup  ## a claim or a group of claims at full size (NAME=2-demo, NAME=2)
	@$(BIN)/python -m prove $(NAME) $(ARGS)

compiled: setup  ## what a replay of a large cell runs on (5-scale), as machine code in build/compiled; needs a C compiler
	@$(BIN)/python -m prove.compiled

# Another project's bench, for the claim that stands beside it; it takes torch from .venv. Never a dependency.
PEERS := ai-dynamo-runtime==1.6.1 lmcache==0.5.6 aiofile==3.12.3 aiofiles==25.1.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 \
	awscrt==0.38.1 cachetools==8.0.2 caio==0.12.10 cryptography==50.0.2 frozenlist==1.8.0 llvmlite msgspec multidict numba \
	propcache psutil py-cpuinfo pyzmq yarl
peers: setup  ## programs that claims are measured beside (4-tiers-speed, 5-scale), in .venv-peers
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PEERS)
	@$(CURDIR)/$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/segue.pth"
	@cd .venv-peers && apt-get download -qq libnss-wrapper && dpkg -x libnss-wrapper_*.deb nss \
		|| echo "no libnss-wrapper: lmcache's S3 adapter is played only where BUCKET.localhost resolves"

k8s-check: setup  ## render and validate the Kubernetes manifests
	@$(BIN)/python tools/k8s_check.py

lint: setup  ## ruff, mypy, import-linter, buf, generated code current
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code
	@$(BIN)/python tools/breaking.py
	@$(BIN)/python tools/protos.py --check

format: setup  ## apply ruff's and buf's formatting
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/buf format --write

protos: setup  ## regenerate libs/contracts
	@$(BIN)/python tools/protos.py

lock: setup  ## rewrite requirements.lock from what pyproject.toml resolves to now
	@$(PYTHON) tools/lock.py

clean:  ## everything that was built or cached here
	@rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache reports .segue
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
