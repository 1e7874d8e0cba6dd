# An image for the check of GPUs before a job: the command and NCCL, no CUDA toolkit and no Python. Build it in the root of the
# repository:
#
#   docker build -f deploy/docker/preflight.Dockerfile -t preflight --build-arg KEYRING_SHA256=... .
#   docker run --gpus all --shm-size=1g --ulimit memlock=-1 --cap-add SYS_NICE preflight
#
# deploy/README.md has its size. The kernels of the check are in the command as PTX, which the driver compiles, so that NVRTC is
# not needed. The matrix product is left out, because it needs cuBLASLt: mount one and set CHORUS_LIBCUBLASLT to include it.
#
# KEYRING_SHA256 and the digests of the base images are as in Dockerfile.
ARG GO=golang:1.26.8
ARG DEBIAN=debian:12
ARG BASE=gcr.io/distroless/cc-debian12:nonroot
FROM ${GO} AS build
WORKDIR /src
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o /out/ ./cmd/chorus

FROM ${DEBIAN} AS nccl
ARG KEYRING_SHA256
ADD https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb /tmp/
RUN echo "${KEYRING_SHA256:?build with --build-arg KEYRING_SHA256=the digest of cuda-keyring_1.1-1_all.deb}  /tmp/cuda-keyring_1.1-1_all.deb" | sha256sum -c -
RUN apt-get update && apt-get install -y ca-certificates && dpkg -i /tmp/cuda-keyring_1.1-1_all.deb && \
	apt-get update && apt-get install -y --no-install-recommends libnccl2 && \
	mkdir /libs && cp -L /usr/lib/x86_64-linux-gnu/libnccl.so.2 /libs/

FROM ${BASE}
COPY --from=build /out/ /app/
COPY --from=nccl /libs/ /app/
ENV LD_LIBRARY_PATH=/app NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility CHORUS_KERNEL_CACHE=off
USER 65532:65532
ENTRYPOINT ["/app/chorus"]
CMD ["preflight"]
