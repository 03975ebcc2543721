# syntax=docker/dockerfile:1
# Headrace with vLLM for CPUs. Build it in the repository's root: docs/images.md.
#
# The base is named by its full version. Pin it by digest in your own registry: a tag may move.
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_CACHE=1 UV_LINK_MODE=copy
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# What the lock names comes first: a change of the source keeps this layer.
COPY scripts/install.py scripts/
COPY requirements/cpu.lock requirements/
# A mirror or a proxy: --secret id=pip,src=pip.conf. The secret is in no layer.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 scripts/install.py --venv /opt/headrace --lock requirements/cpu.lock --only-lock
COPY pyproject.toml README.md LICENSE ./
COPY platform platform
COPY prefill prefill
COPY decode decode
COPY engine engine
COPY kvstore kvstore
COPY lab lab
COPY helm/headrace helm/headrace
COPY images/contents.py images/
# Nothing may be in the image that its lock, and so its bill of materials, does not name.
RUN /opt/headrace/bin/python -m pip install --no-index --no-deps --no-build-isolation . \
    && /opt/headrace/bin/python -m compileall -q -j 0 /opt/headrace/lib/python3*/site-packages/headrace* \
    && /opt/headrace/bin/python -m pip uninstall -q -y uv pip \
    && /opt/headrace/bin/python images/contents.py requirements/cpu.lock

FROM ${BASE} AS run
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="headrace-cpu" \
      org.opencontainers.image.description="Prefill/decode serving for LLMs on Ray, with vLLM for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# libnuma1 and libgomp1: torch. ibverbs: UCX over RDMA. wget: probes of older KubeRay. g++: Triton.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       ca-certificates g++ ibverbs-providers libgomp1 libibverbs1 libnuma1 librdmacm1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 headrace \
    && useradd --uid 1000 --gid 1000 --create-home headrace \
    && install -d -o 1000 -g 1000 /cache \
    && echo "PATH=/opt/headrace/bin:\$PATH" > /etc/profile.d/headrace.sh
COPY --from=build /opt/headrace /opt/headrace
COPY requirements/cpu.lock /opt/headrace/requirements.lock
# Written at run time: /tmp, /home/headrace and /cache. All else may be read-only.
# USER has a name for libraries that ask for one, also where the cluster chooses another uid.
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/home/headrace \
    USER=headrace \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    HEADRACE_CACHE=/cache/headrace \
    VLLM_CACHE_ROOT=/cache/vllm \
    NUMBA_CACHE_DIR=/cache/numba \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    TRITON_CACHE_DIR=/cache/triton \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1
VOLUME ["/cache", "/home/headrace", "/tmp"]
USER 1000:1000
WORKDIR /home/headrace
ENTRYPOINT ["headrace"]
CMD ["--help"]
