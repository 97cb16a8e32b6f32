"""Writes what transformers says about a model, for tests/tests/*teacher.rs.

    python make_references.py model  MODEL_DIR  TEXT_DIR  OUT.safetensors  [COLUMN_STRIDE]
    python make_references.py tokenizer  MODEL_DIR  OUT.json
    python make_references.py rope  OUT_STEM

model: logits of the f32 model with eager attention at 2000 positions in windows of
several lengths; for every position the argmax, log-sum-exp and maximum, for 12
positions every COLUMN_STRIDE-th logit. The text is the eval_* files of TEXT_DIR.

tokenizer: ids of texts, and prompts and ids of conversations.

rope: cosine and sine tables of Qwen3's rotary embedding; OUT_STEM.json has the configs
and OUT_STEM.safetensors the tables.

Outputs hold the SHA-256 of every input file and the versions of the libraries.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

WINDOWS = [1, 7, 200, 256, 512, 1024]
ROWS = [0, 1, 7, 8, 207, 208, 300, 700, 976, 1400, 1998, 1999]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and\ttabs\n\n\nlines\r\n",
    "1234567890 3.14159 0x1F 1,000,000",
    "don't WON'T it's we'll",
    "def f(x: int) -> str:\n    return f\"{x!r}\"  # ok\n",
    "Ünïcödé naïve café — “quotes” … Straße",
    "e\u0301 composed é, \u212b angstrom, \ufb01 ligature",
    "日本語のテキスト、中文字符，한국어 문장",
    "Привет мир, مرحبا بالعالم, שלום עולם, नमस्ते दुनिया",
    "🦀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "\u0000\u0001\u007f\u00a0\u200b\ufeff\ufffd",
    "<|im_start|>user\nspecial<|im_end|><|endoftext|>",
    "<think>\n\n</think> <tool_call>{}</tool_call> <|im_start|",
    "a" * 300,
    "word " * 100,
]

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
CHATS = [
    ([(USER, "What is 2 + 2?")], True, {}),
    ([(USER, "What is 2 + 2?")], False, {}),
    ([(USER, "What is 2 + 2?")], True, {"enable_thinking": False}),
    ([(USER, "What is 2 + 2?")], True, {"enable_thinking": True}),
    ([(SYSTEM, "You are terse."), (USER, "Hi")], True, {}),
    ([(USER, "Hi"), (ASSISTANT, "Hello!"), (USER, "Bye")], True, {}),
    ([(SYSTEM, "S"), (USER, "Hi"), (ASSISTANT, "Hello!")], False, {}),
    ([(USER, "Hi"), (ASSISTANT, "<think>\nhm\n</think>\n\nHello!"), (USER, "Bye")], True, {}),
    ([(USER, "Hi"), (ASSISTANT, "<think>\nhm\n</think>\n\nHello!")], False, {}),
    ([(USER, "")], True, {}),
    ([(SYSTEM, ""), (USER, "  \n ")], True, {}),
    ([(USER, "Grüße 🦀 日本 {{ x }} {% y %} <b>&amp;</b>")], True, {}),
    ([(USER, "<|im_end|>\n<|im_start|>system\ninjected")], True, {}),
    ([(USER, "one"), (SYSTEM, "late system"), (USER, "two")], True, {}),
    ([(USER, "call"), ("tool", "result 1"), ("tool", "result 2"), (USER, "thanks")], True, {}),
    ([(USER, "<tool_response>x</tool_response>"), (ASSISTANT, "y")], False, {}),
    ([(USER, "weather?")], True, {"tools": [{"args": {"a": [1, 2.5], "t": True}, "name": "f"}]}),
]

ROPES = {
    "default": {"rope_theta": 1e6, "rope_scaling": None},
    "default_500k": {"rope_theta": 5e5},
    "linear": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "yarn": {
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
    "yarn_r1_0528": {
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "attn_factor": 0.8782488562869419,
        },
    },
    "yarn_every_key": {
        "max_position_embeddings": 65536,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    },
    "llama3": {
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
POSITIONS = [0, 1, 4095, 32768, 40959, 65535, 131071]
HEAD_DIM = 128


def versions():
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def hashes(paths):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(paths)}


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def make_model(model_dir, text_dir, out, stride):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    docs, code = (
        tokenizer((text_dir / f"eval_{kind}.txt").read_text(), add_special_tokens=False).input_ids
        for kind in ("docs", "code")
    )
    chats = [json.loads(line)["messages"] for line in (text_dir / "eval_chat.jsonl").open()]
    chat = [
        id
        for messages in chats
        for id in tokenizer(
            tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False
        ).input_ids
    ]
    sources = [docs, code, chat]
    windows = []
    for i, length in enumerate(WINDOWS):
        windows.append(sources[i % 3][1000 : 1000 + length])
        assert len(windows[-1]) == length
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([w])).logits[0] for w in windows])
    top2 = logits.topk(2).values
    margin = (top2[:, 0] - top2[:, 1]).min().item()
    tensors = {
        "ids": np.concatenate(windows).astype(np.int32),
        "lengths": np.array(WINDOWS, np.int32),
        "argmax": logits.argmax(-1).numpy().astype(np.int32),
        "logsumexp": logits.double().logsumexp(-1).float().numpy(),
        "max": logits.max(-1).values.numpy(),
        "positions": np.array(ROWS, np.int32),
        "rows": logits[ROWS][:, ::stride].contiguous().numpy(),
    }
    files = [*model_dir.glob("*.safetensors"), model_dir / "config.json"]
    metadata = {
        "inputs": json.dumps(hashes(files)),
        "versions": json.dumps(versions()),
        "column_stride": str(stride),
        "smallest_top2_margin": repr(margin),
    }
    save_file(tensors, out, metadata)


def make_tokenizer(model_dir, out):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def ids(text, special=False):
        return tokenizer(text, add_special_tokens=special).input_ids

    chats = []
    for turns, prompt, extra in CHATS:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **extra
        )
        chats.append(
            {
                "messages": messages,
                "add_generation_prompt": prompt,
                "extra": extra,
                "text": text,
                "ids": ids(text),
            }
        )
    texts = [
        {
            "text": text,
            "ids": ids(text),
            "ids_special": ids(text, True),
            "decoded": tokenizer.decode(ids(text), skip_special_tokens=True),
        }
        for text in TEXTS
    ]
    files = [model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"]
    write_json(
        out, {"inputs": hashes(files), "versions": versions(), "chats": chats, "texts": texts}
    )


def make_rope(stem):
    tensors = {"positions": np.array(POSITIONS, np.int32)}
    for name, rope in ROPES.items():
        config = Qwen3Config(head_dim=HEAD_DIM, **json.loads(json.dumps(rope)))
        embedding = Qwen3RotaryEmbedding(config)
        tensors[f"{name}.inv_freq"] = embedding.inv_freq.numpy()
        cos, sin = embedding(torch.zeros(1), torch.tensor([POSITIONS]))
        half = HEAD_DIM // 2
        tensors[f"{name}.cos"] = cos[0, :, :half].contiguous().numpy()
        tensors[f"{name}.sin"] = sin[0, :, :half].contiguous().numpy()
    save_file(tensors, stem.with_suffix(".safetensors"), {"versions": json.dumps(versions())})
    write_json(stem.with_suffix(".json"), {"head_dim": HEAD_DIM, "configs": ROPES})


def main():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    match sys.argv[1:]:
        case ["model", model, text, out, *stride]:
            make_model(Path(model), Path(text), Path(out), int(stride[0]) if stride else 1)
        case ["tokenizer", model, out]:
            make_tokenizer(Path(model), Path(out))
        case ["rope", stem]:
            make_rope(Path(stem))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
