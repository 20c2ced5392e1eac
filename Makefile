# Every target sets up what it needs: an environment in .venv, by uv where it is installed, else by venv and pip.
# PYTHON=python3.12 chooses the interpreter; without it the first one of 3.11 or newer is taken.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	if command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)

.DEFAULT_GOAL := help
.PHONY: help demo chart test test-engines chaos soak fuzz bench check audit format coverage build pins clean

help:  ## What there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

demo: $(VENV)/.run-ready  ## The router before a simulated fleet: random against prefix-aware, in numbers
	@$(BIN)/prefixroute demo $(ARGS)

chart: $(VENV)/.dev-ready  ## The same, drawn to docs/demo.svg
	@$(BIN)/prefixroute demo --chart docs/demo.svg $(ARGS)

test: $(VENV)/.dev-ready  ## All tests
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# What is not installed is left out: see docs/engines.md. `ENGINES=llama` builds llama.cpp, too.
ENGINES ?= vllm peers clients prometheus
test-engines: $(VENV)/.dev-ready  ## Tests on real engines, installed at first (ENGINES="vllm peers llama" ARGS="-k affinity")
	-$(BIN)/python -m tests.engines.install $(ENGINES)
	PREFIXROUTE_TEST_ENGINES=1 $(BIN)/python -m pytest -n 0 tests/engines $(ARGS)

chaos: $(VENV)/.dev-ready  ## Faults under load, a minute each (ARGS="--fault killed --seconds 20")
	$(BIN)/python -m tests.chaos $(ARGS)

soak: $(VENV)/.dev-ready  ## A million requests, no two alike: does memory stay? (ARGS="--minutes 5")
	$(BIN)/python -m tests.chaos.soak $(ARGS)

fuzz: $(VENV)/.dev-ready  ## Bytes that nobody means, for ten minutes (ARGS="--minutes 30 --target requests")
	$(BIN)/python -m tests.fuzz $(ARGS)

bench: $(VENV)/.run-ready  ## Against nginx and other routers, with a table of targets: 12 minutes (ARGS="--rounds 1")
	$(BIN)/python -m benchmarks.proxy $(ARGS)

check: $(VENV)/.dev-ready  ## Format, lint, types, import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Where no advisories can be had (an index without them says so for each package), nothing fails.
AUDIT := -r requirements.txt -r requirements-dev.txt --no-deps --disable-pip --progress-spinner off
audit: $(VENV)/.dev-ready  ## Known vulnerabilities among the pinned packages
	@if command -v uvx >/dev/null 2>&1; then audit="uvx -q pip-audit"; else \
		[ -x $(VENV)/audit/bin/pip-audit ] || { $(PYTHON) -m venv $(VENV)/audit && \
		$(VENV)/audit/bin/python -m pip install -q --disable-pip-version-check pip-audit; }; \
		audit=$(VENV)/audit/bin/pip-audit; fi; \
	$$audit $(AUDIT) >$(VENV)/audit.log 2>&1 && tail -n 1 $(VENV)/audit.log || \
		{ cat $(VENV)/audit.log; ! grep -q "known vulnerabilit" $(VENV)/audit.log; }

format: $(VENV)/.dev-ready  ## Format and sort
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

coverage: $(VENV)/.dev-ready  ## Tests with branch coverage
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term-missing:skip-covered $(ARGS)

build: $(VENV)/.dev-ready  ## Wheel and source distribution, in dist/
	$(BIN)/python -m build

pins:  ## Renew the exact versions in requirements*.txt (needs uv)
	UV_CUSTOM_COMPILE_COMMAND="make pins" uv pip compile -q --upgrade --universal --python-version 3.11 --no-emit-index-url \
		--no-annotate -o requirements.txt pyproject.toml
	UV_CUSTOM_COMPILE_COMMAND="make pins" uv pip compile -q --upgrade --universal --python-version 3.11 --no-emit-index-url \
		--no-annotate --all-extras --group dev -c requirements.txt -o requirements-dev.txt pyproject.toml

clean:  ## Remove the environment and what tools left
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* benchmarks/.work

$(VENV)/.run-ready: requirements.txt pyproject.toml
	$(call install,requirements.txt)

$(VENV)/.dev-ready: requirements-dev.txt pyproject.toml
	$(call install,requirements-dev.txt)

# The pins first, then the package itself in place, without looking at its ranges again.
define install
	@echo "setting up $(VENV) (once)"
	@if [ -z "$(PYTHON)" ] && ! command -v uv >/dev/null 2>&1; then \
		echo "PrefixRoute needs Python 3.11 or newer: install it, or say PYTHON=/path/to/python3.11"; exit 1; fi
	@if command -v uv >/dev/null 2>&1; then \
		set -e; \
		[ -x $(BIN)/python ] || uv venv -q --seed --python "$(or $(PYTHON),>=3.11)" $(VENV); \
		uv pip install -q --python $(BIN)/python -r $(1); \
		uv pip install -q --python $(BIN)/python --no-deps -e .; \
	else \
		set -e; \
		[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip install -q --disable-pip-version-check -r $(1); \
		$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .; \
	fi
	@touch $@
endef
