//! No file makes the decoder do anything but answer.

use proptest::prelude::*;

use super::{annotated_file, bytes_of, sampler};
use crate::aimodel::build::GraphBuilder;
use crate::aimodel::check::check;
use crate::aimodel::decode::{Problem, decode_bytes};
use crate::aimodel::encode::encode;
use crate::aimodel::ir::{Attr, Blob, BlobData, Elem, Module, Op, Region, TensorType};
use crate::aimodel::same::difference;
use crate::aimodel::text::{TextOptions, to_text};

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
    // Writing one does not recurse either.
    assert!(matches!(
        problem(&nested(200_000)),
        Problem::TooLarge { .. }
    ));
}

#[test]
fn comparing_and_printing_do_not_follow_a_deep_chain_on_the_stack() {
    let deep = || {
        let mut m = Module::default();
        let mut at = m.add_attr(Attr::Unit);
        for _ in 0..200_000 {
            at = m.add_attr(Attr::MetadataData(at));
        }
        let g = GraphBuilder::new(&mut m, "f", &[]);
        let graph = g.finish(&[], &[]);
        m.op_mut(graph).props.insert(1, ("compositeDecl", at));
        m
    };
    assert_eq!(difference(&deep(), &deep()), None);
    assert!(to_text(&deep(), &TextOptions::default()).len() < 10_000);
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
}
