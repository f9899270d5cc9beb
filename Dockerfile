# NEST pretraining in a container.
#
#   docker build -t nest .                              PyTorch with CUDA
#   docker build -t nest --build-arg TORCH_INDEX=URL .  another PyTorch: the URL of the index that its install
#                                                       page gives for CPUs or another version of CUDA
#   docker run --rm --gpus all --ipc host --user "$(id -u)" -v "$PWD:/data" nest nestmodel fit ...
#
# Loader workers hand batches over in shared memory, of which a container has 64 MB without --ipc host or --shm-size.

FROM python:3.11-slim-bookworm AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /source

FROM python:3.11-slim-bookworm
# Triton and torch compile kernels at their first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# In a layer of its own, because it is large and changes rarely.
ARG TORCH_INDEX=
COPY constraints.txt /tmp/constraints.txt
# Pip ignores the variable if it is empty.
RUN PIP_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir --constraint /tmp/constraints.txt torch torchaudio

ARG EXTRAS=probe,remote,safetensors,vad
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheel/*.whl)[$EXTRAS]"

# Any user may run it: caches are in a folder that all can write to, and the name of the user is not looked up.
ENV HOME=/home/nest USER=nest
RUN useradd --uid 1000 --home-dir "$HOME" nest && install --directory --mode 1777 "$HOME"
USER 1000
WORKDIR /data
CMD ["nestmodel", "--help"]
