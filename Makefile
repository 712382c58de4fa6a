# Everything a contributor runs; `make` alone prints this list. The first call of a target makes its virtual environment, later calls reuse it.
#   make demo           train online on real data, print the table, draw examples/output/digits.png
#   make test           lint and every test of the gate, slow ones included; fails where no test has shown a rule or law of an op
#   make test-quick     the tests that are not marked slow
#   make test-latest    the same on Python >= 3.12, which brings newer releases of the dependencies
#   make test-lowest    the same on the oldest releases that pyproject.toml admits
#   make test-nightly   everything: the gate and the tests marked nightly, the gate on the newer releases too, the oldest releases,
#                       numbers drawn afresh, gradients by the programs of a GPU (on this processor), the site on the newer releases and
#                       the wheels on each Python; it prints the SEED of the numbers, and SEED=... repeats them
#   make mutants        faults that tests have to see, put into a copy one by one; survivors are listed
#   make cover          which slow tests the gate needs: 300 drawn faults, put into the package one by one (hours, by hand)
#   make package        build both distributions, check them, and run README's blocks from the wheels on the Python of .venv, or on
#                       those of PYTHONS="3.11 3.12 3.13"
#   make reading        how much a reader of the core has to hold: lines, files, records, helpers with one caller, comments
#   make lint           ruff, mypy, and the schemas of the workflows
#   make docs           the site, in build/site; warnings and public names without a page are errors (docs-latest: on Python >= 3.12;
#                       docs-links: asks the addresses outside that pages name)
#   make bench          time and memory beside BPTT and the public package, 0.2.6 and 0.2.8 (Python >= 3.12); writes docs/performance.md
#                       and README's "What it costs" (about half an hour)
#   make rules          what each learning rule learns and costs; goes on where it was cut off, and writes docs/rules.md (about 45 minutes)
#   make results        what networks learn by each rule; goes on where it was cut off, and writes docs/results.md (about two hours and a half)
#   make nir            outputs of snnTorch and Norse beside those of their own NIR graphs, in an environment of its own (PyTorch, 5 GB);
#                       NIR_GRAPHS=... is a folder with the published graphs
#   make edge          exported steps compiled and run by IREE, in an environment of its own, and the tables of Learning without Python
#   make clean          remove what the targets made, but for the environments
# PYTHON=... chooses the interpreter of .venv, PYTHON_LATEST=... that of .venv-latest, JOBS=... the number of test processes.
# Each run of the tests names the ten files that cost most, in CPU seconds.

VENV ?= .venv
VENV_LATEST ?= .venv-latest
VENV_LOWEST ?= .venv-lowest
VENV_NIR ?= .venv-nir
VENV_EDGE ?= .venv-edge
VENV_PUBLIC ?= .venv-public
VENV_PUBLIC_LATEST ?= .venv-public-latest
JOBS ?= 2
JAX_PLATFORMS ?= cpu
unexport PYTHONDONTWRITEBYTECODE  # each process would compile every module again
TORCH ?= torch==2.13.0
ifndef SEED
SEED := $(shell date +%Y%m%d%H%M)
endif
PYTEST = JAX_PLATFORMS=$(JAX_PLATFORMS) $(1)/bin/python -m pytest -q -n $(JOBS) --dist worksteal

SPHINX = rm -rf build/site && JAX_PLATFORMS=cpu $(1)/bin/python -m sphinx -q -W --keep-going -b html -d build/site-cache docs build/site

# The candidates that are tried in turn; a name on the PATH may be a shim that does not run, so each one is run.
PYTHON_CANDIDATES = $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14)
PYTHON_LATEST_CANDIDATES = $(or $(PYTHON_LATEST),python3.13 python3.12 python3.14 \
	$$(ls -d "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python 2>/dev/null | sort -r) python3)

# $(call find_python,MINOR,CANDIDATES): a shell command that prints the first candidate that runs and is 3.MINOR or newer.
find_python = for p in $(2); do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, $(1)))' 2>/dev/null; then echo "$$p"; break; fi; done

EDGE = JAX_PLATFORMS=cpu $(VENV_EDGE)/bin/python

.PHONY: help demo test test-quick test-latest test-lowest test-nightly mutants cover reading package bench rules results nir edge docs lint ruff mypy workflows clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

demo: $(VENV)/.with-examples
	$(VENV)/bin/python examples/digits.py

test: lint $(VENV)/.with-all
	@mkdir -p build
	$(call PYTEST,$(VENV)) -m "not nightly" --etp-results build/etp-results.json
	$(VENV)/bin/python -m braintrace.kit check --all --results build/etp-results.json

test-quick: $(VENV)/.with-all
	$(call PYTEST,$(VENV)) -m "not slow"

# $(call with_latest,TARGET): make it where a newer Python is found, and say so where none is.
with_latest = if [ -x $(VENV_LATEST)/bin/python ] || [ -n "$$($(call find_python,12,$(PYTHON_LATEST_CANDIDATES)))" ]; then \
		$(MAKE) --no-print-directory $(1); \
	else \
		echo "make $@: skipped, no Python >= 3.12 runs here; install one or give PYTHON_LATEST=/path/to/python"; \
	fi

test-latest:
	@$(call with_latest,run-latest)

.PHONY: run-latest nightly-all nightly-fresh nightly-cuda nightly-latest run-latest-gate
run-latest: $(VENV_LATEST)/.with-tests
	$(call PYTEST,$(VENV_LATEST)) -m "not slow"

test-nightly: lint
	$(MAKE) --no-print-directory --keep-going test-lowest nightly-latest nightly-fresh nightly-cuda nightly-all docs-latest \
		package PYTHONS="3.11 3.12 3.13" SEED=$(SEED)

nightly-all: $(VENV)/.with-torch
	@mkdir -p build
	$(call PYTEST,$(VENV)) --costs=build/costs.json --etp-results build/etp-results.json
	$(VENV)/bin/python -m braintrace.kit check --all --results build/etp-results.json

nightly-fresh: $(VENV)/.with-all
	@echo "numbers drawn afresh; make nightly-fresh SEED=$(SEED) repeats them"
	TEST_SEED=$(SEED) $(call PYTEST,$(VENV)) -m drawn --hypothesis-profile=fresh --hypothesis-seed=$(SEED)

nightly-cuda: $(VENV)/.with-all
	$(call PYTEST,$(VENV)) -m "not slow" --as-if-on=cuda tests/gradients tests/functional

nightly-latest:
	@$(call with_latest,run-latest-gate)

run-latest-gate: $(VENV_LATEST)/.with-tests
	$(call PYTEST,$(VENV_LATEST)) -m "not nightly"

test-lowest: $(VENV_LOWEST)/.with-tests
	$(call PYTEST,$(VENV_LOWEST)) -m "not slow"

mutants: $(VENV)/.with-all
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m tests.mutants

cover: $(VENV)/.with-all
	$(VENV)/bin/python -m tests.cover lines
	$(VENV)/bin/python -m tests.cover ask
	$(VENV)/bin/python -m tests.cover choose

reading: $(VENV)/.with-all
	@JAX_PLATFORMS=cpu $(VENV)/bin/python -m tests.reading

package: $(VENV)/.with-all
	$(VENV)/bin/python -m tests.package $(PYTHONS)

BENCH = $(VENV)/bin/python benchmarks/performance.py --public $(VENV_PUBLIC)/bin/python

bench: $(VENV)/.with-all $(VENV_PUBLIC)/.with-public
	@if [ -x $(VENV_LATEST)/bin/python ] || [ -n "$$($(call find_python,12,$(PYTHON_LATEST_CANDIDATES)))" ]; then \
		$(MAKE) --no-print-directory run-bench-latest; \
	else \
		echo "make bench: no Python >= 3.12 runs here, so 0.2.8 is left out; give PYTHON_LATEST=/path/to/python"; \
		$(BENCH); \
	fi
	$(VENV)/bin/python benchmarks/performance_page.py

.PHONY: run-bench-latest
run-bench-latest: $(VENV_LATEST)/.with-tests $(VENV_PUBLIC_LATEST)/.with-public
	$(BENCH) --latest $(VENV_LATEST)/bin/python --public-latest $(VENV_PUBLIC_LATEST)/bin/python

rules: $(VENV)/.with-all
	$(VENV)/bin/python benchmarks/rules.py
	$(VENV)/bin/python benchmarks/rules_page.py

results: $(VENV)/.with-all
	$(VENV)/bin/python benchmarks/results.py
	$(VENV)/bin/python benchmarks/acting.py
	$(VENV)/bin/python benchmarks/streams.py
	$(VENV)/bin/python benchmarks/results_page.py

nir: $(VENV_NIR)/.with-simulators
	JAX_PLATFORMS=$(JAX_PLATFORMS) $(VENV_NIR)/bin/python benchmarks/nir_others.py $(NIR_GRAPHS)

edge: $(VENV_EDGE)/.with-iree
	$(EDGE) -m pytest -q tests/edge --all-slow
	$(EDGE) examples/edge.py
	$(EDGE) examples/edge.py --sizes --compare --run-module

docs: $(VENV)/.with-all
	$(call SPHINX,$(VENV))

docs-links: $(VENV)/.with-all
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m sphinx -q -b linkcheck -d build/site-cache docs build/site-links

docs-latest:
	@$(call with_latest,run-docs-latest)

.PHONY: docs-latest docs-links run-docs-latest
run-docs-latest: $(VENV_LATEST)/.with-docs
	$(call SPHINX,$(VENV_LATEST))

lint: ruff mypy workflows

ruff: $(VENV)/.with-all
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

mypy: $(VENV)/.with-all
	$(VENV)/bin/mypy

workflows: $(VENV)/.with-all
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.readthedocs .readthedocs.yaml

clean:
	rm -rf build dist examples/output .mypy_cache .pytest_cache .ruff_cache

# Stamps: an environment is set up again only when a pyproject.toml changed. The verifier of receipts is a distribution of its own, and comes first:
# what is named by a path is not looked for on an index. Groups of dependencies ask for pip 25.1.
# $(call install,ENVIRONMENT,GROUPS)
install = $(1)/bin/python -m pip install -q --upgrade 'pip>=25.1' && \
	$(1)/bin/python -m pip install -q -e ./receipts -e '.[adapters,examples,receipts]' $(2:%=--group %)

$(VENV)/.with-examples: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q -e '.[examples]'
	@touch $@

$(VENV)/.with-all: pyproject.toml receipts/pyproject.toml | $(VENV)/bin/python
	$(call install,$(VENV),dev package)
	@touch $@ $(VENV)/.with-examples

# PyTorch, for receipts of its steps, at night: without it their tests are skipped.
$(VENV)/.with-torch: $(VENV)/.with-all
	@$(VENV)/bin/python -m pip install -q --retries 1 --timeout 20 $(TORCH) \
		|| echo "make $@: no torch here, its tests are skipped"
	@touch $@

# The oldest releases that pyproject.toml admits for what it names itself.
$(VENV_LOWEST)/.with-tests: pyproject.toml receipts/pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(VENV_LOWEST)
	$(VENV_LOWEST)/bin/python -m pip install -q uv
	$(VENV_LOWEST)/bin/uv pip install -q --python $(VENV_LOWEST)/bin/python --resolution lowest-direct \
		-e ./receipts -e '.[adapters,examples,receipts,rl]' --group test
	@touch $@

# Other simulators, which need PyTorch: what is not there is left out, and the table says so.
$(VENV_NIR)/.with-simulators: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(VENV_NIR)
	$(VENV_NIR)/bin/python -m pip install -q -e '.[nir]'
	@for package in snntorch norse; do $(VENV_NIR)/bin/python -m pip install -q --retries 1 --timeout 20 $$package \
		|| echo "make $@: no $$package here, it is not compared"; done
	@touch $@

# IREE's compiler and runtime.
$(VENV_EDGE)/.with-iree: pyproject.toml receipts/pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(VENV_EDGE)
	$(call install,$(VENV_EDGE),test)
	$(VENV_EDGE)/bin/python -m pip install -q -e '.[edge]'
	@touch $@

$(VENV_LATEST)/.with-tests: pyproject.toml receipts/pyproject.toml | $(VENV_LATEST)/bin/python
	$(call install,$(VENV_LATEST),test)
	@touch $@

$(VENV_LATEST)/.with-docs: $(VENV_LATEST)/.with-tests
	$(call install,$(VENV_LATEST),docs)
	@touch $@

$(VENV_PUBLIC)/.with-public: | $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(VENV_PUBLIC)
	$(VENV_PUBLIC)/bin/python -m pip install -q 'braintrace==0.2.6'
	@touch $@

$(VENV_PUBLIC_LATEST)/.with-public: | $(VENV_LATEST)/bin/python
	$(VENV_LATEST)/bin/python -m venv $(VENV_PUBLIC_LATEST)
	$(VENV_PUBLIC_LATEST)/bin/python -m pip install -q 'braintrace==0.2.8'
	@touch $@

$(VENV)/bin/python:
	@python=$$($(call find_python,11,$(PYTHON_CANDIDATES))); \
	[ -n "$$python" ] || { echo "make: no Python >= 3.11 found; give one with PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "making $(VENV) with $$python"; "$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV_LATEST)/bin/python:
	@python=$$($(call find_python,12,$(PYTHON_LATEST_CANDIDATES))); \
	echo "making $(VENV_LATEST) with $$python"; "$$python" -m venv $(VENV_LATEST) || { rm -rf $(VENV_LATEST); exit 1; }
