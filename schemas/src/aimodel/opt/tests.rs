use super::*;
use crate::aimodel::build::{GraphBuilder, Input};
use crate::aimodel::check::check;
use crate::aimodel::encode::encode;
use crate::aimodel::ir::{BlobData, Elem, TensorType};

fn tensor(elem: Elem, shape: &[usize]) -> Input {
    Input::Tensor(TensorType::new(elem, shape))
}

/// Operation names of the first function.
fn names(m: &Module) -> Vec<&str> {
    let ops = &m.region(m.graphs()[0].region).ops;
    ops.iter().map(|&id| m.op(id).name.as_str()).collect()
}

fn count(m: &Module, name: &str) -> usize {
    names(m).iter().filter(|n| **n == name).count()
}

#[test]
fn what_nobody_reads_is_dropped_and_states_stay() {
    let mut m = Module::default();
    let cache = Input::State(TensorType::new(Elem::F16, &[4]));
    let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F16, &[4])), ("c", cache)]);
    let x = g.arg(0);
    let y = g.unary("exp", x);
    let unread = g.binary("add", y, y);
    g.silu(unread);
    let token = g.token();
    let (_, token) = g.read_handle(g.arg(1), token);
    let token = g.write_handle(g.arg(1), y, token);
    g.finish(&[("y", y)], &[token]);
    assert_eq!(drop_dead(&mut m), 2);
    check(&m).unwrap();
    assert_eq!(
        names(&m),
        [
            "primitive.exp_v1",
            "dataflow.create_token_v1",
            "dataflow.read_handle_v1",
            "dataflow.write_handle_v1",
            "dataflow.output_v1"
        ]
    );
    assert_eq!(drop_dead(&mut m), 0);
}

#[test]
fn inverse_transposes_cancel_and_others_stay() {
    let transposed = |perms: &[[usize; 3]]| {
        let mut m = Module::default();
        let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F16, &[2, 2, 2]))]);
        let mut y = g.arg(0);
        for perm in perms {
            y = g.transpose(y, perm);
        }
        let y = g.silu(y);
        g.finish(&[("y", y)], &[]);
        optimize(&mut m).unwrap();
        check(&m).unwrap();
        count(&m, "primitive.transpose_v1")
    };
    assert_eq!(transposed(&[[1, 2, 0], [2, 0, 1]]), 0);
    // Two rotations of three make the third, not the identity.
    assert_eq!(transposed(&[[1, 2, 0], [1, 2, 0]]), 2);
    assert_eq!(transposed(&[[0, 1, 2]]), 0);
    assert_eq!(transposed(&[[1, 0, 2], [1, 0, 2], [1, 0, 2]]), 1);
    assert_eq!(
        transposed(&[[1, 2, 0], [0, 2, 1], [0, 2, 1], [2, 0, 1]]),
        0,
        "pairs inside pairs"
    );
}

#[test]
fn a_transpose_somebody_else_reads_stays() {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F16, &[2, 3]))]);
    let t = g.transpose(g.arg(0), &[1, 0]);
    let back = g.transpose(t, &[1, 0]);
    let y = g.silu(back);
    g.finish(&[("t", t), ("y", y)], &[]);
    let savings = optimize(&mut m).unwrap();
    check(&m).unwrap();
    assert_eq!((savings.transposes, savings.dead), (1, 1));
    assert_eq!(count(&m, "primitive.transpose_v1"), 1);
}

#[test]
fn blobs_of_equal_bytes_become_one_wherever_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w");
    let bytes: Vec<u8> = (0..20_000u32).map(|i| (i / 7) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let mut last = bytes.clone();
    last[19_999] ^= 1;
    let mut m = Module::default();
    let data = [
        BlobData::Bytes(bytes),
        BlobData::File {
            path,
            offset: 0,
            len: 20_000,
        },
        BlobData::Bytes(last),
        BlobData::Bytes(vec![0; 10_000]),
    ];
    let blobs: Vec<_> = (data.into_iter().enumerate())
        .map(|(i, data)| {
            m.add_blob(Blob {
                key: format!("w{i}"),
                data,
            })
        })
        .collect();
    let mut g = GraphBuilder::new(&mut m, "f", &[]);
    let w: Vec<ValueId> = blobs
        .iter()
        .map(|&b| {
            let len = g.module().blob(b).len() as usize;
            g.constant_blob(TensorType::new(Elem::Ui8, &[len]), b)
        })
        .collect();
    let named = ["a", "b", "c", "d"];
    let outputs: Vec<_> = named.iter().copied().zip(w).collect();
    g.finish(&outputs, &[]);
    let savings = optimize(&mut m).unwrap();
    check(&m).unwrap();
    assert_eq!((savings.blobs, savings.blob_bytes), (1, 20_000));
    assert_eq!((savings.constants, savings.dead), (1, 1));
    let mut out = vec![];
    encode(&m, &mut out).unwrap();
    assert!((50_000..51_000).contains(&out.len()), "{}", out.len());
}

#[test]
fn a_blob_that_cannot_be_read_is_named() {
    let mut m = Module::default();
    let blobs = ["here", "there"].map(|key| {
        m.add_blob(Blob {
            key: key.into(),
            data: BlobData::File {
                path: "nowhere".into(),
                offset: 0,
                len: 4,
            },
        })
    });
    let mut g = GraphBuilder::new(&mut m, "f", &[]);
    let w = blobs.map(|b| g.constant_blob(TensorType::new(Elem::Ui8, &[4]), b));
    g.finish(&[("a", w[0]), ("b", w[1])], &[]);
    let said = optimize(&mut m).unwrap_err().to_string();
    assert!(
        said.starts_with("cannot read the 4 bytes at offset 0 of `nowhere` of blob `here`"),
        "{said}"
    );
}

/// A function that returns a `[4, 6]` matrix of indices into tables of two rows each.
fn matrix(m: &mut Module, name: &str, bits: u8, codes: &[u8], tables: &[f32]) {
    let elem = if bits == 3 { Elem::Ui3 } else { Elem::Ui4 };
    let packed = crate::lut::pack(codes, bits);
    let mut g = GraphBuilder::new(m, name, &[]);
    let i = g.constant(TensorType::new(elem, &[4, 6]), &packed);
    let t = g.f16s(tables, &[2, 1, 1 << bits, 1]);
    let w = g.lut_to_dense(i, t, 0);
    g.finish(&[("w", w)], &[]);
}

#[test]
fn matrices_equal_up_to_table_order_share_their_blobs() {
    for bits in [3u8, 4] {
        let entries = 1usize << bits;
        let ascending: Vec<f32> = (0..2 * entries).map(|i| i as f32 / 8.0 - 1.0).collect();
        let codes: Vec<u8> = (0..24).map(|i| (i * 5 % entries) as u8).collect();
        // Reversed tables, and a rotation in the second.
        let rotate = |e: usize| (e + 3) % entries;
        let mut tables = vec![0.0; 2 * entries];
        for e in 0..entries {
            tables[entries - 1 - e] = ascending[e];
            tables[entries + rotate(e)] = ascending[entries + e];
        }
        let renamed: Vec<u8> = (codes.iter().enumerate())
            .map(|(i, &c)| match i / 12 {
                0 => (entries - 1) as u8 - c,
                _ => rotate(usize::from(c)) as u8,
            })
            .collect();
        let mut m = Module::default();
        matrix(&mut m, "a", bits, &codes, &ascending);
        matrix(&mut m, "b", bits, &renamed, &tables);
        let savings = optimize(&mut m).unwrap();
        check(&m).unwrap();
        assert_eq!(savings.tables, 1, "the first was in order");
        let mut out = vec![];
        encode(&m, &mut out).unwrap();
        let again = crate::aimodel::decode::decode_bytes(&out).unwrap();
        assert_eq!(again.blobs().len(), 1, "the indices; tables are attributes");
    }
}

#[test]
fn equal_entries_of_a_table_become_one() {
    let mut tables = vec![1.0f32; 32];
    tables[3] = -1.0;
    let mut m = Module::default();
    let codes: Vec<u8> = (0..24).map(|i| i % 16).collect();
    matrix(&mut m, "f", 4, &codes, &tables);
    assert_eq!(sort_tables(&mut m), 1);
    assert_eq!(sort_tables(&mut m), 0, "once is enough");
    let graph = m.graph("f").unwrap().region;
    let values = constants(&m, graph);
    let lut = m.op(m.region(graph).ops[m.region(graph).ops.len() - 2]);
    let bytes = |k: usize| blob_of(&m, values[&lut.operands[k]]).unwrap().bytes();
    let expected: Vec<u8> = (0..24).map(|i| u8::from(i < 12 && i % 16 != 3)).collect();
    assert_eq!(bytes(0), Some(&crate::lut::pack(&expected, 4)[..]));
}
