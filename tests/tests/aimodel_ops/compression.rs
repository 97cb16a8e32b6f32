//! Constants, tables and scales.

use anemone_schemas::aimodel::ir::{Elem, TensorType};
use anemone_tests::oracle::Tensor;

use crate::suite::{Nd, Suite};

/// Unsigned numbers below 2^bits, packed least significant bit first.
fn pack(values: &[u8], bits: usize) -> Vec<u8> {
    let mut out = vec![0u8; (values.len() * bits).div_ceil(8)];
    for (i, &v) in values.iter().enumerate() {
        for b in 0..bits {
            let at = i * bits + b;
            out[at / 8] |= (v >> b & 1) << (at % 8);
        }
    }
    out
}

#[test]
fn decompression() {
    let mut s = Suite::default();
    // A dummy input, so that every function has one.
    let none = [Tensor::f16(&[1], &[0.0])];
    let widths = [
        (Elem::Ui1, 1),
        (Elem::Ui2, 2),
        (Elem::Ui3, 3),
        (Elem::Ui4, 4),
        (Elem::Ui6, 6),
        (Elem::Ui8, 8),
    ];
    // Conv weights [8, 32, 1, 1] with a table for every four rows.
    for (elem, bits) in widths {
        let entries = 1usize << bits;
        let indices: Vec<u8> = (0..256u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & (entries - 1) as u8)
            .collect();
        let table = Nd::noise(&[2, entries], bits as u32);
        let x = Nd::noise(&[1, 32, 1, 16], 20);
        let weight = |o: usize, c: usize| table.at(&[o / 4, indices[32 * o + c] as usize]);
        s.case(
            &format!("lut{bits}"),
            &[x.f16()],
            |g| {
                let ty = TensorType::new(elem, &[8, 32, 1, 1]);
                let i = g.constant(ty, &pack(&indices, bits));
                let t = g.f16s(&table.data, &[2, 1, 1, 1, entries, 1]);
                let w = g.lut_to_dense(i, t, 0);
                g.conv1x1(g.arg(0), w)
            },
            Nd::from_fn(&[1, 8, 1, 16], |i| {
                (0..32)
                    .map(|c| weight(i[1], c) * x.at(&[0, c, 0, i[3]]))
                    .sum()
            }),
            5e-3,
        );
    }
    // Entries of two elements, laid along axis 0.
    let indices: Vec<u8> = (0..32).map(|i| i * 5 % 16).collect();
    let table = Nd::noise(&[2, 1, 16, 2], 21);
    s.case(
        "lut_of_vectors",
        &none,
        |g| {
            let i = g.constant(TensorType::new(Elem::Ui4, &[4, 8]), &pack(&indices, 4));
            let t = g.f16s(&table.data, &[2, 1, 16, 2]);
            g.lut_to_dense(i, t, 0)
        },
        Nd::from_fn(&[8, 8], |i| {
            let index = indices[8 * (i[0] / 2) + i[1]] as usize;
            table.at(&[i[0] / 4, 0, index, i[0] % 2])
        }),
        0.0,
    );

    let q: Vec<i8> = (0..32).map(|i| (i * 37 % 251 - 125) as i8).collect();
    // The loader refuses scales that are not positive.
    let scale = Nd::noise(&[4, 2], 22).map(|v| (v.abs() + 0.125) / 16.0);
    let zero: Vec<i8> = (0..8).map(|i| i - 4).collect();
    let shift = Nd::noise(&[4, 2], 23);
    s.case(
        "blockwise_shift_scale",
        &[Tensor::i8(&[8, 4], &q)],
        |g| {
            let bytes: Vec<u8> = zero.iter().map(|&z| z as u8).collect();
            let scale = g.f16s(&scale.data, &[4, 2]);
            let zero = g.constant(TensorType::new(Elem::Si8, &[4, 2]), &bytes);
            let shift = g.f16s(&shift.data, &[4, 2]);
            g.blockwise_shift_scale(g.arg(0), scale, zero, shift)
        },
        Nd::from_fn(&[8, 4], |i| {
            let block = [i[0] / 2, i[1] / 2];
            let z = zero[2 * block[0] + block[1]];
            let steps = f32::from(q[4 * i[0] + i[1]]) - f32::from(z);
            scale.at(&block) * steps + shift.at(&block)
        }),
        2e-2,
    );
    let nibbles: Vec<u8> = (0..32).map(|i| i * 3 % 16).collect();
    s.case(
        "blockwise_shift_scale_4_bits",
        &none,
        |g| {
            let data = g.constant(TensorType::new(Elem::Ui4, &[8, 4]), &pack(&nibbles, 4));
            let zero = g.constant(TensorType::new(Elem::Ui4, &[4, 2]), &pack(&[8; 8], 4));
            let (scale, shift) = (g.f16s(&scale.data, &[4, 2]), g.f16s(&shift.data, &[4, 2]));
            g.blockwise_shift_scale(data, scale, zero, shift)
        },
        Nd::from_fn(&[8, 4], |i| {
            let block = [i[0] / 2, i[1] / 2];
            let steps = f32::from(nibbles[4 * i[0] + i[1]]) - 8.0;
            scale.at(&block) * steps + shift.at(&block)
        }),
        1e-2,
    );
    let per_row = Nd::noise(&[8], 24).map(|v| (v.abs() + 0.125) / 16.0);
    s.case(
        "dequantize",
        &[Tensor::i8(&[8, 4], &q)],
        |g| {
            let scale = g.f16s(&per_row.data, &[8]);
            let (zero, shift) = (g.full(Elem::Si8, &[8], 0.0), g.full(Elem::F16, &[8], 0.0));
            g.dequantize(g.arg(0), scale, zero, shift, 0)
        },
        Nd::from_fn(&[8, 4], |i| {
            per_row.at(&[i[0]]) * f32::from(q[4 * i[0] + i[1]])
        }),
        2e-2,
    );
    s.run();
}

#[test]
fn constants_of_every_kind() {
    let mut s = Suite::default();
    let none = [Tensor::f16(&[1], &[0.0])];
    // 100 elements: a blob for all of them; 5: inline for all whole bytes.
    for count in [5usize, 100] {
        let values: Vec<u8> = (0..count).map(|i| (i * 3 % 7) as u8).collect();
        let expected = Nd::from_fn(&[count], |i| f32::from(values[i[0]]));
        let kinds = [
            (Elem::Ui8, 1),
            (Elem::Si8, 1),
            (Elem::Ui16, 2),
            (Elem::Si32, 4),
            (Elem::Ui32, 4),
            (Elem::Si64, 8),
        ];
        for (elem, width) in kinds {
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|&v| u64::from(v).to_le_bytes()[..width].to_vec())
                .collect();
            s.case(
                &format!("{}_{count}", elem.name()),
                &none,
                |g| g.constant(TensorType::new(elem, &[count]), &bytes),
                expected.clone(),
                0.0,
            );
        }
        s.case(
            &format!("f32_{count}"),
            &none,
            |g| g.f32s(&expected.data, &[count]),
            expected.clone(),
            0.0,
        );
        // Packed below a byte, so never inline.
        s.case(
            &format!("ui3_{count}"),
            &none,
            |g| {
                let q = g.constant(TensorType::new(Elem::Ui3, &[count]), &pack(&values, 3));
                let table = g.f16s(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &[1, 8, 1]);
                g.lut_to_dense(q, table, 0)
            },
            expected.clone(),
            0.0,
        );
    }
    let half = Nd::from_fn(&[300], |_| 0.5);
    s.case(
        "splat",
        &none,
        |g| g.full(Elem::F16, &[300], 0.5),
        half,
        0.0,
    );
    // bf16 constants: stored in the attribute, as a splat, and as a blob.
    for (name, count) in [("bf16_inline", 5usize), ("bf16_blob", 300)] {
        let values = Nd::noise(&[count], 30).map(|v| half::bf16::from_f32(v).to_f32());
        let bytes: Vec<u8> = (values.data.iter())
            .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
            .collect();
        s.case(
            name,
            &none,
            |g| {
                let c = g.constant(TensorType::new(Elem::Bf16, &[count]), &bytes);
                g.cast(c, Elem::F32)
            },
            values,
            0.0,
        );
    }
    s.case(
        "bf16_splat",
        &none,
        |g| {
            let c = g.full(Elem::Bf16, &[2, 3], -1.5);
            g.cast(c, Elem::F32)
        },
        Nd::from_fn(&[2, 3], |_| -1.5),
        0.0,
    );
    s.run();
}
