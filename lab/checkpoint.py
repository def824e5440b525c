"""A tiny random Qwen3 checkpoint that vLLM loads and answers with; standard library only, the same bytes every time."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 64, 128, 2, 2, 1, 32, 320, 512
SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _shapes(heads: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model by the names that Qwen3 gives them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in (
            ("input_layernorm", (HIDDEN,)),
            ("post_attention_layernorm", (HIDDEN,)),
            ("self_attn.q_norm", (HEAD_DIM,)),
            ("self_attn.k_norm", (HEAD_DIM,)),
            ("self_attn.q_proj", (heads * HEAD_DIM, HIDDEN)),
            ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, heads * HEAD_DIM)),
            ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
            ("mlp.up_proj", (INTERMEDIATE, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


def safetensors(seed: int = 0, heads: int = HEADS) -> bytes:
    """Return the weights: norms are one, the rest normal with deviation 0.02, all bfloat16."""
    source = random.Random(seed)  # noqa: S311  weights, not secrets
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blob = bytearray()
    for name, shape in _shapes(heads).items():
        begin = len(blob)
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        for _ in range(count):
            value = 1.0 if len(shape) == 1 else source.gauss(0.0, 0.02)
            blob += struct.pack("<f", value)[2:]  # bfloat16 is the upper half of a float32
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, len(blob)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(blob)


def _byte_symbols() -> dict[str, int]:
    """Return the byte-level alphabet: a visible character for each of the 256 bytes, as byte-level BPE defines it."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = {}, 0x100
    for byte in range(256):
        if byte in visible:
            symbols[chr(byte)] = byte
        else:
            symbols[chr(spare)] = byte
            spare += 1
    return symbols


def documents(heads: int = HEADS) -> dict[str, Any]:
    """Return the JSON files that go with the weights, by file name."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, number in SPECIAL.items()
    ]
    return {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "bos_token_id": SPECIAL["<|endoftext|>"],
            "eos_token_id": SPECIAL["<|im_end|>"],
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "max_position_embeddings": CONTEXT,
            "num_attention_heads": heads,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB,
        },
        "generation_config.json": {
            "eos_token_id": [SPECIAL["<|im_end|>"]],
            "pad_token_id": SPECIAL["<|endoftext|>"],
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": _byte_symbols(),
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": CONTEXT,
            "pad_token": "<|endoftext|>",
        },
    }


def generate(directory: Path, heads: int = HEADS) -> Path:
    """Put the checkpoint into ``directory``, whole or not at all, and return the directory.

    :param heads: attention heads, which the tensor-parallel size of a lane must divide.
    """
    if (directory / "config.json").exists():
        return directory
    part = directory.with_name(directory.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(safetensors(heads=heads))
    for name, content in documents(heads).items():
        (part / name).write_text(json.dumps(content, indent=2) + "\n")
    part.rename(directory)
    return directory
