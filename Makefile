# Two commands do everything on a fresh machine: `make train` and `make test`. Both build .venv themselves.

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= examples/digits.yaml
STAMP  := $(VENV)/.installed

# Otherwise every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test check lint style types unit bench-ddp bench-comm bench-bits bench-checkpoints bench-elastic clean

train: $(STAMP)
	$(VENV)/bin/lockstep train $(CONFIG)

# One process more than the two cores that we count on, because many tests wait. Files start in the order of their names,
# so the slow ones do not come last.
test: lint
	$(VENV)/bin/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# What to run before a commit: everything but the tests that start processes. The two slow parts run side by side, and
# each shows its output when it is done.
check: style
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types unit

unit: $(STAMP)
	$(VENV)/bin/python -m pytest --quiet --numprocesses 2 --dist worksteal tests/unit tests/test_architecture.py

lint: style types

style: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

bench-ddp: $(STAMP)
	$(VENV)/bin/python benchmarks/ddp.py

bench-bits: $(STAMP)
	$(VENV)/bin/python benchmarks/bits.py

bench-elastic: $(STAMP)
	$(VENV)/bin/python benchmarks/elastic.py

bench-checkpoints: $(STAMP)
	$(VENV)/bin/python benchmarks/checkpoints.py

bench-comm: $(STAMP)-bench
	$(VENV)/bin/python benchmarks/comm.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Lockstep needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV): once, about a minute"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(STAMP)-bench: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@
