# make env         the environment in .venv, versions pinned in constraints.txt
# make quickstart  train a language model by reinforcement, from nothing, on this machine
# make test        the fast suite         make test-all  what is too slow for it
# make bench       tables of speed        make lint      format, lint and types
# make bazel       query and build the BUILD files (needs a bazel on the PATH)

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
EXTRAS ?= dev
CONSTRAINTS ?= constraints.txt

# uv does not read pip's configuration: hand it the local wheels that pip is told of.
FIND_LINKS := $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null)
UV_SOURCES = $(if $(FIND_LINKS),--find-links $(FIND_LINKS),--torch-backend=cpu)

.PHONY: env quickstart test test-all bench lint format bazel clean

env: $(VENV)/.ready

$(VENV)/.ready: setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(UV_SOURCES) \
	  $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[$(EXTRAS)]'
	@# Compiles the modules, whatever the shell says: later starts are seconds shorter.
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import launch.build, configs.base, \
	  transformers.tokenization_utils_tokenizers, transformers.models.auto'
	@touch $@
	@echo "Environment ready in $(VENV)."

# The tests that need seconds, one process a core; Ray is started once, by its own tests.
test: env
	$(BIN)/python -m pytest -m 'not slow and not ray' -n 2 --dist loadgroup
	$(BIN)/python -m pytest -m 'ray and not slow'

test-all: env
	$(BIN)/python -m pytest -m 'slow and not ray' -n 2 --dist loadgroup --timeout 1800
	$(BIN)/python -m pytest -m 'slow and ray' --timeout 1800

# What must hold on every Python and jax that we support.
test-core: env
	$(BIN)/python -m pytest -m 'not slow and not ray' -n 2 --dist loadgroup \
	  tests/functional tests/algorithms tests/models tests/training tests/data

quickstart: env
	$(BIN)/python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart

bench: env
	$(BIN)/python -m tests.benchmarks

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bazel: env
	$(eval FLAGS := $(shell $(BIN)/python -m tests.structure.bazel_stubs build/bazel))
	bazel query //... $(FLAGS) --output label_kind
	bazel build //... $(FLAGS) --symlink_prefix=/
	bazel shutdown

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
