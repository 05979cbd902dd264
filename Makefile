# The verbs of seqserve. `make serve` and `make test` need nothing before them.
#   TORCH_INDEX   another package index for torch, for a CPU wheel on a machine that would get a CUDA one
#   ARGS          more flags for `seqserve serve`, such as ARGS="--port 9000 --frontends 2"

PYTHON      ?= python3
TORCH_INDEX ?=
DEVICE      ?= cpu
ARGS        ?=
USERS       ?= 32
SECONDS     ?= 30
OUT         ?= build/loadtest
BIN         := .venv/bin
PIP         := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PROJECT     := pyproject.toml constraints.txt Makefile
.DEFAULT_GOAL := help

.PHONY: help install gpu serve test lint eval bench loadtest bench-serve bench-engine bench-devices perf-analyzer libb64 simulate test-long test-gpu docker-test proto check-python

help:
	@echo "make serve        install, then serve the embedded models on 127.0.0.1:8000"
	@echo "make test         install, then lint and test everything that needs no GPU"
	@echo "make install      set up .venv"
	@echo "make lint         ruff and mypy"
	@echo "make eval         ask the running service the test questions in DATA=folder"
	@echo "make bench        time every kernel beside its peers, on DEVICE=cpu or cuda:0"
	@echo "make loadtest     USERS=32 callers for SECONDS=30 on a server of its own, or on URL; report and chart go to OUT=build/loadtest"
	@echo "make bench-serve  time this service beside a plain FastAPI handler with the same weights, then each of its doors and their codecs"
	@echo "make bench-engine time one engine without its doors, on DEVICE=cpu or cuda:0: stages of a request, rising turns, rising rates"
	@echo "make bench-devices  time this service on one device and on several, DEVICE=cuda:0,cuda:1"
	@echo "make perf-analyzer  Triton's load generator on a server of its own, or on URL=http://host:8000 GRPC=host:8001"
	@echo "make simulate     ways of batching on a virtual clock, beside the scheduler's: some minutes, needs no GPU"
	@echo "make test-long    100,000 requests and 200 reloads, after which no process may hold more than before, and sessions under stress: minutes"
	@echo "make test-gpu     the tests that need a GPU; what passed is written to tests/gpu/passed.json"
	@echo "make proto        compile service/frontend/oip/inference.proto, after a change of it"
	@echo "make docker-test  build the image, start the compose files on a container engine, test and remove them"

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: name a newer one with PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "the venv module is missing: install it (Debian: apt-get install python3-venv)"; exit 1; }

install: .venv/installed gpu

.venv/installed: $(PROJECT) | check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv"
	@if [ -n "$(TORCH_INDEX)" ]; then $(PIP) --no-deps --index-url "$(TORCH_INDEX)" torch; fi
	@$(PIP) --editable .
	@touch $@

# At every start, as drivers come and go.
gpu: .venv/installed
	@driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1); \
	if [ -z "$$driver" ]; then echo "no NVIDIA driver found: the CPU serves"; \
	elif [ "$$driver" -lt 580 ]; then echo "the NVIDIA driver is $$driver and CUDA 13 needs 580 or newer: the CPU serves"; \
	elif [ ! -e .venv/gpu ]; then echo "NVIDIA driver $$driver: installing the GPU packages"; $(PIP) --editable '.[gpu]' && touch .venv/gpu; fi

.venv/tools: .venv/installed
	@$(PIP) --editable '.[dev,load,bench]'
	@touch $@

serve: .venv/installed gpu
	@exec $(BIN)/seqserve serve $(ARGS)

test: lint
	$(BIN)/python -m pytest
	@$(BIN)/python -m tests.gpu --stale

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/baselines: .venv/installed
	@$(PIP) --editable '.[bench]'
	@touch $@

# Every kernel family beside every peer that installs, on DEVICE (cpu); results go to kernels/bench/results.
bench: .venv/baselines gpu
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m kernels.bench all --device $(DEVICE)

.venv/load: .venv/installed
	@$(PIP) --editable '.[load]'
	@touch $@

# Callers of several kinds; on a server that it starts, with the flags in $(ARGS), or on the one that runs on $(URL).
loadtest: .venv/load gpu
	@$(BIN)/python -m loadtest --users $(USERS) --seconds $(SECONDS) --out $(OUT) $(if $(URL),--url $(URL)) $(if $(ARGS),-- $(ARGS))

# Servers that are compared run at once and are loaded in turn; results go to loadtest/results.
bench-serve: .venv/load gpu
	@$(BIN)/python -m loadtest.bench_serve
	@$(BIN)/python -m loadtest.bench_endpoints
	@$(BIN)/python -m loadtest.bench_codec

# Where the time of a request goes inside an engine, and how many it answers; results go to loadtest/results.
bench-engine: .venv/load gpu
	@$(BIN)/python -m loadtest.bench_engine --device $(DEVICE)

# One device, then all that DEVICE names; results go to loadtest/results.
bench-devices: .venv/load gpu
	@$(BIN)/python -m loadtest.bench_devices --devices $(DEVICE)

# The program comes in a wheel of Triton's client, whose other parts would not fit into .venv.
.venv-perf/installed: loadtest/perf-analyzer.txt | check-python
	@test -x .venv-perf/bin/python || $(PYTHON) -m venv .venv-perf
	@echo "installing perf_analyzer into .venv-perf"
	@.venv-perf/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement loadtest/perf-analyzer.txt
	@touch $@

# The one library of the system that it needs and that few have; as Debian's package.
libb64:
	@PATH="$$PATH:/sbin" ldconfig -p | grep -q 'libb64\.so\.0d' || { \
	as_root=$$([ "$$(id -u)" -eq 0 ] || echo sudo); echo "installing libb64-0d"; \
	$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libb64-0d >/dev/null; }

# Over REST and gRPC, on a server that it starts, or on the one that runs on $(URL) and, for gRPC, on $(GRPC).
perf-analyzer: .venv/load .venv-perf/installed libb64 gpu
	@$(BIN)/python -m loadtest.perf_analyzer $(if $(URL),--url $(URL)) $(if $(GRPC),--grpc $(GRPC))

# With the cost of turns that COST names in loadtest/results/costs.json; `python -m loadtest.simulate --measure cuda:0` adds a device's.
simulate: .venv/load
	@$(BIN)/python -m loadtest.simulate $(if $(COST),--cost $(COST))

# Asks the service that runs on $(URL) the test questions in the folder that DATA names.
eval: .venv/installed
	@$(BIN)/python examples/evaluate.py $(if $(URL),--url $(URL))

# Shows by how much each process grew; on a machine that is busy with other things it takes longer, no more.
test-long: .venv/tools
	$(BIN)/python -m pytest tests/long

# Writes to tests/gpu/passed.json which kernels passed and where; `make test` warns when they are no longer those.
test-gpu: .venv/tools gpu
	$(BIN)/python -m tests.gpu

# The service reads what is compiled; a test says when that is no longer what the file says.
proto: .venv/tools
	@$(BIN)/python -m grpc_tools.protoc --proto_path=service/frontend/oip --descriptor_set_out=service/frontend/oip/inference.binpb inference.proto

# On the engine that DOCKER_HOST or docker's context names; COMPOSE_FILE may name files that change the shipped one for it.
docker-test: .venv/tools
	$(BIN)/python -m pytest -rs tests/docker
