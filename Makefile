# make demo, make test: each makes its own environment and installs what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
TESTSTAMP := $(VENV)/.installed-test
DEBIAN := python3-venv gcc libc6-dev procps screen strace zsh fish chromium fonts-dejavu-core slurm-wlm munge iproute2
PYTEST_ARGS ?=
SOAK_ARGS ?=

.PHONY: demo quick test test-all test-long test-warm test-slurm test-ray two-nodes soak planted delays messages sweep disks power check system bench pictures tables clean

demo: $(STAMP)
	$(VENV)/bin/gpujob demo

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "gpujob needs Python 3.10 or newer; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module; as root: apt-get install -y python3-venv" >&2; rm -rf $(VENV); exit 1; }
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

$(TESTSTAMP): system $(STAMP) pyproject.toml
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[test]'
	@touch $@

# What the tests need beside Python: installed when root, else named.
system:
	@PYTHON=$(PYTHON) bash tests/bin/system-packages $(DEBIAN)
	@bash tests/bin/readable-by-others

check: $(TESTSTAMP)
	$(VENV)/bin/ruff format --check scheduler tests benchmarks
	$(VENV)/bin/ruff check scheduler tests benchmarks
	$(VENV)/bin/mypy

# More workers than cores: much of a story's time is waiting.
PYTEST := $(VENV)/bin/python -m pytest -n 7 --dist worksteal

# The loop while working: lint, types, all tests that start nothing, and the stories marked `smoke`.
quick: check
	$(PYTEST) -m "not long and (smoke or not story)" $(PYTEST_ARGS)

# The whole suite but sweeps and soaks.
test: check
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

# Sweeps and soaks: before a change is called finished.
test-long: check
	GPUJOB_LONG=1 $(PYTEST) -m "long or long_form" --timeout 1800 $(PYTEST_ARGS)

# Only the tests with a real Slurm; they are part of `make test` when root.
test-slurm: $(TESTSTAMP)
	$(PYTEST) -m slurm $(PYTEST_ARGS)

# The configuration of docs/slurm, started on two network namespaces, with four jobs on it (needs root).
two-nodes: $(TESTSTAMP)
	$(VENV)/bin/python -m tests.two_nodes

# The story with a real Ray, which is installed in an environment of its own (400 MB; needs root for network namespaces).
test-ray: $(TESTSTAMP)
	$(PYTHON) -m venv .build/ray && .build/ray/bin/python -m pip install -q --disable-pip-version-check 'ray[default]'
	GPUJOB_TEST_RAY=$(CURDIR)/.build/ray/bin/ray $(VENV)/bin/python -m pytest tests/ray $(PYTEST_ARGS)

# The stories of the command line once more: all commands run in forks of a warm process.
test-warm: $(TESTSTAMP)
	GPUJOB_TESTS_WARM=1 $(PYTEST) -m "not long" $(foreach name,verbs queue_verbs logs config report schemas options documents,tests/stories/test_$(name).py) $(PYTEST_ARGS)

# 10,000 jobs under 200 daemon kills and 50 supervisor or shim kills (ten minutes and more); SOAK_ARGS="--seed 7" for another seed.
soak: $(TESTSTAMP)
	$(VENV)/bin/python -m tests.soak $(SOAK_ARGS)

# Ten bugs, planted one after another in a copy of the program: each has to be caught.
planted: $(TESTSTAMP)
	$(VENV)/bin/python -m tests.planted

# The stories against a copy of the program with random delays: they find what depends on timing. ARGS: pytest's.
delays: $(TESTSTAMP)
	$(VENV)/bin/python -m tests.delays $(ARGS)

# Every text that users read, with its place in the source. ARGS="error log": only these kinds.
messages: $(STAMP)
	$(VENV)/bin/python docs/make_messages.py $(ARGS)

# Broken on purpose, in full (docs/reliability.md): a fault at every system call, every state of the disk, the power cut a
# hundred times. ARGS="--seed 1" and others: python -m tests.breaking.sweep --help
sweep disks power: $(TESTSTAMP)
	$(VENV)/bin/python -m tests.breaking.$@ $(ARGS)

# Every Python from 3.10 to 3.13 that is there.
test-all:
	@found=0; for v in 3.10 3.11 3.12 3.13; do \
	  p=$$(bash tests/bin/find-python $$v) || { echo "Python $$v: not here"; continue; }; \
	  found=1; echo "== Python $$v ($$p)"; \
	  $(MAKE) --no-print-directory test PYTHON=$$p VENV=.venv-$$v || exit 1; \
	done; [ $$found = 1 ]

bench: $(TESTSTAMP)
	$(VENV)/bin/python -m benchmarks

# The pictures in docs/, taken of the real program.
pictures: $(TESTSTAMP)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check pyte
	$(VENV)/bin/python docs/make_pictures.py

# The tables of options and settings in docs/, and config.example.yaml, from the rows of the program.
tables: $(STAMP)
	$(VENV)/bin/python docs/make_tables.py

clean:
	rm -rf .venv .venv-* .build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
