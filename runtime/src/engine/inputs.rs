//! The tensors the host makes for a call: embeddings, rotary factors and the mask.

use anemone_schemas::manifest::Manifest;
use half::f16;

use super::EngineError;
use crate::tensor::Tensor;

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

/// Embeddings of the rows, `[1, width, 1, hidden]`; padding rows are zero.
pub(super) fn embed(
    manifest: &Manifest,
    table: &[u8],
    rows: &[Row],
    width: usize,
) -> Result<Tensor, EngineError> {
    let [vocab, hidden] = manifest.embedding.shape;
    let mut values = Vec::with_capacity(width * hidden);
    for row in rows {
        let start = row.id as usize * hidden * 2;
        let bytes = table.get(start..start + hidden * 2);
        let bytes = bytes.ok_or(EngineError::Id { id: row.id, vocab })?;
        values.extend(
            bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]])),
        );
    }
    values.resize(width * hidden, f16::ZERO);
    Ok(Tensor::new(&[1, width, 1, hidden], values).expect("the product of the shape"))
}

/// Cosines and sines of the rows' positions, both `[1, 1, width, head_dim]`, the
/// second half of a head repeating the first. In f32 as `transformers` computes them,
/// then rounded.
pub(super) fn rope(manifest: &Manifest, rows: &[Row], width: usize) -> [Tensor; 2] {
    let d = manifest.model.head_dim;
    let rope = &manifest.rope;
    let mut tables = [vec![f16::ZERO; width * d], vec![f16::ZERO; width * d]];
    for (r, row) in rows.iter().enumerate() {
        for (i, frequency) in rope.inv_freq.iter().enumerate() {
            let (sin, cos) = (row.position as f32 * frequency).sin_cos();
            for (table, value) in tables.iter_mut().zip([cos, sin]) {
                let value = f16::from_f32(value * rope.attention_factor);
                table[r * d + i] = value;
                table[r * d + d / 2 + i] = value;
            }
        }
    }
    tables.map(|t| Tensor::new(&[1, 1, width, d], t).expect("the product of the shape"))
}

/// The additive mask `[1, context, 1, width]`: 0 where a row sees a slot.
pub(super) fn mask(
    manifest: &Manifest,
    rows: &[Row],
    offset: usize,
    context: usize,
    width: usize,
) -> Tensor {
    let mut values = vec![f16::from_f32(manifest.mask_value); context * width];
    for line in values.chunks_mut(width).take(offset) {
        line[..rows.len()].fill(f16::ZERO);
    }
    for (slot, line) in values
        .chunks_mut(width)
        .skip(offset)
        .take(rows.len())
        .enumerate()
    {
        for (row, value) in rows.iter().zip(line) {
            if row.sees >> slot & 1 == 1 {
                *value = f16::ZERO;
            }
        }
    }
    Tensor::new(&[1, context, 1, width], values).expect("the product of the shape")
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
}
