#!/usr/bin/env python3
"""llama.cpp and Anemone side by side: one token, a 16-row and a 64-row call.

Random weights in the shapes of Qwen3-0.6B and of four layers of Qwen3-8B, every matrix
in one 4-bit type. A call stands behind 256 slots, is repeated, and the shortest time
counts; the two programs take turns. On one thread times are processor time, on more
wall time, which means something on a quiet machine only.

    python3 -m venv venv && venv/bin/pip install llama-cpp-python gguf numpy
    cargo build --release
    venv/bin/python runtime/benches/llama/compare.py --work DIR [--threads N]

The work folder (12 GB) keeps the models, so a second run measures at once.
"""

import argparse
import ctypes
import json
import pathlib
import subprocess
import sys
import time

import gguf
import llama_cpp
import numpy

ROOT = pathlib.Path(__file__).resolve().parents[3]
FILLED = 256
# Name: layers, hidden, heads, key heads, head channels, intermediate, vocabulary, tied.
SHAPES = {
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, True),
    "qwen3-8b": (4, 4096, 32, 8, 128, 12288, 151936, False),
}
TYPES = {
    "iq4_nl": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def write_f16(path, shape):
    """A GGUF file with random matrices and norms of one."""
    layers, hidden, heads, groups, depth, inner, vocab, tied = shape
    random = numpy.random.default_rng(1)
    out = gguf.GGUFWriter(str(path), "qwen3")
    out.add_block_count(layers)
    out.add_context_length(4096)
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(groups)
    out.add_key_length(depth)
    out.add_value_length(depth)
    out.add_rope_freq_base(1e6)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_vocab_size(vocab)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    out.add_tokenizer_model("none")

    def matrix(name, rows, cols):
        values = random.standard_normal((rows, cols), dtype=numpy.float32) * 0.02
        out.add_tensor(f"{name}.weight", values.astype(numpy.float16))

    def norm(name, size):
        out.add_tensor(f"{name}.weight", numpy.ones(size, numpy.float32))

    matrix("token_embd", vocab, hidden)
    if not tied:
        matrix("output", vocab, hidden)
    norm("output_norm", hidden)
    for layer in range(layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm", hidden)
        norm(block + "ffn_norm", hidden)
        norm(block + "attn_q_norm", depth)
        norm(block + "attn_k_norm", depth)
        matrix(block + "attn_q", heads * depth, hidden)
        matrix(block + "attn_k", groups * depth, hidden)
        matrix(block + "attn_v", groups * depth, hidden)
        matrix(block + "attn_output", hidden, heads * depth)
        matrix(block + "ffn_gate", inner, hidden)
        matrix(block + "ffn_up", inner, hidden)
        matrix(block + "ffn_down", hidden, inner)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def llama_models(work):
    """The GGUF files, made where they are missing."""
    for name, shape in SHAPES.items():
        for kind, ftype in TYPES.items():
            path = work / f"{name}-{kind}.gguf"
            if not path.exists():
                source = work / f"{name}-f16.gguf"
                if not source.exists():
                    write_f16(source, shape)
                params = llama_cpp.llama_model_quantize_default_params()
                params.ftype = ftype
                params.pure = True
                failed = llama_cpp.llama_model_quantize(
                    str(source).encode(), str(path).encode(), ctypes.byref(params)
                )
                assert failed == 0, path
            yield name, kind, path


def anemone_folders(work):
    """The model folders, made where they are missing, and the program that runs them."""
    convert = ROOT / "target/release/anemone-convert"
    tokenizer = ROOT.parent / "shared/fixtures/qwen3-tokenizer"
    for name, shape in SHAPES.items():
        folder = work / f"{name}-folder"
        if not folder.exists():
            checkpoint, store = work / f"{name}-checkpoint", work / f"{name}-store"
            run = lambda *args: subprocess.run([convert, *map(str, args)], check=True)
            if not checkpoint.exists():
                run("synth", "--like", name, "--layers", shape[0], "--tokenizer", tokenizer,
                    "-o", checkpoint)
            run("quantize", checkpoint, "-o", store, "--method", "kmeans-unweighted",
                "--tokens", 256, "--window", 256)
            run("target", store, "-o", folder, "--max-context", 512)
        yield name, folder


def memory(kind):
    """Resident kilobytes of this process: `VmRSS`, `RssAnon` or `RssFile`."""
    for line in open("/proc/self/status"):
        if line.startswith(kind + ":"):
            return int(line.split()[1])
    return 0


def llama_times(path, threads, repeat):
    """Milliseconds by rows, and megabytes resident after them; in a process of its own."""
    clock = time.process_time if threads == 1 else time.perf_counter
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 512
    params.n_batch = params.n_ubatch = FILLED
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    memory_of = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(FILLED, 0, 1)

    def decode(first, rows, every):
        batch.n_tokens = rows
        for i in range(rows):
            batch.token[i] = (first + i) * 7919 % 1000
            batch.pos[i] = first + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == rows - 1
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_synchronize(context)

    decode(0, FILLED, False)
    times = {}
    for rows in (1, 16, 64):
        best = float("inf")
        for _ in range(repeat):
            start = clock()
            # A verify call needs all logits, as Anemone's calls give them.
            decode(FILLED, rows, True)
            best = min(best, clock() - start)
            llama_cpp.llama_memory_seq_rm(memory_of, 0, FILLED, -1)
        times[rows] = best * 1e3
    return {"times": times, "megabytes": memory("VmRSS") / 1024}


def anemone_times(folder, threads, repeat):
    program = ROOT / "target/release/anemone"
    command = [program, "bench", "--profile", "--json", "--model", folder,
               "--threads", threads, "-p", FILLED, "-r", repeat]
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True)
    report = json.loads(done.stdout)
    times = {call["rows"]: call["milliseconds"] for call in report["calls"]}
    # Memory without the buffer that the limits are measured with: a plain run.
    command = [program, "bench", "--json", "--model", folder, "--threads", threads,
               "-p", FILLED, "-n", 4, "-r", 1]
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True)
    peak = json.loads(done.stdout)["peak_rss_bytes"] / 2**20
    return {"times": times, "megabytes": peak}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(llama_times(args.one, args.threads, args.repeat)))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    models, folders = list(llama_models(args.work)), dict(anemone_folders(args.work))
    best = {}

    def take(key, result):
        old = best.setdefault(key, result)
        for rows, value in result["times"].items():
            rows = int(rows)
            old["times"][rows] = min(old["times"].get(rows, value), value)

    for _ in range(args.turns):
        for name, folder in folders.items():
            take((name, "anemone"), anemone_times(folder, args.threads, args.repeat))
        for name, kind, path in models:
            command = [sys.executable, __file__, "--work", args.work, "--one", path,
                       "--threads", args.threads, "--repeat", args.repeat]
            done = subprocess.run([str(c) for c in command], check=True, capture_output=True)
            result = json.loads(done.stdout.splitlines()[-1])
            result["times"] = {int(rows): value for rows, value in result["times"].items()}
            take((name, kind), result)
    print("| model | program | 1 row, ms | 16 rows, ms | 64 rows, ms | MB |")
    print("|---|---|---:|---:|---:|---:|")
    for (name, kind), result in sorted(best.items()):
        times = " | ".join(f"{result['times'][rows]:.1f}" for rows in (1, 16, 64))
        print(f"| {name} | {kind} | {times} | {result['megabytes']:.0f} |")


if __name__ == "__main__":
    main()
