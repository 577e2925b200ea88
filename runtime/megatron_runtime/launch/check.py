"""``megatron-serve --check``: validates options, checkpoint and memory without starting processes."""

from __future__ import annotations

import asyncio

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.device_memory import device_memory
from megatron_runtime.launch.inspection import inspect_source
from megatron_runtime.launch.memory import AvailableMemory, available_memory
from megatron_runtime.launch.options import EngineOptions, LaunchOptions
from megatron_runtime.launch.ports import bind_control, bind_coordinator, bind_http, bind_metrics
from megatron_runtime.launch.preflight import EnginePlan, plan_engine
from megatron_runtime.launch.quantity import format_bytes
from megatron_runtime.launch.tasks import threads_per_rank
from megatron_runtime.server.api_keys import ApiKeys


def check_device(engine: EngineOptions, local_ranks: int) -> None:
    """Raises ConfigurationError unless each rank has a device of its own."""
    if engine.device == "cpu":
        return
    import torch  # takes seconds, and only this check needs it

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= local_ranks:
        return
    if found:
        words = f"{local_ranks} ranks need a GPU each, and this machine has {found}; lower --ranks-per-pod"
    elif torch.version.cuda is None:
        words = f"PyTorch {torch.__version__} is a build without CUDA; install one with CUDA, or use --device cpu"
    else:
        words = "PyTorch finds no GPU; check nvidia-smi and the container's devices, or use --device cpu"
    raise ConfigurationError(f"--device {engine.device}: {words}", field="device")


async def check_everything(options: LaunchOptions) -> str:
    """A summary of the model and its resources; raises ConfigurationError or CheckpointError if it can't be served."""
    options.check()
    if options.engine.device_memory_bytes is None:
        check_device(options.engine, options.local_ranks)
    identity = options.identity
    if options.has_first_rank:
        bind_http(options).close()
        bind_coordinator(options).close()
        if identity.api_keys_file is not None:
            ApiKeys(identity.api_keys_file)
        options.http.certificate()
    bind_control(options).close()
    bind_metrics(options).close()
    facts = await inspect_source(options.model, options.engine)
    available = available_memory()
    plan = plan_engine(options, facts, available, await asyncio.to_thread(device_memory, options.engine))
    return (
        f"{options.model_name}: {facts.architecture}, {facts.parameters} parameters, {facts.layers} layers\n"
        f"{options.local_ranks} rank(s) with {threads_per_rank(options)} thread(s) each: {plan.describe()}\n"
        f"{_describe_memory(options, plan, available)}\n"
        "no problems found"
    )


def _describe_memory(options: LaunchOptions, plan: EnginePlan, available: AvailableMemory) -> str:
    if options.engine.device == "cpu":
        return f"memory: {available}; at most {format_bytes(plan.total_bytes(options.local_ranks))} needed"
    size = "unknown; set --device-memory to check it" if plan.device is None else str(plan.device)
    beside = "" if plan.kv_cache_bytes is not None else " besides the KV cache"
    return f"memory of each GPU: {size}; about {format_bytes(plan.total_bytes(1))} needed{beside}"
