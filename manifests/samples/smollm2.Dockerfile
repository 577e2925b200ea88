# The runtime's image with SmolLM2-135M-Instruct, for the samples. FOLDER has the .gguf file, which `make model` downloads
# into the cache folder:
#
#   docker build -f manifests/samples/smollm2.Dockerfile -t localhost/megatron-inference/runtime-smollm2:0.1.0 FOLDER
#   helm upgrade --install megatron charts/megatron-inference --set registry=localhost/megatron-inference \
#     --set runtime.image=localhost/megatron-inference/runtime-smollm2:0.1.0
ARG RUNTIME_IMAGE=localhost/megatron-inference/runtime:0.1.0-cpu
FROM ${RUNTIME_IMAGE}
COPY SmolLM2-135M-Instruct.Q4_1.gguf /models/
