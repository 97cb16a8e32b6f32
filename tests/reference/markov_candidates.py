"""The Markov chain over a few candidates for each depth, against the chain over all tokens.

    python markov_candidates.py MODEL DRAFTER REFERENCE.safetensors

MODEL and DRAFTER are checkpoints, REFERENCE the file that `make_drafter_references.py`
made from them: its texts are walked again, draft by draft, in f32. Candidates of a depth
are the M best before the Markov bias ("base"), or those and the M tokens that the bias
alone likes best after the token before ("both"), which a table by token could tell. For
each it prints

    guesses  share of guesses that are those of the chain over all tokens, up to the first
             of a draft that is not
    drafts   share of drafts of which all seven are
    kept     guesses kept per cycle in code, docs, chat and all, of a walk with these drafts
    p error  mean distance of a guess's probability among the candidates from that among all
    ms       time of the best of 50 to choose the base's candidates, and of the chain

Only numpy is needed. That guesses of the chain over all tokens are those of the reference
is checked first.
"""
import json
import sys
import time
from pathlib import Path

import numpy as np

SIZES = [8, 32, 128]
DTYPES = {"BF16": "<u2", "F32": "<f4", "I32": "<i4"}


def read(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + at for at in entry["data_offsets"])
        values = np.frombuffer(data[start:end], DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        found[name] = values.reshape(entry["shape"])
    return found


class Layers:
    """Decoder layers of one checkpoint; rows are `[n, D]`, heads `[heads, n, d]`."""

    def __init__(self, folder, prefix):
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {}
        for file in folder.glob("*.safetensors"):
            self.tensors |= read(file)
        self.prefix = prefix

    def norm(self, x, name):
        eps = np.float32(self.config["rms_norm_eps"])
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.tensors[name]

    def heads(self, x, layer, part, first, turn=True):
        d = self.config["head_dim"]
        name = f"{self.prefix}layers.{layer}.self_attn.{part}"
        x = (x @ self.tensors[f"{name}_proj.weight"].T).reshape(len(x), -1, d)
        if turn:
            x = self.norm(x, f"{name}_norm.weight")
            inverse = self.config["rope_theta"] ** (-np.arange(0, d, 2) / d)
            angles = np.arange(first, first + len(x))[:, None] * inverse.astype(np.float32)
            angles = np.concatenate([angles, angles], 1).astype(np.float32)[:, None]
            turned = np.concatenate([-x[..., d // 2:], x[..., :d // 2]], -1)
            x = x * np.cos(angles) + turned * np.sin(angles)
        return x.transpose(1, 0, 2)

    def rows(self, x, layer):
        return self.norm(x, f"{self.prefix}layers.{layer}.input_layernorm.weight")

    def rest(self, h, layer, q, k, v, mask=0):
        """The residual stream after a layer, given its heads."""
        groups = len(q) // len(k)
        k, v = k.repeat(groups, 0), v.repeat(groups, 0)
        scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[-1])) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        part = lambda name: self.tensors[f"{self.prefix}layers.{layer}.{name}.weight"]
        h = h + mixed.transpose(1, 0, 2).reshape(len(h), -1) @ part("self_attn.o_proj").T
        x = self.norm(h, f"{self.prefix}layers.{layer}.post_attention_layernorm.weight")
        gate = x @ part("mlp.gate_proj").T
        gated = gate / (1 + np.exp(-gate)) * (x @ part("mlp.up_proj").T)
        return h + gated @ part("mlp.down_proj").T


def taps(model, text, layers):
    """Hidden states after `layers`, rounded to f16, side by side."""
    h = model.tensors["model.embed_tokens.weight"][text]
    mask = np.triu(np.full((len(text), len(text)), -1e9, np.float32), 1)
    found = []
    for layer in range(max(layers) + 1):
        x = model.rows(h, layer)
        q, k = (model.heads(x, layer, part, 0) for part in "qk")
        h = model.rest(h, layer, q, k, model.heads(x, layer, "v", 0, False), mask)
        if layer in layers:
            found.append(h.astype(np.float16).astype(np.float32))
    return np.concatenate(found, 1)


class Drafts:
    """Logits before the Markov bias, `[7, V]`, after each position of a text."""

    def __init__(self, net, text, rows):
        self.net, self.text, self.seen = net, text, {}
        fused = net.norm(rows @ net.tensors["fc.weight"].T, "hidden_norm.weight")
        layers = range(net.config["num_hidden_layers"])
        self.context = [
            (net.heads(fused, i, "k", 0), net.heads(fused, i, "v", 0, False)) for i in layers]

    def base(self, anchor):
        if anchor not in self.seen:
            net = self.net
            ids = [self.text[anchor]] + [net.config["mask_token_id"]] * (net.config["block_size"] - 1)
            h = net.tensors["embed_tokens.weight"][ids]
            for i, (keys, values) in enumerate(self.context):
                x = net.rows(h, i)
                k = np.concatenate([keys[:, :anchor], net.heads(x, i, "k", anchor)], 1)
                v = np.concatenate([values[:, :anchor], net.heads(x, i, "v", anchor, False)], 1)
                h = net.rest(h, i, net.heads(x, i, "q", anchor), k, v)
            self.seen[anchor] = net.norm(h, "norm.weight") @ net.tensors["lm_head.weight"].T
        return self.seen[anchor]


class Chain:
    """The Markov chain over `size` candidates of each kind, over all tokens if 0."""

    def __init__(self, net, size=0, both=False):
        self.before, self.after = (
            net.tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        self.size, self.both, self.liked = size, both, {}

    def choose(self, base):
        return np.argpartition(-base, self.size - 1, 1)[:, :self.size] if self.size else None

    def after_token(self, token):
        if token not in self.liked:
            bias = self.after @ self.before[token]
            self.liked[token] = np.argpartition(-bias, self.size - 1)[:self.size]
        return self.liked[token]

    def guess(self, base, anchor, chosen):
        """Guesses, and the probability of each among its candidates."""
        guesses, chances, token = [], [], int(anchor)
        for depth, row in enumerate(base):
            if chosen is None:
                of, scores = None, row + self.after @ self.before[token]
            else:
                of = chosen[depth]
                if self.both:
                    of = np.union1d(of, self.after_token(token))
                scores = row[of] + self.after[of] @ self.before[token]
            place = int(scores.argmax())
            token = place if of is None else int(of[place])
            guesses.append(token)
            chances.append(1 / np.exp(scores - scores[place]).sum())
        return guesses, chances

    def __call__(self, base, anchor):
        return self.guess(base, anchor, self.choose(base))


def agreed(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def shortest(work):
    times = []
    for _ in range(50):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main():
    model, net = Layers(Path(sys.argv[1]), "model."), Layers(Path(sys.argv[2]), "")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tied = model.tensors["model.embed_tokens.weight"]
        net.tensors.setdefault(name, model.tensors.get(name, tied))
    reference = read(Path(sys.argv[3]))
    ends = np.cumsum(reference["lengths"])
    texts = [reference["tokens"][e - n:e] for e, n in zip(ends, reference["lengths"])]
    layers = net.config["target_layer_ids"]
    drafts = [Drafts(net, text, taps(model, text, layers)) for text in texts]
    anchors = list(zip(reference["texts"], reference["anchors"]))

    whole, full, same = Chain(net), {}, 0
    for (text, anchor), ids in zip(anchors, reference["ids"]):
        full[text, anchor] = whole(drafts[text].base(anchor), texts[text][anchor])
        same += full[text, anchor][0] == ids[:, 0].tolist()
    print(f"{same} of {len(anchors)} drafts are the reference's")
    assert same >= 0.99 * len(anchors)

    def kept(chain):
        total = np.zeros((3, 2))
        for text, ids in enumerate(texts):
            # A text that ended at once has no draft.
            a = min((anchor for t, anchor in anchors if t == text), default=len(ids))
            while a + 1 < len(ids):
                right = agreed(chain(drafts[text].base(a), ids[a])[0], ids[a + 1:])
                total[reference["domains"][text]] += right, 1
                a += right + 1
        return " ".join(f"{right / n:.3f}" for right, n in [*total[[1, 0, 2]], total.sum(0)])

    print("candidates, guesses, drafts, kept, p error, ms to choose, ms of the chain")
    for size, both in [(0, False), *((size, both) for both in (False, True) for size in SIZES)]:
        chain = Chain(net, size, both)
        guesses, drafted, error = 0, 0, []
        for (text, anchor), (wanted, chances) in full.items():
            found, stated = chain(drafts[text].base(anchor), texts[text][anchor])
            right = agreed(found, wanted)
            guesses, drafted = guesses + right, drafted + (right == len(wanted))
            error += [abs(a - b) for a, b in zip(stated[:right], chances)]
        text, at = anchors[0]
        base, anchor = drafts[text].base(at), texts[text][at]
        chosen = chain.choose(base)
        times = [shortest(lambda: chain.choose(base)),
                 shortest(lambda: chain.guess(base, anchor, chosen))]
        name = f"{size} {'both' if both else 'base'}" if size else "all"
        n = len(full)
        print(f"{name}: {guesses / n / len(base):.4f} {drafted / n:.4f} {kept(chain)} "
              f"{np.mean(error):.4f} {times[0]:.3f} {times[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
