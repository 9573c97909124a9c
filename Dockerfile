# CUDA:  docker build --tag tailrace .
#        docker run --gpus all --shm-size 8g --volume $PWD:/runs tailrace train /runs/run.toml --output-dir /runs/first --resume
# CPU:   docker build --tag tailrace --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=... .
#        with the index of PyTorch's wheels for CPUs
#
# The default wheels of torch bring CUDA; the driver is the host's. docker stop sends SIGTERM, and the run saves:
# give it time (--stop-timeout 120).
FROM debian:bookworm-slim
ARG TORCH=torch
ARG PIP_EXTRA_INDEX_URL
COPY . /src
RUN sh /src/examples/image/install.sh "$TORCH"
WORKDIR /runs
ENTRYPOINT ["tailrace"]
