//! Tests of the container as a whole: what is written is what is read, and no
//! file makes the decoder do anything but answer.

use proptest::prelude::*;

use super::build::{Bound, Conv2d, GraphBuilder, Input, Padding, Scatter};
use super::check::check;
use super::decode::{Problem, decode_bytes};
use super::encode::encode;
use super::ir::{
    Attr, AttrId, Backing, Blob, BlobData, Elem, Module, Op, Region, TensorType, Type, ValueId,
};
use super::same::difference;
use super::text::{TextOptions, to_text};

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

#[test]
fn a_decoded_program_is_the_one_encoded() {
    let m = sampler();
    check(&m).unwrap();
    let bytes = bytes_of(&m);
    let back = decode_bytes(&bytes).unwrap();
    check(&back).unwrap();
    assert_eq!(difference(&m, &back), None);
    assert_eq!(bytes_of(&back), bytes, "the bytes are stable");
}

#[test]
fn a_difference_anywhere_is_found() {
    let a = sampler();
    let mut b = sampler();
    let graph = b.graph("step").unwrap();
    let op = b.region(graph.region).ops[3];
    b.op_mut(op).name.push('x');
    assert!(difference(&a, &b).is_some());
    let mut b = sampler();
    let key = b.blobs()[0].key.clone();
    b.intern_blob(&[1, 2, 3]);
    assert_eq!(difference(&a, &b), None, "an unused blob is no part of it");
    assert!(!key.is_empty());
}

/// The file of `FORMAT.md` section 10, written by another writer and proven on
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

#[test]
fn the_annotated_file_of_the_specification_decodes() {
    let bytes = annotated_file();
    assert_eq!(bytes.len(), 332);
    let m = decode_bytes(&bytes).unwrap();
    check(&m).unwrap();
    let everything = TextOptions {
        decompositions: true,
        max_elements: 0,
    };
    assert_eq!(
        to_text(&m, &everything),
        "module {version = 20260317} {\n  \
           graph @f(%0 \"x\": tensor<2xf32>) -> (\"y\": tensor<2xf32>) {\n    \
             %1 = silu_v1 %0 : tensor<2xf32> {\n    \
             ^(%0: tensor<2xf32>):\n      \
               dataflow.yield_v1 %0\n    \
             }\n    \
             dataflow.output_v1 %1\n  \
           }\n\
         }\n"
    );
    // Ours numbers the same entries in another order.
    let again = bytes_of(&m);
    assert_eq!(again.len(), bytes.len());
    assert_eq!(difference(&m, &decode_bytes(&again).unwrap()), None);
}

#[test]
fn the_feature_version_is_that_of_the_newest_operation() {
    let version = |build: &dyn Fn(&mut GraphBuilder) -> ValueId| {
        let mut m = Module::default();
        let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F32, &[2, 4]))]);
        let y = build(&mut g);
        g.finish(&[("y", y)], &[]);
        decode_bytes(&bytes_of(&m)).unwrap().version.unwrap()
    };
    assert_eq!(
        version(&|g| g.binary("add", g.arg(0), g.arg(0))),
        20_250_707
    );
    assert_eq!(
        version(&|g| g.binary("mul", g.arg(0), g.arg(0))),
        20_250_717
    );
    assert_eq!(version(&|g| g.transpose(g.arg(0), &[1, 0])), 20_250_811);
    assert_eq!(version(&|g| g.silu(g.arg(0))), 20_260_204);
    assert_eq!(version(&|g| g.reduce_mean(g.arg(0), &[1])), 20_260_317);
}

#[test]
fn operations_known_by_name_only_pass_through() {
    let mut m = Module::default();
    let g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F32, &[2]))]);
    let x = g.arg(0);
    let graph = g.finish(&[("y", x)], &[]);
    let region = m.op(graph).regions[0];
    let (ty, loc) = (m.value_type(x), m.op(graph).loc);
    let result = m.add_value(ty);
    let op = m.add_op(Op {
        name: "primitive.unheard_of_v9".into(),
        operands: vec![x],
        results: vec![result],
        props: vec![],
        regions: vec![],
        loc,
    });
    m.region_mut(region).ops.insert(0, op);
    let back = decode_bytes(&bytes_of(&m)).unwrap();
    assert_eq!(difference(&m, &back), None);
    // Nothing is known about when it came, so the newest reader is asked for.
    assert_eq!(back.version, Some(20_260_409));
}

#[test]
fn only_what_is_reached_is_written() {
    let mut m = Module::default();
    m.add_attr(Attr::String("forgotten".into()));
    m.add_blob(Blob {
        key: "unused".into(),
        data: BlobData::Bytes(vec![7; 5000]),
    });
    let g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F32, &[2]))]);
    let x = g.arg(0);
    g.finish(&[("y", x)], &[]);
    let bytes = bytes_of(&m);
    assert!(bytes.len() < 400);
    assert!(!bytes.windows(9).any(|w| w == b"forgotten"));
}

#[test]
fn equal_constants_are_one_value_and_equal_blobs_are_stored_once() {
    let mut m = Module::default();
    let weights: Vec<f32> = (0..100).map(|i| i as f32).collect();
    for name in ["a", "b"] {
        let mut g = GraphBuilder::new(&mut m, name, &[("x", tensor(Elem::F16, &[100]))]);
        let w = g.f16s(&weights, &[100]);
        assert_eq!(w, g.f16s(&weights, &[100]));
        let y = g.binary("add", g.arg(0), w);
        g.finish(&[("y", y)], &[]);
    }
    assert_eq!(m.blobs().len(), 1);
    let back = decode_bytes(&bytes_of(&m)).unwrap();
    assert_eq!(back.blobs().len(), 1);
}

#[test]
fn blobs_come_from_files_and_lie_aligned() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w");
    let bytes: Vec<u8> = (0..300u32).map(|i| i as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let mut m = Module::default();
    let blob = m.add_blob(Blob {
        key: "w".into(),
        data: BlobData::File {
            path: path.clone(),
            offset: 44,
            len: 256,
        },
    });
    let mut g = GraphBuilder::new(&mut m, "f", &[]);
    let w = g.constant_blob(TensorType::new(Elem::Si8, &[256]), blob);
    let v = g.constant(
        TensorType::new(Elem::Ui3, &[24]),
        &[9, 8, 7, 6, 5, 4, 3, 2, 1],
    );
    g.finish(&[("w", w), ("v", v)], &[]);
    let file = bytes_of(&m);
    let back = decode_bytes(&file).unwrap();
    assert_eq!(back.blobs()[0].bytes(), Some(&bytes[44..]));
    for blob in back.blobs() {
        let data = blob.bytes().unwrap();
        let at = file.windows(data.len()).position(|w| w == data).unwrap();
        assert_eq!(at % 16, 0);
    }
    std::fs::write(&path, [0; 10]).unwrap();
    let error = encode(&m, &mut vec![]).unwrap_err().to_string();
    assert!(error.contains("blob `w`"), "{error}");
}

// ---- hostile files

fn problem(bytes: &[u8]) -> Problem {
    decode_bytes(bytes).unwrap_err().problem
}

#[test]
fn other_files_and_versions_are_refused() {
    let good = annotated_file();
    assert_eq!(problem(b"PK\x03\x04"), Problem::Magic);
    assert_eq!(problem(&[]), Problem::Magic);
    let mut newer = good.clone();
    newer[4] = 0x0f;
    assert!(matches!(problem(&newer), Problem::Version { found: 7, .. }));
    let mut dialect = good.clone();
    assert_eq!(dialect[25], 0x05);
    dialect[25] = 0x07;
    assert!(matches!(
        problem(&dialect),
        Problem::Version { found: 3, .. }
    ));
    let mut trailing = good.clone();
    trailing.push(0x09);
    assert!(decode_bytes(&trailing).is_err());
    let mut twice = good;
    twice.extend_from_slice(&[0x05, 0x01]);
    assert_eq!(problem(&twice), Problem::Section(5));
}

#[test]
fn every_truncation_is_an_error() {
    for bytes in [annotated_file(), bytes_of(&sampler())] {
        for len in 0..bytes.len() {
            assert!(decode_bytes(&bytes[..len]).is_err(), "cut at {len}");
        }
    }
}

/// Replaces an attribute entry of the annotated file by another of equal length.
fn with_patch(at: &[u8], by: &[u8]) -> Vec<u8> {
    let mut bytes = annotated_file();
    let start = bytes.windows(at.len()).position(|w| w == at).unwrap();
    bytes[start..start + by.len()].copy_from_slice(by);
    bytes
}

#[test]
fn attributes_that_contain_themselves_are_refused() {
    // Array #7 = [#6] becomes [#7], then [#8], which is [#7].
    let cycle = Problem::Cycle("an attribute");
    assert_eq!(
        problem(&with_patch(&[0x0b, 0x03, 0x0d], &[0x0b, 0x03, 0x0f])),
        cycle
    );
    assert_eq!(
        problem(&with_patch(&[0x0b, 0x03, 0x0d], &[0x0b, 0x03, 0x11])),
        cycle
    );
    assert!(matches!(
        problem(&with_patch(&[0x0b, 0x03, 0x0d], &[0x0b, 0x03, 0xfd])),
        Problem::Index { index: 126, .. }
    ));
}

#[test]
fn two_blobs_with_one_key_are_refused() {
    let mut m = Module::default();
    for (name, fill) in [("aa", 1), ("ab", 2)] {
        let blob = m.add_blob(Blob {
            key: name.into(),
            data: BlobData::Bytes(vec![fill; 3]),
        });
        let mut g = GraphBuilder::new(&mut m, name, &[]);
        let w = g.constant_blob(TensorType::new(Elem::Si8, &[3]), blob);
        g.finish(&[("w", w)], &[]);
    }
    let mut bytes = bytes_of(&m);
    decode_bytes(&bytes).unwrap();
    // The function and the blob share the string, so both are renamed.
    let at = bytes.windows(3).position(|w| w == b"ab\0").unwrap();
    bytes[at + 1] = b'a';
    assert_eq!(problem(&bytes), Problem::DuplicateKey("aa".into()));
}

#[test]
fn a_chain_of_attributes_deeper_than_the_bound_is_refused() {
    let nested = |depth: usize| {
        let mut m = Module::default();
        let mut at = m.add_attr(Attr::Unit);
        for _ in 0..depth {
            at = m.add_attr(Attr::Array(vec![at]));
        }
        let g = GraphBuilder::new(&mut m, "f", &[]);
        g.finish(&[], &[]);
        m.loc = Some(at);
        bytes_of(&m)
    };
    assert!(decode_bytes(&nested(100)).is_ok());
    assert!(matches!(problem(&nested(1000)), Problem::TooLarge { .. }));
}

#[test]
fn regions_nested_deeper_than_the_bound_are_refused() {
    let nested = |depth: usize| {
        let mut m = Module::default();
        let loc = m.unknown_loc();
        let op = |m: &mut Module, name: &str, regions| {
            m.add_op(Op {
                name: name.into(),
                operands: vec![],
                results: vec![],
                props: vec![],
                regions,
                loc,
            })
        };
        let g = GraphBuilder::new(&mut m, "f", &[]);
        let graph = g.finish(&[], &[]);
        let mut inner = op(&mut m, "dataflow.yield_v1", vec![]);
        for _ in 0..depth {
            let region = m.add_region(Region {
                ops: vec![inner],
                ..Region::default()
            });
            inner = op(&mut m, "nest", vec![region]);
        }
        let body = m.op(graph).regions[0];
        m.region_mut(body).ops.insert(0, inner);
        bytes_of(&m)
    };
    assert!(decode_bytes(&nested(40)).is_ok());
    assert!(matches!(problem(&nested(500)), Problem::TooLarge { .. }));
}

#[test]
fn printing_is_bounded_where_entries_are_shared() {
    // Each array holds the one before twice: 2^60 leaves if spelled out.
    let mut m = Module::default();
    let mut at = m.add_attr(Attr::Unit);
    for _ in 0..60 {
        at = m.add_attr(Attr::Array(vec![at, at]));
    }
    let g = GraphBuilder::new(&mut m, "f", &[]);
    let graph = g.finish(&[], &[]);
    m.op_mut(graph).props.insert(1, ("compositeDecl", at));
    assert!(to_text(&m, &TextOptions::default()).len() < 10_000);
    let back = decode_bytes(&bytes_of(&m)).unwrap();
    assert_eq!(difference(&m, &back), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn mutated_files_are_answered(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = bytes_of(&sampler());
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(m) = decode_bytes(&bytes) {
            // What decodes can be checked, printed, written and read again.
            let _ = check(&m);
            to_text(&m, &TextOptions { decompositions: true, max_elements: 64 });
            let mut out = vec![];
            if encode(&m, &mut out).is_ok() {
                prop_assert_eq!(difference(&m, &decode_bytes(&out).unwrap()), None);
            }
        }
    }

    #[test]
    fn random_attributes_survive(program in arb_attrs()) {
        let mut m = Module::default();
        let f16 = m.add_type(Type::Elem(Elem::F16));
        let mut made: Vec<AttrId> = vec![m.add_attr(Attr::Unit)];
        for (kind, number, text, picks) in program {
            let items: Vec<AttrId> = picks.iter().map(|p| made[p.index(made.len())]).collect();
            let first = items.first().copied().unwrap_or(made[0]);
            let attr = match kind {
                0 => Attr::String(text),
                1 => Attr::Integer { bits: 64, unsigned: number % 2 == 0, value: number },
                2 => Attr::Integer { bits: 8, unsigned: false, value: i64::from(number as i8) },
                3 => Attr::Float { bits: 32, raw: u64::from(number as u32) },
                4 => Attr::Float { bits: 64, raw: number as u64 },
                5 => Attr::Array(items),
                6 => Attr::Opaque { name: text, items },
                7 => Attr::Dictionary(items),
                8 => Attr::Dense { splat: number % 2 == 0, bytes: text.into_bytes() },
                9 => Attr::SymbolRef(vec![text, String::new()]),
                10 => Attr::ParamConstant { value: first, ty: f16 },
                11 => Attr::Metadata { name: text, data: first },
                12 => Attr::Location { source: first, scope: first, fused: items, metadata: vec![first] },
                13 => Attr::HwConstraints {
                    alignments: vec![number, 1],
                    interleave: vec![1],
                    backing: Backing::Heap,
                },
                _ => Attr::ParamDecl { name: text, ty: f16 },
            };
            made.push(m.add_attr(attr));
        }
        let g = GraphBuilder::new(&mut m, "f", &[]);
        let graph = g.finish(&[], &[]);
        let all = m.add_attr(Attr::Array(made));
        m.op_mut(graph).props.insert(1, ("compositeDecl", all));
        let back = decode_bytes(&bytes_of(&m)).unwrap();
        prop_assert_eq!(difference(&m, &back), None);
    }
}

type RandomAttr = (u8, i64, String, Vec<prop::sample::Index>);

fn arb_attrs() -> impl Strategy<Value = Vec<RandomAttr>> {
    let one = (
        0u8..15,
        any::<i64>(),
        "[a-zé\" ]{0,12}",
        prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    );
    prop::collection::vec(one, 0..60)
}

// ---- wrong programs

/// What the checker says of a program that `build` makes with one change.
fn refusal(change: impl FnOnce(&mut Module)) -> String {
    let mut m = sampler();
    change(&mut m);
    check(&m).unwrap_err().to_string()
}

/// The `n`-th operation called `name` of function `step`.
fn find(m: &Module, name: &str) -> super::ir::OpId {
    let body = m.graph("step").unwrap().region;
    let ops = &m.region(body).ops;
    *ops.iter().find(|&&op| m.op(op).name == name).unwrap()
}

#[test]
fn a_wrong_program_is_refused_with_function_operation_and_reason() {
    let said = refusal(|m| {
        let op = find(m, "primitive.conv2d_v1");
        let result = m.op(op).results[0];
        let ty = m.add_type(Type::Tensor(TensorType::new(Elem::F16, &[4, 31, 1, 1])));
        let other = m.add_value(ty);
        let body = m.graph("step").unwrap().region;
        m.op_mut(op).results[0] = other;
        for op in m.region(body).ops.clone() {
            for v in &mut m.op_mut(op).operands {
                if *v == result {
                    *v = other;
                }
            }
        }
    });
    assert!(said.contains("function `step`, operation"), "{said}");
    assert!(said.contains("(`primitive.conv2d_v1`)"), "{said}");
    assert!(
        said.contains("result 0 is tensor<4x31x1x1xf16>, expected tensor<4x32x1x1xf16>"),
        "{said}"
    );

    let said = refusal(|m| {
        let op = find(m, "silu_v1");
        m.op_mut(op).regions.clear();
    });
    assert!(said.contains("has 0 regions, expected one"), "{said}");

    let said = refusal(|m| {
        let body = m.graph("step").unwrap().region;
        m.region_mut(body).ops.pop();
    });
    assert!(said.contains("not describe a graph"), "{said}");

    let said = refusal(|m| {
        let silu = find(m, "silu_v1");
        let body = m.graph("step").unwrap().region;
        let ops = &mut m.region_mut(body).ops;
        let at = ops.iter().position(|&op| op == silu).unwrap();
        ops.swap(at - 1, at);
    });
    assert!(said.contains("not defined before"), "{said}");

    let said = refusal(|m| {
        let op = find(m, "dataflow.invoke_v1");
        let symbol = m.add_attr(Attr::SymbolRef(vec!["nobody".into()]));
        let ty = m.add_type(Type::ParamSymbol);
        let callee = m.add_attr(Attr::ParamConstant { value: symbol, ty });
        m.op_mut(op).props[1].1 = callee;
    });
    assert!(said.contains("no function `nobody`"), "{said}");

    let said = refusal(|m| {
        let op = find(m, "primitive.constant_v1");
        let short = m.add_attr(Attr::Dense {
            splat: false,
            bytes: vec![0; 3],
        });
        m.op_mut(op).props[0].1 = short;
    });
    assert!(said.contains("holds 4 bytes, 3 are given"), "{said}");
}

fn state_graph(outputs: impl FnOnce(&mut GraphBuilder) -> Vec<ValueId>) -> Result<(), String> {
    let mut m = Module::default();
    let state = Input::State(TensorType::new(Elem::F16, &[4]));
    let mut g = GraphBuilder::new(&mut m, "f", &[("a", state.clone()), ("b", state)]);
    let tokens = outputs(&mut g);
    g.finish(&[], &tokens);
    check(&m).map_err(|e| e.to_string())
}

#[test]
fn states_need_their_own_chains_of_tokens_in_order() {
    fn touch(g: &mut GraphBuilder, i: usize) -> ValueId {
        let token = g.token();
        let (x, token) = g.read_handle(g.arg(i), token);
        g.write_handle(g.arg(i), x, token)
    }
    state_graph(|g| vec![touch(g, 0), touch(g, 1)]).unwrap();
    let said = state_graph(|g| vec![touch(g, 0)]).unwrap_err();
    assert!(
        said.contains("takes 2 states and returns 1 tokens"),
        "{said}"
    );
    let said = state_graph(|g| vec![touch(g, 1), touch(g, 0)]).unwrap_err();
    assert!(said.contains("belongs to another state"), "{said}");
    let said = state_graph(|g| {
        let token = g.token();
        let (x, first) = g.read_handle(g.arg(0), token);
        let a = g.write_handle(g.arg(0), x, first);
        g.write_handle(g.arg(0), x, first);
        vec![a, touch(g, 1)]
    })
    .unwrap_err();
    assert!(said.contains("follow the same token"), "{said}");
}

#[test]
fn functions_that_call_in_a_circle_are_refused() {
    let mut m = Module::default();
    for (name, callee) in [("a", None), ("b", Some("a"))] {
        let mut g = GraphBuilder::new(&mut m, name, &[("x", tensor(Elem::F32, &[2]))]);
        let y = match callee {
            Some(callee) => g.invoke(callee, &[g.arg(0)])[0],
            None => g.arg(0),
        };
        g.finish(&[("y", y)], &[]);
    }
    check(&m).unwrap();
    // Let `b`, once called `a` too, call itself.
    let b = m.graphs[1];
    let call = m.region(m.op(b).regions[0]).ops[0];
    let symbol = m.add_attr(Attr::SymbolRef(vec!["b".into()]));
    let ty = m.add_type(Type::ParamSymbol);
    let callee = m.add_attr(Attr::ParamConstant { value: symbol, ty });
    m.op_mut(call).props[1].1 = callee;
    let said = check(&m).unwrap_err().to_string();
    assert!(said.contains("reaches itself"), "{said}");
}

#[test]
#[should_panic(expected = "`primitive.add_v1` shapes [2, 4] and [4, 2] differ")]
fn building_a_wrong_operation_panics_with_its_name() {
    let mut m = Module::default();
    let inputs = [
        ("x", tensor(Elem::F16, &[2, 4])),
        ("y", tensor(Elem::F16, &[4, 2])),
    ];
    let mut g = GraphBuilder::new(&mut m, "f", &inputs);
    g.binary("add", g.arg(0), g.arg(1));
}

/// Shapes as numpy or the specification gives them.
#[test]
fn result_shapes_are_inferred() {
    let mut m = Module::default();
    let inputs = [
        ("x", tensor(Elem::F16, &[2, 3, 4])),
        ("y", tensor(Elem::F16, &[4, 5])),
        ("i", tensor(Elem::Si32, &[7, 1])),
        ("image", tensor(Elem::F16, &[1, 8, 5, 7])),
        ("w", tensor(Elem::F16, &[6, 4, 2, 3])),
        ("n", tensor(Elem::Si32, &[3])),
    ];
    let mut g = GraphBuilder::new(&mut m, "f", &inputs);
    let [x, y, i, image, w, n] = [0, 1, 2, 3, 4, 5].map(|k| g.arg(k));
    let mut expect = |g: &GraphBuilder, v: ValueId, shape: &[usize]| {
        assert_eq!(g.shape(v), shape);
    };
    let v = g.transpose(x, &[2, 0, 1]);
    expect(&g, v, &[4, 2, 3]);
    let v = g.slice(x, &[0, -2, 1], &[2, -1, i32::MAX]);
    expect(&g, v, &[2, 1, 3]);
    let v = g.slice_strided(x, &[0, 0, 0], &[2, 3, 4], &[1, 2, 3]);
    expect(&g, v, &[2, 2, 2]);
    let v = g.slice_runtime(x, n, Bound::Static(&[2, 3, 4]), &[1, 1, 4]);
    expect(&g, v, &[1, 1, 4]);
    let v = g.broadcasting_batch_matmul(x, y);
    expect(&g, v, &[2, 3, 5]);
    let v = g.gather_nd(x, i);
    expect(&g, v, &[7, 3, 4]);
    let v = g.expand_dims(y, &[0, 2]);
    expect(&g, v, &[1, 4, 1, 5]);
    let v = g.shrink_dims(v, &[2]);
    expect(&g, v, &[1, 4, 5]);
    let v = g.pad(y, &[(1, 0), (0, 2)], Padding::Constant, 0.0);
    expect(&g, v, &[5, 7]);
    let v = g.tile(y, &[2, 3]);
    expect(&g, v, &[8, 15]);
    let v = g.reduce_sum(x, &[0, 2]);
    expect(&g, v, &[1, 3, 1]);
    let v = g.argmax(x, 1);
    expect(&g, v, &[2, 1, 4]);
    assert_eq!(g.elem(v), Elem::Ui32);
    let parts = g.split(x, 2, &[1, 3]);
    expect(&g, parts[1], &[2, 3, 3]);
    let v = g.concat(2, &parts);
    expect(&g, v, &[2, 3, 4]);
    let padded = g.pad(
        image,
        &[(0, 0), (0, 0), (1, 0), (2, 1)],
        Padding::Constant,
        0.0,
    );
    let options = Conv2d {
        stride: [2, 1],
        dilation: [1, 2],
        groups: 2,
    };
    let v = g.conv2d(padded, w, options);
    expect(&g, v, &[1, 6, 3, 6]);
    let j = g.i32s(&[0, 1, 2, 3]);
    let j = g.reshape(j, &[1, 4]);
    let row = g.slice(y, &[0, 0], &[1, 4]);
    let v = g.scatter_along_axis(y, j, row, 1, Scatter::Add);
    expect(&g, v, &[4, 5]);
}
