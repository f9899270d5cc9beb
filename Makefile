# Each target does its own set-up; `make demo` and `make test` work on a fresh clone.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := demo

.PHONY: demo test test-faults soak check format clean

# One install for every target: the packages in place, with the pinned versions of what they need.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# Prepares the demo corpus, shows its plan and one batch of it, and trains the demo model.
demo: $(READY)
	rm -rf $(DEMO)
	$(BIN)/nestdata prepare manifests/demo/speech.json -o $(DEMO)/speech.corpus
	$(BIN)/nestdata prepare manifests/demo/noise.json -o $(DEMO)/noise.corpus --pcm
	$(BIN)/nestdata plan $(DEMO)/speech.corpus --config demo
	$(BIN)/nestdata sample-batch preview $(DEMO)/speech.corpus --noise $(DEMO)/noise.corpus --config demo -o $(DEMO)/preview
	$(BIN)/nestmodel fit --config demo --data.corpus $(DEMO)/speech.corpus --data.noise $(DEMO)/noise.corpus \
		--trainer.default_root_dir $(DEMO)/run
	@echo
	@echo "corpus:      $(DEMO)/speech.corpus/report.html"
	@echo "batch:       $(DEMO)/preview/index.html"
	@echo "model:       $(DEMO)/run/version_0/checkpoints"
	@echo "curves:      $(DEMO)/run/version_0/curves.png"

test: $(READY)
	$(BIN)/python -m pytest

# The whole matrix of faults: real ranks that are killed, stopped and stuck. Up to half an hour.
test-faults: $(READY)
	$(BIN)/python -m pytest -m 'faults or multiprocess' tests/distributed tests/nestmodel

# Twenty minutes of training under the stall guard, which must not say a word.
soak: $(READY)
	$(BIN)/python -m tests.distributed.soak --minutes 20

# Format, lint and types: what CI holds a change to.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info
