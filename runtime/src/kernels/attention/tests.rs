//! Attention against plain loops, on every instruction set.

use super::*;
use crate::kernels::scalar::narrow;
use crate::kernels::twin_tests::Random;

/// A case: buffers with gaps between rows and an odd start.
struct Case {
    shape: Shape,
    queries: Vec<f16>,
    keys: Vec<f16>,
    values: Vec<f16>,
    mask: Vec<f16>,
}

const GAP: usize = 3;

impl Case {
    fn new(random: &mut Random, shape: Shape, hide: impl Fn(usize, usize) -> f32) -> Self {
        let cache = shape.groups * shape.depth * (shape.slots + GAP) + 1;
        let cells = (0..shape.rows).flat_map(|r| (0..shape.slots).map(move |c| (r, c)));
        Self {
            shape,
            queries: random.halves(shape.rows * (shape.heads * shape.depth + GAP)),
            keys: random.halves(cache),
            values: random.halves(cache),
            mask: cells.map(|(r, c)| f16::from_f32(hide(r, c))).collect(),
        }
    }

    fn parts(&self) -> (Queries<'_>, [Slots<'_>; 2], Mask) {
        let s = self.shape;
        let channel = s.slots + GAP;
        let cache = |data| Slots {
            data,
            strides: [s.depth * channel, channel],
        };
        let mut mask = Mask::default();
        mask.fill(&self.mask, s.rows, s.slots, s.slots, 1);
        let queries = Queries {
            data: &self.queries,
            strides: [s.depth, 1, s.heads * s.depth + GAP],
        };
        (
            queries,
            [cache(&self.keys[1..]), cache(&self.values[1..])],
            mask,
        )
    }

    /// The definition, over all slots.
    fn expected(&self) -> Vec<u16> {
        let s = self.shape;
        let (queries, [keys, values], _) = self.parts();
        let half = |x: f32| narrow(x).to_f32();
        let mut out = Vec::new();
        for row in 0..s.rows {
            for head in 0..s.heads {
                let group = head / (s.heads / s.groups);
                let q = &queries.data[row * queries.strides[2] + head * s.depth..][..s.depth];
                let key = |i: usize, c: usize| keys.channel(group, i, s.slots)[c].to_f32();
                let value = |i: usize, c: usize| values.channel(group, i, s.slots)[c].to_f32();
                let mut p: Vec<f32> = (0..s.slots)
                    .map(|c| {
                        let sum = (0..s.depth)
                            .fold(0.0f32, |sum, i| q[i].to_f32().mul_add(key(i, c), sum));
                        half(half(sum) + self.mask[row * s.slots + c].to_f32())
                    })
                    .collect();
                let most = crate::ops::math::max(&p);
                for v in &mut p {
                    *v -= most;
                }
                crate::ops::math::exp(&mut p);
                let sum = crate::ops::math::sum(&p);
                for v in &mut p {
                    *v = half(*v / sum);
                }
                for i in 0..s.depth {
                    let sum = (0..s.slots).fold(0.0f32, |sum, c| p[c].mul_add(value(i, c), sum));
                    out.push(narrow(sum).to_bits());
                }
            }
        }
        out
    }

    fn found(&self, isa: Isa) -> Vec<u16> {
        let s = self.shape;
        let (queries, cache, mask) = self.parts();
        let mut out = vec![f16::ONE; s.rows * s.heads * s.depth];
        attend_on(isa, &Pool::new(2), s, queries, cache, &mask, &mut out);
        out.iter().map(|v| v.to_bits()).collect()
    }
}

#[test]
fn attention_equals_its_operations_on_every_instruction_set() {
    let mut random = Random(21);
    for (heads, groups, depth, slots, rows) in [
        (1, 1, 1, 1, 1),
        (2, 1, 5, 17, 3),
        (4, 2, 16, 64, 2),
        (3, 3, 33, 70, 5),
        (8, 2, 64, 130, 9),
        (6, 1, 80, 33, 16),
    ] {
        let shape = Shape {
            heads,
            groups,
            depth,
            slots,
            rows,
        };
        let chain = move |r: usize, c: usize| if c <= slots / 2 + r { 0.0 } else { -40_000.0 };
        let holes = move |r: usize, c: usize| match (r, c % 3) {
            (1, _) | (_, 1) => -40_000.0,
            _ => -0.25 * (c % 5) as f32,
        };
        for case in [
            Case::new(&mut random, shape, chain),
            Case::new(&mut random, shape, holes),
        ] {
            let expected = case.expected();
            for isa in Isa::all() {
                assert_eq!(case.found(isa), expected, "{} {shape:?}", isa.name());
            }
        }
    }
}

#[test]
fn what_lies_beyond_the_visible_slots_is_not_read() {
    let mut random = Random(22);
    let shape = Shape {
        heads: 4,
        groups: 2,
        depth: 32,
        slots: 100,
        rows: 2,
    };
    let hide = |r: usize, c: usize| if c < 40 + r { 0.0 } else { f32::NEG_INFINITY };
    let mut case = Case::new(&mut random, shape, hide);
    let expected = case.expected();
    let channel = shape.slots + GAP;
    for cache in [&mut case.keys, &mut case.values] {
        for line in cache[1..].chunks_mut(channel) {
            line[41..].fill(f16::NAN);
        }
    }
    for isa in Isa::all() {
        assert_eq!(case.found(isa), expected, "{}", isa.name());
    }
}
