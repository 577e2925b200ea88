# The runtime's image with SmolLM2-135M-Instruct, for the samples. FOLDER has the .gguf file, which `make model` downloads
# into the cache folder:
#
#   docker build -f manifests/samples/smollm2.Dockerfile -t localhost/megatron-inference/runtime-smollm2:0.1.0 FOLDER
#   helm upgrade --install megatron charts/megatron-inference --set registry=localhost/megatron-inference \
#     --set runtime.image=localhost/megatron-inference/runtime-smollm2:0.1.0
ARG RUNTIME_IMAGE=localhost/megatron-inference/runtime:0.1.0-cpu
FROM ${RUNTIME_IMAGE}
COPY SmolLM2-135M-Instruct.Q4_1.gguf /models/
# Otherwise each rank compiles its kernels for about ten seconds of a core. A node with another processor still compiles them.
USER root
RUN python3 -m megatron_runtime.model.kernels.compile_kernels /opt/megatron-kernels --head-dim 64 --dtype float32
USER 65532:65532
ENV MEGATRON_KERNELS=/opt/megatron-kernels
