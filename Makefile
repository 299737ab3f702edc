# `make serve` and `make test` are all that a new machine needs; `make help` lists the rest.
# Variables: PY (Python >= 3.11 that makes the environments), PY312, ARGS (flags for the server or the benchmark).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PY ?= python3
PY312 ?= $(firstword $(foreach p,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python),\
	$(shell $(p) -c 'import sys; sys.version_info[:2] == (3, 12) and print(sys.executable)' 2>/dev/null)))
# Two processes share the tests, a file at a time, in the order of tests/support/rooms.py. A third would use the fifth of
# their time in which they wait, but leaves tests with bounds in seconds less room on two cores: some fail then.
SHARED = -n 2 --dist loadfile
ARGS ?=
WORKLOAD ?=

# The CUDA release whose libraries this machine's driver can run; empty without an NVIDIA GPU.
CUDA = $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null \
	| awk -F. 'NR == 1 && $$1 + 0 { print ($$1 >= 580 ? "cuda13" : "cuda12") }')

define make_venv # $(1) folder, $(2) python, $(3) what to install
	@$(2) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(2) is missing or older than 3.11; name another one: make PY=/path/to/python" >&2; exit 1; }
	@$(2) -m venv $(1) || { echo "$(2) cannot make virtual environments; install its venv module" >&2; exit 1; }
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(3)
	@touch $@
endef

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{ printf "make %-10s %s\n", $$1, $$2 }'

.PHONY: serve
serve: .venv/.installed  ## start the server, with a small default model unless ARGS names another
	.venv/bin/python -m jaxpaged.server $(ARGS)

.PHONY: test
test: .venv-test/.installed  ## linter, type checker and the quick tests
	.venv-test/bin/python -m ruff check
	.venv-test/bin/python -m mypy
	.venv-test/bin/python -m pytest -q $(SHARED)

.PHONY: test-slow
test-slow: .venv-test/.installed .venv-test312/.installed  ## the slow tests, and the quick ones on Python 3.12 with the newest JAX
	.venv-test/bin/python -m pytest -q -m slow $(SHARED)
	.venv-test312/bin/python -m pytest -q $(SHARED)

.PHONY: bench
bench: .venv-test/.installed  ## offline throughput of the default model (WORKLOAD=FILE for a workload, ARGS for flags)
	.venv-test/bin/python bench/bench_throughput.py $(if $(WORKLOAD),--workload $(WORKLOAD)) $(ARGS)

.PHONY: clean
clean:  ## remove the environments and everything generated
	rm -rf .venv .venv-clients .venv-test .venv-test312 .cache-test build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml
	$(call make_venv,.venv,$(PY),-e '.$(if $(CUDA),[$(CUDA)])')

.venv-test/.installed: pyproject.toml
	$(call make_venv,.venv-test,$(PY),-e '.[test]')

.venv-test312/.installed: pyproject.toml
	@test -n "$(PY312)" || { echo "make test-slow needs Python 3.12; name it: make test-slow PY312=/path/to/python3.12" >&2; exit 1; }
	$(call make_venv,.venv-test312,$(PY312),--upgrade -e '.[test]' 'jax<0.13')
