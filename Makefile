# The two commands of a newcomer: `make demo` and `make test`. Both install what they need, uv included.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup uv demo test test-affected test-slow coverage lint format types isolate bench docs build lock clean

UV  = $(shell command -v uv >/dev/null 2>&1 && echo uv || echo python3 -m uv)
RUN = $(UV) run --no-sync
P  ?=
BASE ?= main
READY := .venv/ready

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

uv:
	@command -v uv >/dev/null 2>&1 || python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install uv \
	  || python3 -m pip install --user --break-system-packages uv

setup: $(READY)  ## install uv when missing, set the lock filter, check the lock, install everything

$(READY): pyproject.toml uv.lock $(wildcard shared/core/pyproject.toml packages/*/pyproject.toml) | uv
	@if git rev-parse --git-dir >/dev/null 2>&1; then \
	  git config filter.neutral-lock.clean "python3 tools/neutral_lock.py"; \
	  git config filter.neutral-lock.smudge cat; \
	  git config filter.neutral-lock.required true; fi
	@$(UV) run --quiet --no-project python tools/lock.py check
	$(UV) sync --quiet --locked --all-packages --all-extras --all-groups
	@touch $(READY)

demo: $(READY)  ## run each package's main job; prints a table, writes pictures to out/
	@$(RUN) python tools/demo.py --out out $(P)

test: $(READY)  ## run the tests of one member (P=omt), or of all and across them
	@$(RUN) python tools/run_tests.py $(if $(COVERAGE),--coverage) $(P)

test-affected: $(READY)  ## run the tests of the members that differ from BASE (default: main)
	@$(RUN) python tools/run_tests.py --affected $(BASE)

test-slow: $(READY)  ## run the slow tests
	@$(RUN) python tools/run_tests.py --slow $(P)

coverage: $(READY)  ## run the tests with coverage and report it, each member against its own limit
	@$(RUN) python tools/run_tests.py --coverage $(P)
	@$(RUN) python tools/coverage_report.py $(P)

lint: $(READY)  ## ruff check and format check, project metadata
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	@$(RUN) validate-pyproject pyproject.toml shared/core/pyproject.toml packages/*/pyproject.toml > /dev/null

format: $(READY)  ## let ruff fix and format
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

types: $(READY)  ## mypy --strict, one member at a time
	@for path in $$($(RUN) python tools/members.py paths $(P)); do echo "mypy $$path"; $(RUN) mypy "$$path/src"; done
	@echo "mypy tools"; $(RUN) mypy tools

isolate: $(READY)  ## build all wheels, install each alone, run its smallest real command
	$(RUN) pytest integration_tests -m isolation

bench: $(READY)  ## run the benchmarks and write RESULTS.md of the member (P=omt) or of all
	@$(RUN) python tools/bench.py $(P)

docs: $(READY)  ## build the site into site/
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet

build: $(READY)  ## build all wheels and sdists into dist/ and check them
	rm -rf dist
	$(UV) build --quiet --all-packages --out-dir dist
	$(RUN) python tools/check_wheels.py dist

lock: | uv  ## lock again after a change of dependencies (P=name upgrades one); prints what moved
	@$(UV) run --quiet --no-project python tools/lock.py update $(P)

clean:  ## remove build products, caches and the environment
	rm -rf dist out site build .venv .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
