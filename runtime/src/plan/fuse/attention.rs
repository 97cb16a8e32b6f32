//! Attention in the two forms that programs for the Neural Engine use, `C` slots and
//! `w` rows, `H` heads in `G` groups of `R`:
//!
//! ```text
//! by channels, per head                       by rows, per group
//! s_h = transpose(k_g) q_h   [1,1,C,w]        s_g = q_g k_g              [1,1,R w,C]
//! p = softmax over axis 1 of                  p_g = softmax over axis 3 of
//!     concat_h(s_h) + mask   [1,C,H,w]              s_g + mask           [1,R,w,C]
//! o_h = v_g p_h              [1,1,d,w]        o_g = p_g transpose(v_g)   [1,1,R w,d]
//! ```
//!
//! The first ends in the concatenation `[1,H,d,w]`, the second in the reshape of the
//! concatenation to `[1,H,w,d]`.

use super::{Found, Graph};
use crate::ops::elementwise::Binary;
use crate::plan::kind::{AttentionShape, Kind, Step};

impl Graph<'_> {
    pub(super) fn attention(&self, step: &Step) -> Option<Found> {
        match &step.kind {
            Kind::Concat(1) => self.by_channels(step),
            Kind::Reshape(_) => {
                let inner = self.step(step.args[0].slot)?;
                match inner.kind {
                    Kind::Concat(1) => self.by_rows(inner, &step.shapes[0]),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn by_channels(&self, concat: &Step) -> Option<Found> {
        let heads = concat.args.len();
        let &[1, _, depth, width] = &concat.shapes[0][..] else {
            return None;
        };
        let mut found: Option<[u32; 4]> = None;
        let mut shared = 0;
        for (h, output) in concat.args.iter().enumerate() {
            let (v, p) = self.product(output.slot)?;
            let (values, v_group) = self.part(v, 1)?;
            let (weights, p_head) = self.part(self.reshaped(p)?, 2)?;
            let softmax = self.step(weights)?;
            if !matches!(softmax.kind, Kind::Softmax(1)) {
                return None;
            }
            let (scores, mask) = self.binary(softmax.args[0].slot, Binary::Add)?;
            let (k, q) = self.score(scores, h)?;
            let (keys, k_group) = self.part(k, 1)?;
            let keys = self.transposed(keys, &[0, 1, 3, 2])?;
            let (queries, q_head) = self.part(q, 1)?;
            let groups = self.shape(keys)?.get(1).copied()?;
            shared = heads / groups.max(1);
            if [p_head, q_head] != [h; 2] || [k_group, v_group] != [h / shared.max(1); 2] {
                return None;
            }
            let parts = [queries, keys, values, mask];
            if found.is_some_and(|f| f != parts) {
                return None;
            }
            found = Some(parts);
        }
        let args = found?;
        let slots = self.shape(args[1])?.get(3).copied()?;
        let shape = AttentionShape {
            heads,
            groups: heads.checked_div(shared)?,
            depth,
            slots,
            width,
            by_rows: false,
        };
        self.checked(shape, args)
    }

    /// Keys and query whose product is part `h` of the concatenated scores.
    fn score(&self, scores: u32, h: usize) -> Option<(u32, u32)> {
        let concat = self.step(scores)?;
        let part = match concat.kind {
            Kind::Concat(2) => concat.args.get(h)?.slot,
            _ => return None,
        };
        self.product(self.reshaped(part)?)
    }

    fn by_rows(&self, concat: &Step, result: &[usize]) -> Option<Found> {
        let groups = concat.args.len();
        let &[1, heads, width, depth] = result else {
            return None;
        };
        let mut found: Option<[u32; 4]> = None;
        for (g, output) in concat.args.iter().enumerate() {
            let (p, v) = self.product(output.slot)?;
            let (values, v_group) = self.part(v, 1)?;
            let values = self.transposed(values, &[0, 1, 3, 2])?;
            let softmax = self.step(self.reshaped(p)?)?;
            if !matches!(softmax.kind, Kind::Softmax(3)) {
                return None;
            }
            let (scores, mask) = self.binary(softmax.args[0].slot, Binary::Add)?;
            let (q, k) = self.product(self.reshaped(scores)?)?;
            let (keys, k_group) = self.part(k, 1)?;
            let (queries, q_group) = self.part(q, 1)?;
            let queries = self.transposed(self.reshaped(queries)?, &[0, 1, 3, 2])?;
            let parts = [queries, keys, values, mask];
            if [q_group, k_group, v_group] != [g; 3] || found.is_some_and(|f| f != parts) {
                return None;
            }
            found = Some(parts);
        }
        let args = found?;
        let slots = self.shape(args[1])?.get(3).copied()?;
        let shape = AttentionShape {
            heads,
            groups,
            depth,
            slots,
            width,
            by_rows: true,
        };
        self.checked(shape, args)
    }

    /// The attention, if all extents are what the form says.
    fn checked(&self, s: AttentionShape, args: [u32; 4]) -> Option<Found> {
        let cache = [1, s.groups, s.depth, s.slots];
        let mask = if s.by_rows {
            [1, 1, s.width, s.slots]
        } else {
            [1, s.slots, 1, s.width]
        };
        let fits = s.groups > 0
            && s.heads.is_multiple_of(s.groups)
            && self.shape(args[0])? == [1, s.heads, s.depth, s.width]
            && self.shape(args[1])? == cache
            && self.shape(args[2])? == cache
            && self.shape(args[3])? == mask;
        fits.then(|| (Kind::Attention(s), args.to_vec()))
    }

    fn product(&self, slot: u32) -> Option<(u32, u32)> {
        let step = self.step(slot)?;
        matches!(step.kind, Kind::BatchMatmul(_)).then(|| (step.args[0].slot, step.args[1].slot))
    }

    fn reshaped(&self, slot: u32) -> Option<u32> {
        let step = self.step(slot)?;
        matches!(step.kind, Kind::Reshape(_)).then(|| step.args[0].slot)
    }

    fn transposed(&self, slot: u32, perm: &[usize]) -> Option<u32> {
        let step = self.step(slot)?;
        matches!(&step.kind, Kind::Transpose(p) if p == perm).then(|| step.args[0].slot)
    }

    /// What a slot is one entry of, along `axis`, and which.
    fn part(&self, slot: u32, axis: usize) -> Option<(u32, usize)> {
        let (step, result) = self.result(slot)?;
        match &step.kind {
            Kind::Split(a, sizes) if *a == axis && sizes.iter().all(|&n| n == 1) => {
                Some((step.args[0].slot, result))
            }
            _ => None,
        }
    }
}
