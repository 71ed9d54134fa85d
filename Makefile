# Needs make, and Python 3.11 or newer with pip. Everything else goes into .venv.
# Written for GNU make 3.81, the one that macOS ships.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.made-for
TOOLS := $(VENV)/.made-for-tests

# The interpreter that makes .venv: the first of these that is new enough, or the one given as
# `make PYTHON=/path/to/python3.12`.
PYTHON ?=
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)

# Passed on: `make train ARGS="--guests 0"`, `make test ARGS=tests/unit`.
ARGS ?=

# Some images disable Python's bytecode cache. Each test process would then compile everything again: 7 s of
# CPU for every worker.
unexport PYTHONDONTWRITEBYTECODE

# Tests mostly wait for other processes: more of them at once than there are cores. 0: one after the other. Files go
# to the workers in their order, the slow ones (faults, lab, multiproc) before the many quick ones. When all are done,
# one worker runs those that judge time (tests/support/workers.py).
WORKERS ?= 6
ONE_THREAD := OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}"  # for torch in each worker: together they fill the cores

# What is installed for training, and for the tests, benchmarks and checks as well. All of it is pinned in
# constraints.txt, what builds the package included: hence no isolated build, whose tools pip chooses by itself.
TRAINING := plots
TESTING  := plots,dev
INSTALL  := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
COMPILE  := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip would take one core, and half a minute more

# What `make quick` tests: the parts that decide, which need no torch.
QUICK := $(shell grep -LE '^(import|from) torch' tests/unit/test_*.py 2>/dev/null)

# Programs that some tests need, which are skipped without.
PACKAGES := chromium fish iproute2 munge nftables openssh-client openssh-server procps slurm-client slurmctld slurmd

# The stamps are written last and hold the folder's name, so a .venv that is incomplete, whose
# interpreter is gone, or whose folder was moved is not taken for a sound one.
SOUND := $(shell test "`cat $(STAMP) 2>/dev/null`" = "$(CURDIR)" && $(BIN)/python -c "" 2>/dev/null && echo yes)

.PHONY: help setup train test test-clusters quick docs lessons dist test-elsewhere bench stress pins system-packages clean remove-unsound-venv

help:
	@echo "make train   train a small GPT here, with one local guest (ARGS=... is passed on)"
	@echo "make test    everything CI runs: ruff, mypy, pytest (ARGS=... goes to pytest)"
	@echo "make quick   ruff, mypy and the tests of the pure parts, in a minute"
	@echo "make docs    build the documentation as a site: build/docs/index.html"
	@echo "make lessons run every command of the lessons and compare their output (ARGS=--write updates it; ARGS=2)"
	@echo "make dist    build the wheel and the sdist into dist/"
	@echo "make test-clusters  what make test leaves out: Ray (240 MB to install), Dask over a network, unequal machines"
	@echo "make test-elsewhere  make test as others would run it: another processor, locale, user, folder, a busy"
	@echo "             machine; two passes (ARGS=\"--pass busy\"; ARGS=--help)"
	@echo "make bench   measure the claims that the docs make"
	@echo "make stress  kill, freeze, damage, intrude: a part of the campaign in docs/reliability.md, 30 minutes"
	@echo "             at most (ARGS=\"--only R1,S2 --scale 1 --minutes 60 --json FILE\"; ARGS=--help)"
	@echo "make setup   only make .venv, with all that the tests need"
	@echo "make pins    update constraints.txt: the newest version of everything but torch"
	@echo "make system-packages  on Debian, as root: programs without which some tests are skipped"
	@echo "make clean   remove .venv, caches and build outputs (run folders stay)"

setup: $(TOOLS)

$(STAMP): pyproject.toml constraints.txt $(if $(SOUND),,remove-unsound-venv)
	@found=; if [ ! -x $(BIN)/python ]; then \
	  for python in $(PYTHONS); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "error: Potluck needs Python 3.11 or newer. Found:" >&2; \
	    for python in $(PYTHONS); do echo "  $$python: `"$$python" --version 2>&1 || true`" >&2; done; \
	    echo "hint: install a newer one, then: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$found; torch is large, so the first time takes a few minutes"; \
	  "$$found" -m venv $(VENV) || { \
	    echo "hint: on Debian and Ubuntu the module venv is a package of its own: apt install python3-venv" >&2; exit 1; }; \
	fi
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation -e ".[$(TRAINING)]"
	@echo "compiling the installed packages, some seconds"; $(COMPILE)
	@echo "$(CURDIR)" > $(STAMP)

$(TOOLS): $(STAMP)
	$(INSTALL) --no-build-isolation -e ".[$(TESTING)]"
	@echo "compiling the installed packages, some seconds"; $(COMPILE)
	@echo "$(CURDIR)" > $(TOOLS)

remove-unsound-venv:
	@rm -rf $(VENV)

train: $(STAMP)
	$(BIN)/potluck train $(ARGS)

# mypy runs beside the first tests: these leave a core free while they are collected.
test: $(TOOLS)
	$(BIN)/ruff check .
	@$(BIN)/mypy & types=$$!; \
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not clusters" $(ARGS); tests=$$?; \
	wait $$types || { echo "error: mypy found errors, shown above; to see them again: $(BIN)/mypy" >&2; exit 1; }; \
	[ $$tests != 5 ] || echo "error: ARGS chose no test" >&2; \
	exit $$tests

# The inner loop: what needs no second process and no network.
quick: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow and not alone" $(QUICK) $(ARGS)

docs: $(TOOLS)
	rm -rf build/docs
	$(BIN)/python -m sphinx -W --keep-going -q -E -c docs/site -d build/doctrees . build/docs
	@echo "open build/docs/index.html"

lessons: $(TOOLS)
	$(BIN)/python docs/lessons.py --slow $(ARGS)

dist: $(TOOLS)
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

bench: $(TOOLS)
	@failed=; \
	for script in bench/[!_]*.py; do \
	  [ -f "$$script" ] || { echo "no scripts in bench/"; exit 0; }; \
	  echo "== $$script"; \
	  $(BIN)/python "$$script" $(ARGS) || failed="$$failed $$script"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# What takes too long for every change, and Ray: 240 MB, and a cluster of it takes both cores while it starts.
test-clusters: $(TOOLS)
	$(INSTALL) --no-build-isolation -e ".[$(TESTING),ray-tests]"
	$(ONE_THREAD) $(BIN)/python -m pytest -m clusters $(ARGS)
	$(ONE_THREAD) $(BIN)/python -m pytest -k ray tests/unit/test_fleet_ray.py tests/multiproc/test_fleets.py $(ARGS)

test-elsewhere: $(TOOLS)
	$(BIN)/python tests/support/elsewhere.py $(ARGS)

stress: $(TOOLS)
	$(BIN)/python bench/stress $(ARGS)

pins: $(STAMP)
	$(BIN)/python tests/support/pins.py --extras $(TRAINING),$(TESTING),ray-tests

system-packages:
	@dpkg -s $(PACKAGES) >/dev/null 2>&1 || { apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(PACKAGES); }

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage src/*.egg-info
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
