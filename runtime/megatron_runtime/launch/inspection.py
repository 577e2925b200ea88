"""Inspects the checkpoint in a child process, which can be ended at any time, also during a download.

It reads headers only, and does not import torch, which would take longer than the inspection.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from megatron_runtime.errors import CheckpointError, ConfigurationError, MegatronInferenceError
from megatron_runtime.launch.options import DRAFT_MODEL_FLAG, EngineOptions, ModelSource, parallel_flag
from megatron_runtime.model.cache_layout import CacheLayout
from megatron_runtime.model.formats.quantized_weights import KeptWeights
from megatron_runtime.processes.child import Child, ChildTask, Report
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, ParentLink
from megatron_runtime.processes.supervisor import ChildEnd, error_report

_DRAFT_MODEL = "speculative_draft_model"


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts about a checkpoint that the launcher needs. Lengths are tokens, sizes elements."""

    path: str
    architecture: str
    parameters: int
    longest: int
    layers: int
    cache_layout: CacheLayout
    """Cache layout of a rank with as many layers of each kind as any rank has."""
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
    draft: CheckpointFacts | None = None
    """Facts about the draft model, which is whole on each rank."""

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        """The facts whose fields, as JSON values, are ``data``."""
        layout, kept, draft = CacheLayout(**data["cache_layout"]), KeptWeights(**data["kept"]), data["draft"]
        facts = None if draft is None else cls.deserialize(draft)
        return cls(**{**data, "cache_layout": layout, "kept": kept, "draft": facts})


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
        if field == _DRAFT_MODEL:
            flag = f"{DRAFT_MODEL_FLAG} {engine.speculative_draft_model}"
        kind = ConfigurationError if error is not None and error["reason"] == "ConfigurationError" else CheckpointError
        raise kind(f"{flag}: {ChildEnd(task.role, code, tuple(child.tail), error).message}")
    return CheckpointFacts.deserialize(facts)


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
    from megatron_runtime.model.formats.source import resolve_source

    path = resolve_source(
        path=options.path, hf_repo=options.hf_repo, hf_file=options.hf_file, revision=options.hf_revision
    )
    facts, engine = _facts_about(path, options.engine), options.engine
    if engine.speculative_draft_model is None:
        return facts
    try:
        draft = _facts_about(resolve_source(path=engine.speculative_draft_model), engine.of_draft_model)
    except MegatronInferenceError as error:
        raise ConfigurationError(str(error), field=_DRAFT_MODEL) from error
    return replace(facts, draft=draft)


def _facts_about(path: Path, engine: EngineOptions) -> CheckpointFacts:
    from megatron_runtime.model.activations import activation_elements
    from megatron_runtime.model.attention_kind import attention_kind
    from megatron_runtime.model.formats.checkpoint_header import inspect_checkpoint
    from megatron_runtime.model.formats.expected_tensors import expert_parameters
    from megatron_runtime.model.quantized.kept_tensors import kept_weights
    from megatron_runtime.model.shard import Shard

    summary = inspect_checkpoint(path)
    config = summary.config
    shard = Shard(config, engine.sizes.position(0))  # raises if the model can't be divided so
    kept = kept_weights(shard, summary.source, engine.kept_kind)
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
