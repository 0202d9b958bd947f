# Every target does its own set-up in .venv. Needed from the system: Python 3.11+ with venv, a C compiler, Python's headers.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: build demo test soak bench lint format clean

PYTHON ?= python3
GATEWAY_BUILD ?= release
BIN := .venv/bin
HOT := $(shell find gateway -name '*.pxd' -o -name '*.pyx')
COMPILED := .venv/compiled-$(GATEWAY_BUILD)
export PATH := $(CURDIR)/$(BIN):$(PATH)

build: $(COMPILED)

demo: build
	exec $(BIN)/gateway demo

# The live tests start their own servers; two at a time is what two cores carry, but the patient ones mostly wait.
test: build lint
	$(BIN)/pytest -m 'not live' -n 2
	GATEWAY_IMPL=pure $(BIN)/pytest -m 'not live' --ignore tests/health -n 2
	$(BIN)/pytest -m 'live and not patient' -n 2 --dist loadfile
	$(BIN)/pytest -m 'live and patient' -n 4
	GATEWAY_IMPL=pure $(BIN)/pytest -m 'live and both'

# A hundred schedules of random faults, examples by chance, and the full sizes of other tests: an hour or so.
soak: build
	$(BIN)/pytest -m 'not live' --soak -n 2
	$(BIN)/pytest -m soak --soak -s

bench: build
	$(BIN)/python -m tests.bench

lint: build
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/cython-lint gateway

format: build
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist *.egg-info .*_cache .hypothesis
	find gateway health -name '*.so' -delete

# A stamp of the other kind means that what lies in the tree was built with other flags: build all of it again.
$(COMPILED): .venv/installed setup.py $(HOT) $(wildcard $(patsubst %.pxd,%.py,$(HOT)))
	@stale=$$(find .venv -maxdepth 1 -name 'compiled-*' ! -name '$(notdir $@)'); rm -f $$stale; \
	if [ $(GATEWAY_BUILD) = pure ]; then find gateway -name '*.so' -delete; \
	else GATEWAY_BUILD=$(GATEWAY_BUILD) $(BIN)/python setup.py -q build_ext --inplace -j 2 $${stale:+--force}; fi
	@touch $@

.venv/installed: pyproject.toml
	@$(SYSTEM)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	GATEWAY_BUILD=pure $(BIN)/pip install -q --no-compile -e '.[dev]'
	@touch $@

# Says what is missing and, where it may, installs it.
define SYSTEM
missing=; \
$(PYTHON) -c 'import sys, ensurepip, venv; assert sys.version_info >= (3, 11)' 2>/dev/null || missing="python3 python3-venv"; \
command -v cc >/dev/null || missing="$$missing gcc libc6-dev"; \
test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)/Python.h" || missing="$$missing python3-dev"; \
if [ -n "$$missing" ]; then \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing; \
  else echo "install first: $${missing# } (Debian's names; Python must be 3.11 or newer)" >&2; exit 1; fi; \
fi
endef
