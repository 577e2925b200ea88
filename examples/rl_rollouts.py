"""A loop of reinforcement learning: rollouts by the engines, an update of the policy, and its weights for the engines.

Every rank has an engine. The primary rank has the policy, a model of transformers, and updates it by REINFORCE with the
mean reward of a group as baseline (Williams 1992). The reward of an answer is its share of lower-case letters. While
the policy is updated, the engines are suspended.

Usage: ``python examples/rl_rollouts.py --load MODEL``, or with two replica groups
``torchrun --nproc-per-node 2 examples/rl_rollouts.py --load MODEL``. It needs the package transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_runtime.apis import DynamicInferenceRequest, MegatronLLM, SamplingParams, join_world
from megatron_runtime.config import InferenceConfig
from megatron_runtime.model.checkpoint import load_model, load_tokenizer


def main() -> None:
    """Runs on every rank."""
    options = _parse()
    policy = load_policy(options.load)
    optimizer = torch.optim.SGD(policy.parameters(), lr=options.learning_rate)
    with closing(join_world()) as ranks:
        model = load_model(options.load, dtype="float32", ranks=ranks)
        config = InferenceConfig(kv_cache_memory_bytes=2**26, kv_cache_management_mode="recompute")
        with MegatronLLM(
            model=model, tokenizer=load_tokenizer(options.load), inference_config=config, use_coordinator=True
        ) as llm:
            for iteration in range(options.iterations):
                rollouts = generate(llm, options, seed=1 + iteration * options.group_size)
                llm.pause()
                llm.suspend()
                if rollouts:
                    rewards = torch.tensor([reward(rollout) for rollout in rollouts])
                    difference = update(policy, optimizer, rollouts, rewards)
                    report(iteration, rollouts, rewards, difference)
                llm.resume()
                llm.update_weights(shared_weights(policy))
                llm.unpause()


def load_policy(path: Path) -> PreTrainedModel:
    """The model that is trained, in float32."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def generate(llm: MegatronLLM, options: argparse.Namespace, *, seed: int) -> list[DynamicInferenceRequest]:
    """The rollouts of a group; none on other ranks than the primary one."""
    if not llm.is_primary_rank:
        return []
    params = SamplingParams(
        num_tokens_to_generate=options.num_tokens_to_generate,
        ignore_eos=True,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        return_prompt_tokens=True,
        seed=seed,
        n=options.group_size,
    )
    return llm.generate(options.prompt, params)


def reward(rollout: DynamicInferenceRequest) -> float:
    """The share of lower-case letters in the answer."""
    text = rollout.generated_text or ""
    return sum(letter.islower() for letter in text) / max(1, len(text))


def update(
    policy: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[DynamicInferenceRequest],
    rewards: Tensor,
) -> float:
    """One gradient step.

    Returns:
        The largest difference between the log probabilities of the engines and those of the policy.
    """
    generated = torch.tensor([rollout.generated_tokens for rollout in rollouts])
    prompt = rollouts[0].prompt_tokens
    assert prompt is not None
    tokens = torch.cat((prompt.expand(len(rollouts), -1), generated), dim=1)
    logits = policy(tokens).logits[:, len(prompt) - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, generated[..., None]).squeeze(-1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    optimizer.zero_grad()
    (-advantages[:, None] * log_probs).mean().backward()
    optimizer.step()
    reported = torch.tensor([rollout.generated_log_probs for rollout in rollouts])
    return float((log_probs.detach() - reported).abs().max())


def shared_weights(policy: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the primary rank's policy, on every rank."""
    weights = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    if dist.is_initialized():
        for tensor in weights.values():
            dist.broadcast(tensor, 0)
    return weights


def report(iteration: int, rollouts: Sequence[DynamicInferenceRequest], rewards: Tensor, difference: float) -> None:
    """Print a line of the table."""
    version = rollouts[0].weight_version
    print(
        f"iteration {iteration}: weight version {version}, mean reward {rewards.mean():.3f}, "
        f"log probabilities differ by at most {difference:.1e}",
        flush=True,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True, type=Path, help="a Hugging Face folder, or a GGUF file")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--num-tokens-to-generate", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    return parser.parse_args()


if __name__ == "__main__":
    main()
