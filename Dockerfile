# The service in a container, for a CPU; with CUDA=1 for an NVIDIA GPU as well.
#   docker build --tag seqserve:cpu .
#   docker build --tag seqserve:gpu --build-arg CUDA=1 .
# TORCH_INDEX=<package index with CPU wheels> saves the CPU image the download of CUDA's libraries; CUDA=1 does not use it.

ARG BASE=python:3.11-slim-bookworm

# What is to be installed, as a file of its own: while this list is the same, its packages are taken from the last build,
# whatever else changed in pyproject.toml.
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
# torch comes alone from its index, which need not have the other packages in the versions of constraints.txt.
# hadolint ignore=DL3013 # the versions are those of constraints.txt
RUN python -m venv --without-pip /opt/seqserve \
    && if [ -n "$TORCH_INDEX" ] && [ "$CUDA" != 1 ]; then \
        pip --python /opt/seqserve/bin/python install --no-deps --index-url "$TORCH_INDEX" torch; \
    fi \
    && pip --python /opt/seqserve/bin/python install --requirement requirements.txt

# The project apart from its packages, so that a new version of it is a small layer.
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY service service
COPY loadtest loadtest
COPY models /models
# Whatever the umask of the checkout was, the service's own user can read its models.
RUN pip --python /opt/seqserve/bin/python install --no-deps --prefix /project . \
    && chmod -R a+rX /models

FROM ${BASE}
LABEL org.opencontainers.image.title="seqserve" \
      org.opencontainers.image.description="A server for sequence models" \
      org.opencontainers.image.licenses="Apache-2.0"
# Nothing is written when it runs, so every byte-code file is there before: pip made those of the packages, and the base image
# may come without those of the standard library.
RUN python -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("stdlib"), quiet=2)' \
    && groupadd --system --gid 10001 seqserve \
    && useradd --system --uid 10001 --gid seqserve --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin seqserve \
    && install --directory --owner seqserve --group seqserve /var/cache/seqserve
COPY --from=dependencies /opt/seqserve /opt/seqserve
COPY --from=project /project /opt/seqserve
COPY --from=project /models /models
ENV PATH=/opt/seqserve/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    SEQSERVE_CACHE=/var/cache/seqserve \
    SEQSERVE_HOST=0.0.0.0 \
    SEQSERVE_MODELS=/models
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
WORKDIR /
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 CMD ["python", "-Ic", "\
import http.client, os; \
service = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('SEQSERVE_PORT', '8000')), timeout=2); \
service.request('GET', '/readyz'); \
raise SystemExit(service.getresponse().status != 200)"]
ENTRYPOINT ["seqserve"]
CMD ["serve"]
