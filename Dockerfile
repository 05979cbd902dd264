# The service in a container for a CPU, or with CUDA=1 for an NVIDIA GPU.
#   docker build --tag seqserve:cpu .
#   docker build --tag seqserve:gpu --build-arg CUDA=1 .
# TORCH_INDEX=<package index with CPU wheels> makes the CPU image smaller: torch comes without CUDA's libraries. CUDA=1 ignores it.

# Pin the base image by its digest where builds must be reproducible: BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
ARG CUDA=
ARG TORCH_INDEX=
ENV PIP_CONSTRAINT=/source/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY constraints.txt ./
COPY deploy/requirements ./requirements
# The lock files have the hash of every package but torch, whose files depend on its index. CUDA's libraries come with torch.
# hadolint ignore=DL3013,DL3042 # the versions are those of constraints.txt
RUN python -m venv --without-pip /opt/seqserve \
    && if [ "$CUDA" = 1 ]; then locked=gpu; else locked=cpu; fi \
    && pip --python /opt/seqserve/bin/python install --no-deps --require-hashes --requirement "requirements/$locked.txt" \
    && if [ -n "$TORCH_INDEX" ] && [ "$CUDA" != 1 ]; then \
        pip --python /opt/seqserve/bin/python install --no-deps --index-url "$TORCH_INDEX" torch; \
    else \
        pip --python /opt/seqserve/bin/python install torch; \
    fi

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

# A list of the packages in the image, in CycloneDX's format:  docker build --target sbom --output build .
FROM dependencies AS listed
# hadolint ignore=DL3013,DL3042 # the version is that of constraints.txt
RUN python -m venv /listing \
    && pip --python /listing/bin/python install cyclonedx-bom \
    && /listing/bin/cyclonedx-py environment --output-file /sbom.json /opt/seqserve/bin/python

FROM scratch AS sbom
COPY --from=listed /sbom.json /

# The base image without its programs: no shell, no package manager, no pip. Only Python and the loader's cache tool remain.
FROM ${BASE} AS root
# The container writes nothing, so byte code is compiled now: pip does it for the packages, and the base image may lack that of the
# standard library.
RUN python -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("stdlib"), quiet=2)' \
    && groupadd --system --gid 10001 seqserve \
    && useradd --system --uid 10001 --gid seqserve --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin seqserve \
    && install --directory --owner seqserve --group seqserve /var/cache/seqserve
COPY deploy/remove_programs.py /tmp/
RUN ["python", "/tmp/remove_programs.py"]

FROM scratch
# hadolint ignore=DL3067 # the base image again, as one layer, because programs stay in a layer that a later one deletes them from
COPY --from=root / /
LABEL org.opencontainers.image.title="seqserve" \
      org.opencontainers.image.description="A server for sequence models" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=dependencies /opt/seqserve /opt/seqserve
COPY --from=project /project /opt/seqserve
COPY --from=project /models /models
ENV PATH=/opt/seqserve/bin:/usr/local/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    SEQSERVE_CACHE=/var/cache/seqserve \
    SEQSERVE_HOST=0.0.0.0 \
    SEQSERVE_MODELS=/models
# A number, so that an orchestrator can check that it is not root.
USER 10001:10001
WORKDIR /
# Machine code of the CPU kernels, for every processor of this architecture.
RUN ["python", "-m", "kernels.cpu", "--all"]
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 CMD ["python", "-Ic", "\
import http.client, os, ssl; \
health = os.environ.get('SEQSERVE_HEALTH_PORT', 'off'); \
place = '127.0.0.1', int(os.environ.get('SEQSERVE_PORT', '8000') if health == 'off' else health); \
tls = {'context': ssl._create_unverified_context()} if health == 'off' and os.environ.get('SEQSERVE_TLS_CERT') else None; \
service = http.client.HTTPSConnection(*place, timeout=2, **tls) if tls else http.client.HTTPConnection(*place, timeout=2); \
service.request('GET', '/readyz'); \
raise SystemExit(service.getresponse().status != 200)"]
ENTRYPOINT ["seqserve"]
CMD ["serve"]
