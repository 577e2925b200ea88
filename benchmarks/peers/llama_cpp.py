"""llama.cpp through llama-cpp-python: all prompts as sequences of one context, one batch per step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

from peers.protocol import Job, choose, serve

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Sequences:
    def __init__(self, job: Job) -> None:
        settings = llama_cpp.llama_context_default_params()
        path = job.folder
        if not path.is_file():
            kind = gguf.GGMLQuantizationType[choose(job.dtype, TYPES)]
            path = job.work / "model.gguf"
            write_gguf(job.folder, path, kind)
            settings.type_k = settings.type_v = kind.value
        self.prompts = job.prompts
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings.n_ctx, settings.n_seq_max = len(job.prompts) * job.length, len(job.prompts)
        settings.n_threads = settings.n_threads_batch = job.threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp created no context; see its messages above")
        self.room = llama_cpp.llama_n_batch(self.context)
        self.batch = llama_cpp.llama_batch_init(self.room, 0, 1)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, new_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        length, at_once = len(self.prompts[0]), self.room // len(self.prompts[0])
        rows = range(len(self.prompts))
        answers: list[list[int]] = [[] for _ in rows]
        for first in range(0, len(rows), at_once):
            self._step(rows[first : first + at_once], self.prompts, 0, answers)
        for done in range(1, new_tokens):
            self._step(rows, [answer[-1:] for answer in answers], length + done - 1, answers)
        return answers

    def _step(self, rows: range, tokens: list[list[int]], start: int, answers: list[list[int]]) -> None:
        """Runs one forward pass over ``tokens`` of these rows from a position on; appends the most likely next token of
        each."""
        batch, at = self.batch, 0
        for row in rows:
            for offset, token in enumerate(tokens[row]):
                batch.token[at], batch.pos[at] = token, start + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = offset == len(tokens[row]) - 1
                at += 1
        batch.n_tokens = at
        if failure := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {failure}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (len(rows), self.vocabulary))
        for row, token in zip(rows, logits.argmax(axis=1), strict=True):
            answers[row].append(int(token))


def write_gguf(folder: Path, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Writes a Llama checkpoint without a vocabulary as GGUF, with its matrices as ``kind``."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _tensors(folder, config["head_dim"]):
        stored = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(folder: Path, head: int) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's names and tensors; llama.cpp rotates neighboring rows, so the rows of a head's halves are interleaved."""
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in outer:
            yield outer[name], tensor
            continue
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = tensor.reshape(-1, 2, head // 2, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        yield f"blk.{layer}.{NAMES[part]}.weight", np.ascontiguousarray(tensor)


if __name__ == "__main__":
    serve(Sequences, "llama-cpp-python", "gguf")
