"""The runtime of Megatron inference on Kubernetes. Modules with Megatron's paths are in the folder ``compat``."""

__path__.append(f"{__path__[0]}/compat")
