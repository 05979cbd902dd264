# The service in a container for a CPU, or with CUDA=1 for an NVIDIA GPU.
#   docker build --tag seqserve:cpu .
#   docker build --tag seqserve:gpu --build-arg CUDA=1 .
# TORCH_INDEX=<package index with CPU wheels> makes the CPU image smaller: torch comes without CUDA's libraries. CUDA=1 ignores it.

ARG BASE=python:3.11-slim-bookworm

# The list of requirements is a file of its own. While it does not change, the build reuses the layer with the packages.
FROM ${BASE} AS requirements
ARG CUDA=
WORKDIR /source
COPY pyproject.toml ./
RUN python -c 'import os, tomllib; \
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extra = project["optional-dependencies"]["gpu"] if os.environ["CUDA"] == "1" else []; \
    print(*project["dependencies"], *extra, sep="\n")' > requirements.txt

FROM ${BASE} AS dependencies
ARG CUDA=
ARG TORCH_INDEX=
ENV PIP_CONSTRAINT=/source/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY constraints.txt ./
COPY --from=requirements /source/requirements.txt ./
# Only torch comes from TORCH_INDEX, which may lack the other packages.
# hadolint ignore=DL3013 # the versions are those of constraints.txt
RUN python -m venv --without-pip /opt/seqserve \
    && if [ -n "$TORCH_INDEX" ] && [ "$CUDA" != 1 ]; then \
        pip --python /opt/seqserve/bin/python install --no-deps --index-url "$TORCH_INDEX" torch; \
    fi \
    && pip --python /opt/seqserve/bin/python install --requirement requirements.txt

# The project has a layer of its own, so that a new version is small.
FROM dependencies AS project
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kernels kernels
COPY service service
COPY loadtest loadtest
COPY models models
# The service's user can read the models, whatever the umask of the checkout was. /models is where a volume replaces them.
RUN chmod -R a+rX models \
    && pip --python /opt/seqserve/bin/python install --no-deps --prefix /project . \
    && cp -R models /models

FROM ${BASE}
LABEL org.opencontainers.image.title="seqserve" \
      org.opencontainers.image.description="A server for sequence models" \
      org.opencontainers.image.licenses="Apache-2.0"
# The container writes nothing, so byte code is compiled now: pip does it for the packages, and the base image may lack that of the
# standard library.
RUN python -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("stdlib"), quiet=2)' \
    && groupadd --system --gid 10001 seqserve \
    && useradd --system --uid 10001 --gid seqserve --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin seqserve \
    && install --directory --owner seqserve --group seqserve /var/cache/seqserve
COPY --from=dependencies /opt/seqserve /opt/seqserve
COPY --from=project /project /opt/seqserve
COPY --from=project /models /models
# Machine code of the CPU kernels, for every processor of this architecture.
RUN SEQSERVE_CACHE=/var/cache/seqserve /opt/seqserve/bin/python -m kernels.cpu --all \
    && chown -R seqserve:seqserve /var/cache/seqserve
ENV PATH=/opt/seqserve/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    SEQSERVE_CACHE=/var/cache/seqserve \
    SEQSERVE_HOST=0.0.0.0 \
    SEQSERVE_MODELS=/models
# A number, so that an orchestrator can check that it is not root.
USER 10001:10001
WORKDIR /
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 CMD ["python", "-Ic", "\
import http.client, os, ssl; \
place = '127.0.0.1', int(os.environ.get('SEQSERVE_PORT', '8000')); \
tls = {'context': ssl._create_unverified_context()} if os.environ.get('SEQSERVE_TLS_CERT') else None; \
service = http.client.HTTPSConnection(*place, timeout=2, **tls) if tls else http.client.HTTPConnection(*place, timeout=2); \
service.request('GET', '/readyz'); \
raise SystemExit(service.getresponse().status != 200)"]
ENTRYPOINT ["seqserve"]
CMD ["serve"]
