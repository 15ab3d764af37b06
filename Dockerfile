# The program with all it needs on a GPU, from NVIDIA's image of CUDA 13.0 with cuDNN and NCCL. It has not been built yet.
#
#   docker build -t train_gpt_mxfp8 .
#   docker run --gpus all -it -v "$PWD/runs:/train_gpt_mxfp8/runs" train_gpt_mxfp8 make demo
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

# Of the processor that the program is built for: that of this machine; x86-64-v3 is any with AVX2.
ARG ARCH=native
ENV ARCH=${ARCH}
WORKDIR /train_gpt_mxfp8
# The versions are Ubuntu's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN scripts/setup.sh \
    && make \
    && rm -rf /var/lib/apt/lists/*
CMD ["./train_gpt_mxfp8", "--device-info"]
