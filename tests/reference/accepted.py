"""Accepted tokens per cycle by domain, as a PyTorch reference of the drafter has them.

    python accepted.py REFERENCE MODEL DRAFTER TEXTS [PROMPTS_PER_DOMAIN] [NEW_TOKENS] [STORE]

REFERENCE is a folder with `dspark_torch.py`, MODEL and DRAFTER are checkpoints, TEXTS is
`tests/data/text`. The prompts are those of `tests/tests/speculate.rs` and of the example
`accepted`. Weights are in f32, as in the checkpoints; with STORE the model's are those of a
store, dequantized, which are the weights of the folders made from it. A line per prompt
comes first: cycles, accepted tokens and a hash of the text.
"""
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

reference, model, drafter, texts = (Path(p) for p in sys.argv[1:5])
per_domain = int(sys.argv[5]) if len(sys.argv) > 5 else 20
new_tokens = int(sys.argv[6]) if len(sys.argv) > 6 else 256
sys.path.insert(0, str(reference))
import dspark_torch as ds  # noqa: E402

torch.set_num_threads(1)


def lut(path: Path) -> torch.Tensor:
    """A matrix of a store; the format is described in `schemas/src/lut.rs`."""
    data = path.read_bytes()
    bits = int.from_bytes(data[12:16], "little")
    rows, cols, group, tables, indices = (
        int.from_bytes(data[at:at + 8], "little") for at in range(16, 56, 8))
    up = lambda n: -(-n // 64) * 64
    values = np.frombuffer(data, "<f2", tables // 2, 64).reshape(-1, 1 << bits)
    packed = np.frombuffer(data, np.uint8, indices, up(64 + tables))
    stream = np.unpackbits(packed, bitorder="little")[:rows * cols * bits]
    codes = stream.reshape(-1, bits) @ (1 << np.arange(bits))
    which = np.arange(rows)[:, None] // group
    return torch.from_numpy(values[which, codes.reshape(rows, cols)].astype(np.float32))


def dequantized(store: Path) -> dict:
    found = {}
    for file in store.glob("matrices/*.json"):
        found[json.loads(file.read_text())["name"]] = lut(file.with_suffix(".lut"))
    for file in store.glob("dense/*.json"):
        entry = json.loads(file.read_text())
        values = np.frombuffer(file.with_suffix(".bin").read_bytes(), "<f2")
        found[entry["name"]] = torch.from_numpy(
            values.astype(np.float32).reshape(entry["shape"]))
    return found


config = json.loads((model / "config.json").read_text())
tensors = {}
for file in sorted(model.glob("*.safetensors")):
    tensors |= ds.read_safetensors(str(file))

target_config = ds.DSparkConfig.from_dict(json.loads((drafter / "config.json").read_text()))
for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "rms_norm_eps"):
    setattr(target_config, key, config[key])
tied = bool(config.get("tie_word_embeddings"))
store = Path(sys.argv[7]) if len(sys.argv) > 7 else None
target = ds.TinyQwen3(target_config, config["num_hidden_layers"], tie=tied and store is None)
if tied:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
if store:
    # Of a tied pair only the output layer has tables.
    state = dequantized(store)
    assert state.keys() == tensors.keys(), "a store of another model"
else:
    state = tensors
target.load_state_dict(state, strict=True)
target = target.float().eval()

net = ds.DSparkDrafter(ds.DSparkConfig.from_dict(json.loads((drafter / "config.json").read_text())))
own = ds.read_safetensors(str(drafter / "model.safetensors"))
own.setdefault("embed_tokens.weight", tensors["model.embed_tokens.weight"])
own.setdefault("lm_head.weight", tensors["lm_head.weight"])
net.load_state_dict(own, strict=True)
net = net.float().eval()

tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]


def chat(question: str) -> list:
    from jinja2 import Environment
    text = Environment().from_string(template).render(
        messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False).ids


def prompts():
    for domain, name in enumerate(["code", "docs"]):
        ids = tokenizer.encode((texts / f"eval_{name}.txt").read_text(), add_special_tokens=False).ids
        for i in range(per_domain):
            length = 1 + (i * 131 + domain * 7) % 250
            start = i * (len(ids) - 300) // 20
            yield name, ids[start:start + length]
    taken = 0
    for line in (texts / "eval_chat.jsonl").read_text().splitlines():
        user = next(m for m in json.loads(line)["messages"] if m["role"] == "user")
        ids = chat(user["content"])
        if len(ids) <= 250 and taken < per_domain:
            taken += 1
            yield "chat", ids


seen = {}
for sides in (False, True):
    counts = {}
    for domain, ids in prompts():
        new, st = ds.speculative_generate(target, net, ids, new_tokens, use_sides=sides)
        text = hashlib.sha256(np.array(new[:new_tokens], "<u4").tobytes()).hexdigest()[:8]
        kind, n = "tree" if sides else "chain", seen.get((sides, domain), 0)
        seen[sides, domain] = n + 1
        cycles = st["verify_calls"]
        # The first token is the prompt's; what the last cycle has beyond the end is cut.
        accepted = len(new) - 1 - cycles
        print(f"{kind} {domain} {n} {text}: {cycles} {accepted}", flush=True)
        total = counts.setdefault(domain, [0, 0, 0])
        total[0] += cycles
        total[1] += accepted
        total[2] += st["side_hits"]
    print("tree" if sides else "chain", {
        d: f"{a / c:.3f} ({c} cycles, {h} side hits)" for d, (c, a, h) in counts.items()}, flush=True)
