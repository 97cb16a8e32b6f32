"""Writes what a drafter guesses by its PyTorch reference, for tests/tests/drafter_program.rs.

    python make_drafter_references.py DSPARK_DIR MODEL_DIR DRAFTER_DIR TEXT_DIR OUT.safetensors

DSPARK_DIR has `dspark_torch.py`. The model continues prompts of three domains greedily in
f32 with the eager attention of transformers; its hidden states after the tapped layers,
rounded to f16 as the chunk programs give them out, are what the drafter reads, in f32.
Then every text is walked as speculative decoding would: draft after the newest token, keep
what the text agrees with, go on after it.

Of each cycle the file has: text, position of the newest token, the guesses, the second and
third choice of each and all three probabilities, confidences, the distances of the first
choice's logit from the second's and of the second's from the third's, and how many guesses
were kept. A drafter without its own embedding and output layer gets the model's.

The columns `dflash_*` are for the same weights read as a DFlash drafter: a block of 16 rows
of which all but the first guess the token at their own position, no Markov head.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

# Tokens of the prompts from each text, and of every answer. The longest cross the
# boundary of the smallest context.
PROMPTS = [24, 64, 130, 200, 290]
NEW = 96
CHATS = 5


def hashes(paths):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(paths)}


def load_drafter(dspark, folder, model):
    config = dspark.DSparkConfig.from_dict(json.loads((folder / "config.json").read_text()))
    net = dspark.DSparkDrafter(config)
    tensors = dspark.read_safetensors(str(folder / "model.safetensors"))
    tensors.setdefault("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    tensors.setdefault("lm_head.weight", model.lm_head.weight.detach())
    net.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=True)
    return net.eval()


def prompts(tokenizer, text_dir):
    for domain in ("docs", "code"):
        text = (text_dir / f"eval_{domain}.txt").read_text()
        ids = tokenizer(text, add_special_tokens=False).input_ids
        at = 500
        for n in PROMPTS:
            yield domain, ids[at : at + n]
            at += n + 300
    taken = 0
    for line in (text_dir / "eval_chat.jsonl").open():
        user = [m for m in json.loads(line)["messages"] if m["role"] == "user"][:1]
        rendered = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        if len(ids) <= 200:
            yield "chat", ids
            taken += 1
        if taken == CHATS:
            return


def answer(model, ids):
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
    )
    return out[0].tolist()


def three(logits):
    top = logits.topk(3)
    return {
        "ids": top.indices.tolist(),
        "probabilities": logits.softmax(-1).gather(1, top.indices).tolist(),
        "gaps": (top.values[:, :-1] - top.values[:, 1:]).tolist(),
    }


def recorded(net):
    """The list that gets the final hidden states of every draft."""
    seen, original = [], net.decode_block

    def decode_block(hidden, anchor):
        seen.append(hidden)
        return original(hidden, anchor)

    net.decode_block = decode_block
    return seen


def dflash(dspark, net):
    config = dataclasses.replace(
        net.config, block_size=16, markov_rank=0, enable_confidence_head=False
    )
    other = dspark.DSparkDrafter(config)
    own = other.state_dict()
    other.load_state_dict({k: v for k, v in net.state_dict().items() if k in own}, strict=True)
    return other.eval()


@torch.no_grad()
def cycles(net, flash, taps, text, first):
    caches = net.new_cache(), flash.new_cache()
    hidden, flash_hidden = recorded(net), recorded(flash)
    a, known = first, 0
    while a + 1 < len(text):
        draft = net.draft(text[a], caches[0], taps[:, known:a])
        flash.draft(text[a], caches[1], taps[:, known:a])
        base, prev, logits = net.lm_head(hidden[-1])[0], text[a], []
        for row in base:
            logits.append(row + net.markov_head(torch.tensor([prev]))[0])
            prev = int(logits[-1].argmax())
        found = three(torch.stack(logits))
        assert [i[0] for i in found["ids"]] == draft.tokens
        assert [i[1] for i in found["ids"]] == draft.runner_up
        other = three(flash.lm_head(flash_hidden[-1])[0][1:])
        kept = 0
        while kept < len(draft.tokens) and a + 1 + kept < len(text):
            if draft.tokens[kept] != text[a + 1 + kept]:
                break
            kept += 1
        yield {
            "anchors": a,
            "kept": kept,
            "confidences": draft.confidence,
            **found,
            **{f"dflash_{key}": value for key, value in other.items()},
        }
        known, a = a, a + kept + 1


def main():
    dspark_dir, model_dir, drafter_dir, text_dir, out = map(Path, sys.argv[1:6])
    sys.path.insert(0, str(dspark_dir))
    import dspark_torch as dspark

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    net = load_drafter(dspark, drafter_dir, model)
    flash = dflash(dspark, net)
    texts, domains, found = [], [], []
    for domain, prompt in prompts(tokenizer, text_dir):
        text = answer(model, prompt)
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[i + 1] for i in net.config.target_layer_ids], dim=-1)
        taps = taps.half().float()
        for cycle in cycles(net, flash, taps, text, len(prompt)):
            cycle["texts"] = len(texts)
            found.append(cycle)
        texts.append(text)
        domains.append(["docs", "code", "chat"].index(domain))
    ints = {"anchors", "kept", "texts", "ids", "dflash_ids"}
    columns = {
        key: np.array([c[key] for c in found], np.int32 if key in ints else np.float32)
        for key in found[0]
    }
    tensors = {
        "tokens": np.concatenate([np.array(t, np.int32) for t in texts]),
        "lengths": np.array([len(t) for t in texts], np.int32),
        "domains": np.array(domains, np.int32),
        **columns,
    }
    files = [*model_dir.glob("*.safetensors"), model_dir / "config.json"]
    drafter = [*drafter_dir.glob("*.safetensors"), drafter_dir / "config.json"]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    metadata = {
        "inputs": json.dumps(hashes(files)),
        "drafter": json.dumps(hashes(drafter)),
        "reference": json.dumps(hashes([dspark_dir / "dspark_torch.py"])),
        "versions": json.dumps(versions),
    }
    save_file(tensors, out, metadata)
    for i, domain in enumerate(["docs", "code", "chat"]):
        kept = [c["kept"] for c in found if domains[c["texts"]] == i]
        print(f"{domain}: {len(kept)} cycles, {np.mean(kept):.3f} kept in the mean")


if __name__ == "__main__":
    main()
