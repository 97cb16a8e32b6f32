"""Runs functions of one .aimodel with Apple's Core AI runtime.

usage: run_program.py ASSET REQUEST RESPONSE

REQUEST and RESPONSE are safetensors files: eight bytes of header length, a JSON
header, raw little-endian tensors. The metadata entry `job` of the request is
{calls, filling, fillers}. A call is {function, inputs: {name: tensor},
states: {name: tensor}, carried: {name: [call, output]}}; `fillers` says which
function of the program `filling` fills which state, as "function/state", and has
the states with hardware constraints. The job of the response says what was loaded.

States live on by name from call to call. One that no call has set starts as
zeros.
"""

import asyncio
import contextlib
import ctypes
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


class DLTensor(ctypes.Structure):
    """The head of a DLPack tensor (dlpack.h, version 0.8)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def interleaved(value, dtype):
    """A copy of a cache `[L, 1, K, 1, C]` with n channels interleaved, row-major.

    numpy() refuses or misreads such memory, but DLPack gives a copy of it with its
    strides, n the last of them. Element (l, k, c) is at

        l * strides[0] + k // n * strides[2] + c * n + k % n
    """
    capsule = value._tensor.to_dlpack().__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    head = DLTensor.from_address(pointer(capsule, b"dltensor"))
    shape, strides = list(head.shape[: head.ndim]), list(head.strides[: head.ndim])
    lanes = strides[-1]
    if len(shape) != 5 or shape[2] % lanes:
        sys.exit(f"a state {shape} with strides {strides} is not an interleaved cache")
    split = [shape[0], 1, shape[2] // lanes, lanes, 1, shape[4]]
    steps = [strides[0], strides[1], strides[2], 1, strides[3], lanes]
    size = 1 + sum((n - 1) * s for n, s in zip(split, steps))
    dtype = np.dtype(dtype)
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(
        head.data + head.byte_offset
    )
    steps = [s * dtype.itemsize for s in steps]
    flat = np.frombuffer(memory, dtype)
    return np.array(np.lib.stride_tricks.as_strided(flat, split, steps)).reshape(shape)


async def state(descriptor, filler, values):
    """A state with these values, or zeros. One with hardware constraints must have
    memory made from its descriptor, which only a program can fill."""
    if values is None:
        values = np.zeros(descriptor.shape, descriptor.dtype)
    value = NDArray(values)
    if filler is None:
        return value
    made = NDArray.from_descriptor(filler.desc.state_descriptor("state"))
    await filler({"value": value}, {"state": made})
    return made


async def main(asset_path, request_path, response_path):
    request, tensors = read(request_path)
    calls, fillers = request["calls"], request["fillers"]
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
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(asset.executable())
        if fillers:
            filling = AIModelAsset.load(request["filling"]).executable()
            filling = await stack.enter_async_context(filling)
        for i, call in enumerate(calls):
            function = model.load_function(call["function"])
            inputs = {n: NDArray(tensors[t]) for n, t in call["inputs"].items()}
            for name, (earlier, output) in call["carried"].items():
                inputs[name] = kept[earlier][output]
            by = {n: fillers.get(f"{call['function']}/{n}") for n in function.desc.state_names}
            for name, filler in by.items():
                given = call["states"].get(name)
                if given is not None or name not in states:
                    states[name] = await state(
                        function.desc.state_descriptor(name),
                        filler and filling.load_function(filler),
                        None if given is None else tensors[given],
                    )
            mine = {n: states[n] for n in function.desc.state_names}
            outputs = await function(inputs, mine)
            kept.append(outputs)
            entry = {"outputs": [], "states": []}
            for kind, values in (("outputs", outputs), ("states", mine)):
                for name, value in sorted(values.items()):
                    if kind == "outputs" and (i, name) in carried:
                        continue
                    key = f"{i}/{kind}/{name}"
                    if kind == "states" and by[name]:
                        descriptor = function.desc.state_descriptor(name)
                        results[key] = interleaved(value, descriptor.dtype)
                    else:
                        results[key] = array(value)
                    entry[kind].append([name, key])
            job["calls"].append(entry)
    write(response_path, job, results)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
