"""``megatron-serve``: one pod of a served model, or a whole one on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.launch.identity import TERMINATION_LOG_VARIABLE, Identity
from megatron_runtime.launch.kernels import kernel_cache
from megatron_runtime.launch.launcher import Launcher
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.quantity import parse_bytes
from megatron_runtime.launch.termination import Outcome
from megatron_runtime.parallel.timeouts import RENDEZVOUS_TIMEOUT
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED
from megatron_runtime.processes.supervisor import HANG_SECONDS, RESET_SECONDS
from megatron_runtime.server.options import HttpOptions
from megatron_runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """The console script."""
    logging.basicConfig(level=logging.INFO, format="[launcher] %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    app()


@app.command(help="Serve a model behind an OpenAI endpoint.", context_settings={"help_option_names": ["-h", "--help"]})
def serve(
    model: Annotated[Path | None, typer.Option(help="A .gguf file or a checkpoint folder.")] = None,
    hf_repo: Annotated[str | None, typer.Option(help="A repository on the Hugging Face hub instead.")] = None,
    hf_revision: Annotated[str | None, typer.Option(help="Its branch, tag or commit.")] = None,
    served_name: Annotated[str | None, typer.Option(help="The model's name in requests.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    max_sequence_length: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Stages that the layers are spread over.")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Groups of a layer's ranks that share its experts out.")] = 1,
    ranks_per_pod: Annotated[int | None, typer.Option(help="Ranks of a copy that one pod runs. Default: all.")] = None,
    threads_per_rank: Annotated[int | None, typer.Option(help="Default: the cores, shared by the ranks.")] = None,
    block_size_tokens: Annotated[int, typer.Option(help="Tokens per block of the KV cache.")] = 16,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Size of the KV cache per rank, like 20Gi.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Most requests that compute at a time.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the cache of equal prompt beginnings.")] = True,
    chunked_prefill: Annotated[bool, typer.Option(help="Split long prompts over several steps.")] = True,
    kv_cache_management: Annotated[
        str, typer.Option(help="What suspend does with the KV cache: persist, offload or recompute.")
    ] = "offload",
    offload_weights: Annotated[bool, typer.Option(help="Suspend moves the weights to host memory.")] = False,
    logprobs_mode: Annotated[
        str, typer.Option(help="raw_logprobs: the model's own; processed_logprobs: those that tokens are drawn with.")
    ] = "raw_logprobs",
    check_finite: Annotated[bool, typer.Option("--check-finite", help="Refuse weights with NaN or infinity.")] = False,
    routing_policy: Annotated[
        str,
        typer.Option(
            help="round-robin, load-balanced, first-prefix-block, longest-prefix, or auto: longest-prefix with prefix "
            "caching, load-balanced without."
        ),
    ] = "auto",
    routing_alpha: Annotated[float, typer.Option(help="Weight of the prefix against the load, 0 to 1.")] = 0.5,
    frontend_replicas: Annotated[int, typer.Option(help="Processes that answer HTTP.")] = 2,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    max_in_flight: Annotated[
        int, typer.Option(help="Answers that a frontend process works on at a time; for more it says 429.")
    ] = HttpOptions.max_in_flight,
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "16Mi",
    body_timeout: Annotated[
        float, typer.Option(help="Seconds that the body of a request may take to arrive.")
    ] = HttpOptions.body_timeout,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may read answers, or *; may be repeated.")
    ] = None,
    access_log: Annotated[str, typer.Option(help="A line per request: off, text or json.")] = "off",
    parsers: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What finds calls of tools ({', '.join(TOOL_PARSERS)}; default: as the chat template shows)"
            f" and reasoning ({', '.join(REASONING_PARSERS)}; default: none) in answers; may be repeated."
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option(help="Serve a page at / to chat with the model and to watch the service.")
    ] = HttpOptions.page,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that SIGTERM leaves to running requests.")] = 60.0,
    auto_suspend_after: Annotated[
        float,
        typer.Option(help="Seconds without a request after which engines are suspended until the next; 0: never."),
    ] = 0.0,
    max_restarts: Annotated[int, typer.Option(help="Restarts of dead ranks before giving up.")] = 5,
    restart_reset_after: Annotated[
        float, typer.Option(help="Seconds without a restart after which all of them are allowed again.")
    ] = RESET_SECONDS,
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a process counts as hung and is replaced.")
    ] = HANG_SECONDS,
    rendezvous_timeout: Annotated[
        float, typer.Option(help="Seconds within which all ranks of a copy have to come together.")
    ] = RENDEZVOUS_TIMEOUT,
    replicas: Annotated[int, typer.Option(help="Copies of the model, for a standalone run.")] = 1,
    host: Annotated[str | None, typer.Option(help="Address of the OpenAI endpoint.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port; 0 for any free one. Default: 8000.")] = None,
    control_port: Annotated[int | None, typer.Option(help="Port of the control API. Default: 9000.")] = None,
    coordinator_port: Annotated[int | None, typer.Option(help="Port of the coordinator. Default: 5557.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check options, checkpoint and memory, and end.")] = False,
) -> None:
    """Reads flags and environment, then serves; ends with the launcher's exit code."""
    try:
        options = LaunchOptions(
            model=ModelSource(path=model, hf_repo=hf_repo, hf_revision=hf_revision),
            identity=Identity.from_environment(os.environ),
            engine=EngineOptions(
                dtype=dtype,
                device=device,
                max_sequence_length=max_sequence_length,
                block_size_tokens=block_size_tokens,
                kv_cache_bytes=None if kv_cache_memory is None else parse_bytes(kv_cache_memory, "--kv-cache-memory"),
                max_requests=max_requests,
                prefix_caching=prefix_caching,
                chunked_prefill=chunked_prefill,
                kv_cache_management=kv_cache_management,
                offload_weights=offload_weights,
                logprobs_mode=logprobs_mode,
                check_finite=check_finite,
                tensor_parallel=tensor_parallel,
                pipeline_parallel=pipeline_parallel,
                expert_parallel=expert_parallel,
            ),
            served_name=served_name,
            replicas=replicas,
            ranks_per_pod=ranks_per_pod,
            threads_per_rank=threads_per_rank,
            routing_policy=routing_policy,
            routing_alpha=routing_alpha,
            frontend_replicas=frontend_replicas,
            request_timeout=request_timeout,
            http=HttpOptions(
                max_body_bytes=parse_bytes(max_body, "--max-body"),
                body_timeout=body_timeout,
                max_in_flight=max_in_flight,
                cors_origins=tuple(cors_origin or ()),
                access_log=access_log,
                parsers=tuple(parsers or ()),
                page=page,
            ),
            drain_timeout=drain_timeout,
            auto_suspend_after=auto_suspend_after,
            max_restarts=max_restarts,
            restart_reset_after=restart_reset_after,
            hang_timeout=hang_timeout,
            rendezvous_timeout=rendezvous_timeout,
            host=host,
            port=port,
            control_port=control_port,
            coordinator_port=coordinator_port,
        )
        options.check()
    except ConfigurationError as error:
        raise typer.Exit(_refuse(error)) from error
    raise typer.Exit(_check(options) if check else _run(options))


def _run(options: LaunchOptions) -> int:
    async def run() -> int:
        return await Launcher(options, announce=lambda url: _announce(options, url)).run()

    with kernel_cache(os.environ):
        return asyncio.run(run())


def _check(options: LaunchOptions) -> int:
    from megatron_runtime.launch.check import check_everything

    try:
        print(asyncio.run(check_everything(options)))
    except (ConfigurationError, CheckpointError) as error:
        return _refuse(error)
    return EXIT_DRAINED


def _refuse(error: Exception) -> int:
    """Says what is wrong, also where an operator looks for it."""
    log = os.environ.get(TERMINATION_LOG_VARIABLE)
    Outcome.bad_input(error).write(Path(log) if log else None)
    print(f"megatron-serve: {error}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _announce(options: LaunchOptions, url: str) -> None:
    """A line to try, once requests are taken."""
    body = f'{{"model": "{options.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(f"curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


if __name__ == "__main__":
    main()
