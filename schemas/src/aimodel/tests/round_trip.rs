//! What is written is what is read.

use proptest::prelude::*;

use super::{annotated_file, bytes_of, sampler, tensor};
use crate::aimodel::build::GraphBuilder;
use crate::aimodel::check::check;
use crate::aimodel::decode::decode_bytes;
use crate::aimodel::encode::encode;
use crate::aimodel::ir::{
    Attr, AttrId, Backing, Blob, BlobData, Elem, Module, Op, TensorType, Type, ValueId,
};
use crate::aimodel::same::difference;
use crate::aimodel::text::{TextOptions, to_text};

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

#[test]
fn a_file_of_another_writer_decodes_to_the_program_it_describes() {
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

proptest! {
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
