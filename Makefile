# Two commands do everything on a fresh machine: `make train` and `make test`. Both build .venv themselves.

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= examples/digits.yaml
STAMP  := $(VENV)/.installed
NATIVE := src/lockstep/comm/shm/native

# Otherwise every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test suite check lint style types unit changed bench-ddp bench-comm bench-hosts bench-bits bench-checkpoints bench-elastic torture sanitize bench-recorder bench-streams bench-sharded bench-trainer pages docs browser matrix clean

train: $(STAMP)
	$(VENV)/bin/lockstep train $(CONFIG)
	@if [ "$(CONFIG)" = examples/digits.yaml ]; then $(VENV)/bin/python examples/known_digests.py; fi

# The types are checked beside the tests, while these wait for something.
test: style
	@$(MAKE) --no-print-directory --jobs=2 LATER='nice -n 10' types suite

# One process more than the two cores that we count on, because many tests wait. Files start in the order of their names,
# so the slow ones do not come last.
suite: $(STAMP)
	@env -u MAKEFLAGS -u MFLAGS $(VENV)/bin/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
	    --ignore tests/pages

# What to run before a commit: lint, types, and the unit tests of the packages that differ from the main branch. The two
# slow parts run side by side, and each shows its output when it is done.
check: style
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types changed

changed: $(STAMP)
	$(VENV)/bin/python -m pytest --quiet --numprocesses 2 --dist worksteal $$($(VENV)/bin/python tests/changed.py)

# All tests that start no processes.
unit: $(STAMP)
	$(VENV)/bin/python -m pytest --quiet --numprocesses 2 --dist worksteal tests/unit tests/test_architecture.py

lint: style types

style: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(LATER) $(VENV)/bin/mypy

bench-ddp: $(STAMP)
	$(VENV)/bin/python benchmarks/ddp.py

bench-bits: $(STAMP)
	$(VENV)/bin/python benchmarks/bits.py

bench-elastic: $(STAMP)
	$(VENV)/bin/python benchmarks/elastic.py

bench-sharded: $(STAMP)
	$(VENV)/bin/python benchmarks/sharded.py

bench-trainer: $(STAMP)
	$(VENV)/bin/python benchmarks/trainer.py

bench-checkpoints: $(STAMP)
	$(VENV)/bin/python benchmarks/checkpoints.py

bench-recorder: $(STAMP)
	$(VENV)/bin/python benchmarks/recorder.py

bench-streams: $(STAMP)
	$(VENV)/bin/python benchmarks/streams.py

# About an hour; needs root for the second user. `python -m torture --help` has the parts.
torture: $(STAMP)
	$(VENV)/bin/python -m torture

# shm.c under the sanitizers, with random schedules: a minute. `make torture` does it with others each time.
sanitize: $(STAMP)
	$(VENV)/bin/python -m torture.schedules

bench-comm: $(STAMP)-bench
	$(VENV)/bin/python benchmarks/comm.py

# Needs root: hosts are network namespaces.
bench-hosts: $(STAMP)
	$(VENV)/bin/python benchmarks/hosts.py

# Run what the pages show, commands, lines and loops, and compare the languages: about 1,000 short tests.
pages: $(STAMP)
	$(VENV)/bin/python -m pytest --quiet --numprocesses 3 --dist loadfile tests/pages

# The site, in English and Chinese, in build/site; open build/site/index.html.
docs: $(STAMP)-docs pages
	$(VENV)/bin/python docs/site_pages.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --config-file mkdocs.zh.yml

# The core of the suite on other versions of Python and torch; downloads several GB. See tests/matrix.py.
matrix: $(STAMP)
	$(VENV)/bin/python tests/matrix.py

# What a test of the report opens pages in; it is skipped without. Debian's packages, so it needs root.
browser:
	@command -v chromium >/dev/null || (apt-get update -q && apt-get install -q -y --no-install-recommends chromium) >/dev/null 2>&1 \
	  || echo "no browser could be installed: the tests that need one are skipped"

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache $(NATIVE)/*.so

# pip compiles the library, and shows nothing of what the build says where it cannot: the last line does.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(NATIVE)/shm.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Lockstep needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV): once, about a minute"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(VENV)/bin/python hatch_build.py
	@touch $@

$(STAMP)-bench: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(VENV)/bin/python -m pip install --quiet --no-deps --prefix build/mpich mpich
	@touch $@

$(STAMP)-docs: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@
