//! The tensors the host makes for a call: embeddings, rotary factors and the mask.
//!
//! A call's mask has `context x width` values, half a megabyte at a context of 16384
//! and 16 rows, but from one call to the next only the lines of a few slots change.
//! So the tensors stay in [`Buffers`] between calls, and what is the same is not
//! written again; nor are the sines of a position computed twice.

use std::path::Path;

use anemone_schemas::aimodel::ir::Elem;
use anemone_schemas::manifest::{Manifest, TableFile};
use anemone_schemas::mapped::MappedFile;
use half::f16;

use super::EngineError;
use crate::tensor::{Data, Tensor};

/// One token of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Token id.
    pub id: u32,
    /// Position in the text, which rotates its query and key.
    pub position: u32,
    /// Rows of this call that it sees, bit `i` for row `i`; itself among them.
    pub sees: u64,
}

impl Row {
    /// Consecutive tokens, each seeing itself and those before it.
    pub fn chain(ids: &[u32], first_position: usize) -> Vec<Self> {
        let row = |(i, &id): (usize, &u32)| Self {
            id,
            position: (first_position + i) as u32,
            sees: u64::MAX >> (63 - i.min(63)),
        };
        ids.iter().enumerate().map(row).collect()
    }
}

/// The inputs of a call but the step, kept from call to call.
#[derive(Clone, Debug)]
pub(super) struct Buffers {
    width: usize,
    /// Embeddings of the rows, `[1, width, 1, hidden]`; padding rows are zero.
    pub(super) embedded: Tensor,
    /// Cosines of the rows' positions, `[1, 1, width, head_dim]`, the second half of a
    /// head repeating the first.
    pub(super) cos: Tensor,
    /// Their sines.
    pub(super) sin: Tensor,
    mask: Mask,
    turns: Turns,
}

impl Buffers {
    pub(super) fn new(manifest: &Manifest) -> Self {
        Self {
            width: 0,
            embedded: zeros(&[1, 0, 1, manifest.model.hidden]),
            cos: zeros(&[1, 1, 0, manifest.model.head_dim]),
            sin: zeros(&[1, 1, 0, manifest.model.head_dim]),
            mask: Mask::new(0, 0),
            turns: Turns::default(),
        }
    }

    /// The additive mask `[1, context, 1, width]`: 0 where a row sees a slot.
    pub(super) fn mask(&self) -> &Tensor {
        &self.mask.tensor
    }

    /// Makes the inputs of a call of `rows` at `offset`.
    pub(super) fn fill(
        &mut self,
        manifest: &Manifest,
        table: &[u8],
        rows: &[Row],
        offset: usize,
        [context, width]: [usize; 2],
    ) -> Result<(), EngineError> {
        if self.width != width {
            self.width = width;
            self.embedded = zeros(&[1, width, 1, manifest.model.hidden]);
            self.cos = zeros(&[1, 1, width, manifest.model.head_dim]);
            self.sin = self.cos.clone();
        }
        if [self.mask.context, self.mask.width] != [context, width] {
            self.mask = Mask::new(context, width);
        }
        embed(manifest, table, rows, values(&mut self.embedded))?;
        let tables = [values(&mut self.cos), values(&mut self.sin)];
        self.turns.fill(manifest, rows, tables);
        self.mask.fill(rows, offset, manifest.mask_value);
        Ok(())
    }
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(Elem::F16, shape).expect("fp16 of a checked size")
}

/// The values of an fp16 tensor, to change in place.
fn values(tensor: &mut Tensor) -> &mut [f16] {
    match tensor.data_mut() {
        Data::F16(values) => values,
        _ => &mut [],
    }
}

/// Maps an embedding table that has the bytes its shape says.
pub(super) fn open_table(folder: &Path, table: &TableFile) -> Result<MappedFile, EngineError> {
    let path = folder.join(&table.path);
    let bytes = MappedFile::open(&path).map_err(|source| EngineError::Io {
        path: path.clone(),
        source,
    })?;
    let [rows, cols] = table.shape;
    if Some(bytes.len()) != rows.checked_mul(cols).and_then(|n| n.checked_mul(2)) {
        return Err(EngineError::Embedding {
            path,
            found: bytes.len(),
            rows,
            cols,
        });
    }
    Ok(bytes)
}

fn embed(
    manifest: &Manifest,
    table: &[u8],
    rows: &[Row],
    values: &mut [f16],
) -> Result<(), EngineError> {
    let [vocab, hidden] = manifest.embedding.shape;
    let (used, padding) = values.split_at_mut(rows.len() * hidden);
    for (row, values) in rows.iter().zip(used.chunks_exact_mut(hidden)) {
        let start = row.id as usize * hidden * 2;
        let bytes = table.get(start..start + hidden * 2);
        let bytes = bytes.ok_or(EngineError::Id { id: row.id, vocab })?;
        for (value, b) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = f16::from_le_bytes(*b);
        }
    }
    padding.fill(f16::ZERO);
    Ok(())
}

/// Cosines and sines by position, as far as positions have come up: half a head of
/// each. In f32 as `transformers` computes them, then rounded.
#[derive(Clone, Debug, Default)]
struct Turns([Vec<f16>; 2]);

impl Turns {
    fn fill(&mut self, manifest: &Manifest, rows: &[Row], tables: [&mut [f16]; 2]) {
        let half = manifest.model.head_dim / 2;
        // Positions beyond every context come from no text; they are not kept.
        let kept = *manifest.contexts.last().expect("checked when read");
        for (table, turns) in tables.into_iter().zip(0..) {
            for (row, line) in rows.iter().zip(table.chunks_exact_mut(2 * half)) {
                let position = row.position as usize;
                let (first, second) = line.split_at_mut(half);
                if position < kept {
                    self.extend(manifest, position + 1);
                    first.copy_from_slice(&self.0[turns][position * half..][..half]);
                } else {
                    for (value, &f) in first.iter_mut().zip(&manifest.rope.inv_freq) {
                        *value = turn(manifest, row.position, f)[turns];
                    }
                }
                second.copy_from_slice(first);
            }
        }
    }

    fn extend(&mut self, manifest: &Manifest, positions: usize) {
        let half = manifest.model.head_dim / 2;
        for position in self.0[0].len() / half..positions {
            for &frequency in &manifest.rope.inv_freq {
                let values = turn(manifest, position as u32, frequency);
                for (turns, value) in self.0.iter_mut().zip(values) {
                    turns.push(value);
                }
            }
        }
    }
}

/// Cosine and sine of one position and frequency.
fn turn(manifest: &Manifest, position: u32, frequency: f32) -> [f16; 2] {
    let (sin, cos) = (position as f32 * frequency).sin_cos();
    [cos, sin].map(|v| f16::from_f32(v * manifest.rope.attention_factor))
}

/// The mask and what it shows: all rows see the slots before `start`, none sees those
/// from `end` on.
#[derive(Clone, Debug)]
struct Mask {
    tensor: Tensor,
    context: usize,
    width: usize,
    start: usize,
    end: usize,
}

impl Mask {
    /// A mask of zeros, as if every slot were seen.
    fn new(context: usize, width: usize) -> Self {
        Self {
            tensor: zeros(&[1, context, 1, width]),
            context,
            width,
            start: context,
            end: context,
        }
    }

    /// Padding sees what is before the call and itself, so that no softmax is empty.
    fn fill(&mut self, rows: &[Row], offset: usize, hidden: f32) {
        let hidden = f16::from_f32(hidden);
        let width = self.width;
        let end = offset + width;
        let first = self.start.min(offset);
        let changed = self.end.max(end) - first;
        let lines = values(&mut self.tensor).chunks_exact_mut(width);
        for (slot, line) in (first..).zip(lines.skip(first).take(changed)) {
            if slot < offset {
                line.fill(f16::ZERO);
                continue;
            }
            line.fill(hidden);
            if slot < end {
                let own = slot - offset;
                line[own] = f16::ZERO;
                for (row, value) in rows.iter().zip(line) {
                    if row.sees >> own & 1 == 1 {
                        *value = f16::ZERO;
                    }
                }
            }
        }
        (self.start, self.end) = (offset, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_sees_itself_and_what_is_before() {
        let rows = Row::chain(&[7, 8, 9], 4);
        assert_eq!(rows[2].position, 6);
        assert_eq!(rows.iter().map(|r| r.sees).collect::<Vec<_>>(), [1, 3, 7]);
        let full = Row::chain(&[0; 64], 0);
        assert_eq!(full[63].sees, u64::MAX);
        assert_eq!(full[62].sees, u64::MAX >> 1);
    }

    #[test]
    fn a_mask_that_is_kept_shows_what_a_new_one_does() {
        // Forward, back, narrower, branching, to the end and back to the start.
        let side = |mut rows: Vec<Row>| {
            let last = rows.len() - 1;
            rows[last].sees = 1 | 1 << last;
            rows
        };
        let calls = [
            (0, Row::chain(&[0; 8], 0)),
            (4, Row::chain(&[0; 3], 4)),
            (12, side(Row::chain(&[0; 6], 12))),
            (8, Row::chain(&[0; 1], 8)),
            (24, Row::chain(&[0; 8], 24)),
            (0, Row::chain(&[0; 2], 0)),
        ];
        let mut kept = Mask::new(32, 8);
        for (offset, rows) in calls {
            kept.fill(&rows, offset, -4e4);
            let values = kept.tensor.as_f16().unwrap();
            for (slot, line) in values.chunks(8).enumerate() {
                for (r, value) in line.iter().enumerate() {
                    let own = slot == offset + r;
                    let row = rows.get(r).filter(|_| (offset..offset + 8).contains(&slot));
                    let seen = row.is_some_and(|row| row.sees >> (slot - offset) & 1 == 1);
                    let expected = if slot < offset || own || seen {
                        0.0
                    } else {
                        -4e4
                    };
                    let expected = f16::from_f32(expected);
                    assert_eq!(*value, expected, "offset {offset} slot {slot} row {r}");
                }
            }
        }
    }
}
