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


# Axis whose channels a hardware constraint on a cache interleaves.
INTERLEAVED = 2


def lanes(value):
    """The elements of an NDArray in their place. Where channels are interleaved,
    the strides numpy is given are those of whole groups of channels, and its view
    is wrong and out of bounds; here a last axis runs over the group."""
    a = value.numpy()
    width = a.strides[-1] // a.itemsize if a.ndim else 1
    if width <= 1:
        return a
    shape = list(a.shape) + [width]
    shape[INTERLEAVED] //= width
    return np.lib.stride_tricks.as_strided(a, shape, a.strides + (a.itemsize,))


def array(value):
    """A copy of an NDArray; bfloat16, which numpy lacks, widens to float32."""
    a = lanes(value)
    if a.ndim > len(value.shape):
        a = np.moveaxis(a, -1, INTERLEAVED + 1).reshape(tuple(value.shape))
    return a.astype(np.float32) if a.dtype.name == "bfloat16" else np.array(a)


def state(descriptor, contents):
    """A state that holds `contents`, or zeros. Its memory is made from the
    descriptor, which alone knows the layout, and would hold anything."""
    value = NDArray.from_descriptor(descriptor)
    a = lanes(value)
    if contents is None:
        a[...] = 0
    elif a.ndim == contents.ndim:
        a[...] = contents
    else:
        shape = list(contents.shape)
        shape[INTERLEAVED : INTERLEAVED + 1] = [a.shape[INTERLEAVED], a.shape[-1]]
        a[...] = np.moveaxis(contents.reshape(shape), INTERLEAVED + 1, -1)
    return value


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
            for name in function.desc.state_names:
                given = call["states"].get(name)
                if given is not None or name not in states:
                    contents = None if given is None else tensors[given]
                    states[name] = state(function.desc.state_descriptor(name), contents)
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
