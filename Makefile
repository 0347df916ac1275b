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
	@touch $@
	@echo "Environment ready in $(VENV)."
