"""Inspects the checkpoint in a child process, which can be ended at any time, also during a download.

It reads headers only, and does not import torch, which would take longer than the inspection.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megatron_runtime.errors import CheckpointError, ConfigurationError, MegatronInferenceError
from megatron_runtime.launch.options import EngineOptions, ModelSource, parallel_flag
from megatron_runtime.model.cache_layout import CacheLayout
from megatron_runtime.model.formats.quantized_weights import KeptWeights
from megatron_runtime.processes.child import Child, ChildTask, Report
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, ParentLink
from megatron_runtime.processes.supervisor import ChildEnd, error_report


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts about a checkpoint that the launcher needs. Lengths are tokens, sizes elements."""

    path: str
    architecture: str
    parameters: int
    longest: int
    layers: int
    cache_layout: CacheLayout
    """Cache layout of the rank that caches most."""
    expert_parameters: int = 0
    """Parameters of the experts, included in ``parameters``."""
    tied_head_parameters: int = 0
    """Parameters of a head that is tied to the embedding; a CPU stores them twice, unless they stay quantized."""
    kept: KeptWeights = field(default_factory=KeptWeights)
    """Weights that stay quantized."""
    activation_elements: int = 0
    """Elements per token that the widest layer of a rank holds at once."""
    vocabulary: int = 0
    """Logits per token."""


@dataclass(frozen=True)
class InspectionOptions:
    """The options of the process that inspects the checkpoint."""

    path: str | None
    hf_repo: str | None
    hf_file: str | None
    hf_revision: str | None
    engine: EngineOptions

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        """The options whose fields, as JSON values, are ``data``."""
        return cls(**{**data, "engine": EngineOptions(**data["engine"])})


async def inspect_source(source: ModelSource, engine: EngineOptions) -> CheckpointFacts:
    """Downloads the checkpoint if necessary, and reads its metadata. Cancelling it ends the process.

    Raises:
        CheckpointError: The checkpoint can't be served; the message has the reason.
        ConfigurationError: The source or the number of ranks is invalid; the message begins with the flag.
    """
    found: list[Report] = []
    path = None if source.path is None else str(source.path)
    options = InspectionOptions(path, source.hf_repo, source.hf_file, source.hf_revision, engine)
    task = ChildTask(role="inspection", module="megatron_runtime.launch.inspection", options=asdict(options))
    child = Child(task, found.append)
    await child.start()
    try:
        code = await child.wait()
    except BaseException:
        await child.kill()
        raise
    error = next((report["error"] for report in found if "error" in report), None)
    facts = next((report["checkpoint"] for report in found if "checkpoint" in report), None)
    if facts is None:
        field = (error or {}).get("field")
        flag = parallel_flag(field) if field in engine.parallel_sizes else source.flag
        kind = ConfigurationError if error is not None and error["reason"] == "ConfigurationError" else CheckpointError
        raise kind(f"{flag}: {ChildEnd(task.role, code, tuple(child.tail), error).message}")
    layout, kept = CacheLayout(**facts["cache_layout"]), KeptWeights(**facts["kept"])
    return CheckpointFacts(**facts | {"cache_layout": layout, "kept": kept})


def main() -> None:
    """The process that ``inspect_source`` starts."""
    link = ParentLink.from_arguments()
    try:
        facts = _inspect(InspectionOptions.deserialize(link.options))
    except MegatronInferenceError as error:
        link.report(error=error_report(error))
        sys.exit(EXIT_BAD_INPUT)
    link.report(checkpoint=asdict(facts))
    sys.exit(EXIT_DRAINED)


def _inspect(options: InspectionOptions) -> CheckpointFacts:
    # Imported here: the launcher imports this module and does not need the readers of checkpoints.
    from megatron_runtime.model.activations import activation_elements
    from megatron_runtime.model.attention_kind import attention_kind
    from megatron_runtime.model.formats.checkpoint_header import inspect_checkpoint
    from megatron_runtime.model.formats.expected_tensors import expert_parameters
    from megatron_runtime.model.formats.source import resolve_source
    from megatron_runtime.model.quantized.kept_tensors import kept_weights
    from megatron_runtime.model.shard import Shard

    path = resolve_source(
        path=options.path, hf_repo=options.hf_repo, hf_file=options.hf_file, revision=options.hf_revision
    )
    summary = inspect_checkpoint(path)
    config = summary.config
    shard = Shard(config, options.engine.sizes.position(0))  # raises if the model can't be divided so
    kept = kept_weights(shard, summary.source) if options.engine.keeps_quantized else KeptWeights()
    has_copy = config.tie_word_embeddings and not kept.has_embedding
    return CheckpointFacts(
        path=str(path),
        architecture=config.architecture,
        parameters=summary.num_parameters,
        longest=config.max_position_embeddings,
        layers=config.num_layers,
        cache_layout=attention_kind(shard.largest_cache_config).cache_layout,
        expert_parameters=expert_parameters(config),
        tied_head_parameters=config.vocab_size * config.hidden_size if has_copy else 0,
        kept=kept,
        activation_elements=activation_elements(shard),
        vocabulary=config.vocab_size,
    )


if __name__ == "__main__":
    main()
