//! Tests of the container as a whole: what is written is what is read, and no
//! file makes the decoder do anything but answer.

mod check;
mod hostile;
mod refused;
mod round_trip;
mod summary;

use super::build::{GraphBuilder, Input};
use super::encode::encode;
use super::ir::{Backing, Elem, Module, TensorType};

fn tensor(elem: Elem, shape: &[usize]) -> Input {
    Input::Tensor(TensorType::new(elem, shape))
}

fn bytes_of(m: &Module) -> Vec<u8> {
    let mut out = vec![];
    encode(m, &mut out).unwrap();
    out
}

/// A program with a bit of everything.
fn sampler() -> Module {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "helper", &[("x", tensor(Elem::F16, &[4, 64]))]);
    g.set_private();
    let weights: Vec<f32> = (0..256).map(|i| i as f32 / 16.0).collect();
    let w = g.f16s(&weights, &[4, 64]);
    let y = g.binary("mul", g.arg(0), w);
    g.finish(&[("y", y)], &[]);

    let kv = TensorType::new(Elem::F16, &[1, 2, 32, 16]);
    let mut g = GraphBuilder::new(
        &mut m,
        "step",
        &[
            ("k_cache", Input::State(kv)),
            ("k_new", tensor(Elem::F16, &[1, 2, 1, 16])),
            ("pos", tensor(Elem::Si32, &[1])),
            ("x", tensor(Elem::F16, &[4, 64])),
        ],
    );
    let (zero, one) = (g.i32s(&[0]), g.i32s(&[1]));
    let (heads, width) = (g.i32s(&[2]), g.i32s(&[16]));
    let next = g.binary("add", g.arg(2), one);
    let start = g.concat(0, &[zero, zero, g.arg(2), zero]);
    let end = g.concat(0, &[one, heads, next, width]);
    let token = g.token();
    let (old, token) = g.read_handle(g.arg(0), token);
    let new = g.slice_update(old, start, end, g.arg(1));
    let token = g.write_handle(g.arg(0), new, token);
    let indices: Vec<u8> = (0..1024u32).map(|i| (i * 7) as u8).collect();
    let indices = g.constant(TensorType::new(Elem::Ui4, &[32, 64, 1, 1]), &indices);
    let table: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let table = g.f16s(&table, &[4, 1, 1, 1, 16, 1]);
    let w = g.lut_to_dense(indices, table, 0);
    let called = g.invoke("helper", &[g.arg(3)])[0];
    let image = g.reshape(called, &[4, 64, 1, 1]);
    let y = g.conv1x1(image, w);
    let y = g.silu(y);
    let y = g.softmax(y, 1);
    let best = g.argmax(y, 1);
    let hw = g.hw_constraints(Backing::MtlBuffer, &[1, 1, 1, 1, 64], &[1, 8, 1, 1]);
    let laid_out = g.copy_with_constraints(y, hw);
    let y = g.copy_discarding_constraints(laid_out);
    g.finish(&[("y", y), ("best", best)], &[token]);
    m
}

/// `f(x: f32[2]) -> y = silu(x)` of another writer, byte by byte and proven on
/// Apple's loader.
fn annotated_file() -> Vec<u8> {
    let text = "
        4d 4c ef 52 0d  4d 4c 49 52 32 32 2e 30 2e 30 67 69 74 00
        01 1b  03  1b  07 03 05  0b  01 0b  1f 23 27 2b 2f
        03 35  23 07  01 23  13 1b 07 17 13 0b 13 0f 0f 0b 0b 0b 0b 13 0f 0f 1f
               01 07  07 13 17
        02 87  3d 01 03 03  3f 01 01 01 01 01  5d  51 03 05 01 01  05 03 01 00
               03 05  13 07 03 0b  0b 03 0d  0b 03 0f  09 05  03 09  0b 01
               03 0b  13 07 03 19  0b 03 1b  0b 03 1d  05 41 01 a8 bb a4 26
               0d  05 03 09 01  3d 03 03 03 03
        04 69  05  01 50 07 01  07 04 59  03 01  05  03 50 07 03  07 04 45
               03 05  0b 03 07 07 00
               05 16 07 03 03 03 01 07 04 19 03 03 07 03 07 07 00 07 04 07 03 01
               09 04 07 03 03
        06 03  01
        00 f9  19  27 25 11 25 29 0f 05 05 19 05 03 05";
    let mut bytes: Vec<u8> = text
        .split_whitespace()
        .map(|b| u8::from_str_radix(b, 16).unwrap())
        .collect();
    bytes.extend_from_slice(
        b"-\0\0x\0aicode.name\0f\0y\0aicode\0serialization.asset\0dataflow.graph_v1\0\
          silu_v1\0dataflow.yield_v1\0dataflow.output_v1\0",
    );
    bytes.extend_from_slice(&[
        0x08, 0x1d, 0x05, 0x05, 0x01, 0x43, 0x13, 0x11, 0x01, 0x09, 0x13, 0x09, 0x15, 0x09, 0x17,
        0x1f, 0x05, 0x01,
    ]);
    bytes
}
