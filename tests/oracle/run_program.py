"""Runs functions of one .aimodel with Apple's Core AI runtime.

usage: run_program.py ASSET REQUEST RESPONSE

REQUEST and RESPONSE are safetensors files: eight bytes of header length, a JSON
header, raw little-endian tensors. The metadata entry `job` of the request is a
JSON list of calls {function, inputs: {name: tensor}, states: {name: tensor},
carried: {name: [call, output]}}; that of the response says what was loaded.

States live on by name from call to call. One that no call has set starts as
zeros.
"""

import asyncio
import json
import os
import sys

import numpy as np
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray

DTYPES = {
    "BOOL": np.bool_, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
}
NAMES = {np.dtype(v): k for k, v in DTYPES.items()}


def read(path):
    with open(path, "rb") as f:
        data = f.read()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    job = json.loads(header.pop("__metadata__")["job"])
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + size + o for o in entry["data_offsets"])
        flat = np.frombuffer(data[start:end], DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).copy()
    return job, tensors


def write(path, job, tensors):
    header, blobs, at = {"__metadata__": {"job": json.dumps(job)}}, [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(blob)],
        }
        blobs.append(blob)
        at += len(blob)
    head = json.dumps(header).encode()
    partial = path + ".partial"
    with open(partial, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head + b"".join(blobs))
    os.rename(partial, path)


def array(value):
    """A copy of an NDArray; bfloat16, which numpy lacks, widens to float32."""
    a = value.numpy()
    return a.astype(np.float32) if a.dtype.name == "bfloat16" else np.array(a)


def blank(descriptor):
    """A state of zeros. Memory made from the descriptor would hold anything, and
    cannot be cleared through numpy; so states with hardware constraints, which
    only such memory can bind, are refused by the call."""
    return NDArray(np.zeros(descriptor.shape, descriptor.dtype))


async def main(asset_path, request_path, response_path):
    calls, tensors = read(request_path)
    asset = AIModelAsset.load(asset_path)
    if asset.program._module.verify() is False:
        sys.exit("the program does not verify")
    summary = asset.summary(include_statistics=False)
    job = {
        "functions": list(summary.function_names),
        "compatibility": summary._compatibility_version,
        "calls": [],
    }
    # What is carried on may be laid out by a hardware constraint, which numpy
    # misreads, even out of bounds.
    carried = {tuple(c) for call in calls for c in call["carried"].values()}
    results, kept, states = {}, [], {}
    async with asset.executable() as model:
        for i, call in enumerate(calls):
            function = model.load_function(call["function"])
            inputs = {n: NDArray(tensors[t]) for n, t in call["inputs"].items()}
            for name, (earlier, output) in call["carried"].items():
                inputs[name] = kept[earlier][output]
            for name, t in call["states"].items():
                states[name] = NDArray(tensors[t])
            for name in function.desc.state_names:
                if name not in states:
                    states[name] = blank(function.desc.state_descriptor(name))
            mine = {n: states[n] for n in function.desc.state_names}
            outputs = await function(inputs, mine)
            kept.append(outputs)
            entry = {"outputs": [], "states": []}
            for kind, values in (("outputs", outputs), ("states", mine)):
                for name, value in sorted(values.items()):
                    if kind == "outputs" and (i, name) in carried:
                        continue
                    key = f"{i}/{kind}/{name}"
                    results[key] = array(value)
                    entry[kind].append([name, key])
            job["calls"].append(entry)
    write(response_path, job, results)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
