# The demo in a container. Emulated nodes need their own network namespaces, hence --privileged:
#
#   docker build -t syncline .
#   docker run --rm --privileged -v "$PWD/runs:/work/runs" syncline
#
# On a GPU, with a base image that has CUDA and torch (or CUDA alone; torch is installed where it is missing):
#
#   docker build -t syncline-cuda --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime .
#   docker run --rm --privileged --gpus all syncline-cuda bench overhead --device cuda
#
# The usual index has torch with CUDA, several gigabytes. --build-arg PIP_INDEX_URL=... names one with the CPU build.
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG PIP_INDEX_URL
ENV PATH=/opt/syncline/bin:$PATH PIP_NO_CACHE_DIR=1

# Base images with CUDA alone have no Python. Without a compiler, codecs on the CPU use torch's operators.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && if ! command -v python3; then apt-get install --yes --no-install-recommends python3 python3-venv; fi \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --system-site-packages /opt/syncline

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts/package_description.py scripts/
COPY src src

# The base image's own torch is kept: the pin is for images without one.
RUN python -c "import torch" || pip install --constraint constraints.txt torch
RUN grep -v "^torch==" constraints.txt > /tmp/constraints.txt
RUN pip install --constraint /tmp/constraints.txt ".[cli]"

WORKDIR /work
ENTRYPOINT ["syncline"]
CMD ["compare", "--recipe", "demo"]
