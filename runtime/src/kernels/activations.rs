//! Activations in the order in which the kernels read them.

use half::f16;

/// Columns of a block: 16 lanes times 8 consecutive columns.
pub(super) const BLOCK: usize = LANES * RUN;
/// Lanes of every accumulator.
pub(super) const LANES: usize = 16;
/// Consecutive columns that one lane takes from a block.
pub(super) const RUN: usize = 8;

/// Sixteen f32 lanes on a cache line of their own.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C, align(64))]
pub(super) struct Lanes(pub(super) [f32; LANES]);

/// The tokens that matrices are multiplied with, widened to f32.
///
/// Packed once and used by every matrix that reads the same input. The buffer
/// is kept between calls. Vector `j` of token `t` in block `b` lies at
/// `(b * n + t) * 8 + j`; its lane `l` holds column `128 b + 8 l + j`, zero
/// past the last column.
#[derive(Debug, Clone, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    data: Vec<Lanes>,
}

impl Activations {
    /// An empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of packed tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of columns (input channels) of each token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Packs `x[n][cols]`, one token after the other.
    ///
    /// # Panics
    ///
    /// When `x` does not hold `n * cols` elements.
    pub fn pack_rows(&mut self, x: &[f16], n: usize, cols: usize) {
        assert_eq!(
            Some(x.len()),
            n.checked_mul(cols),
            "length of a [{n}][{cols}] input"
        );
        self.resize(n, cols);
        let mut wide = [0.0; BLOCK];
        for (block, vectors) in self.data.chunks_exact_mut((n * RUN).max(1)).enumerate() {
            let from = block * BLOCK;
            let live = BLOCK.min(cols - from);
            wide[live..].fill(0.0);
            for (token, run) in vectors.chunks_exact_mut(RUN).enumerate() {
                super::convert::widen(&x[token * cols + from..][..live], &mut wide[..live]);
                for (j, lanes) in run.iter_mut().enumerate() {
                    for (l, lane) in lanes.0.iter_mut().enumerate() {
                        *lane = wide[l * RUN + j];
                    }
                }
            }
        }
    }

    /// Packs the first `n` columns of the channel-major `x[cols][stride]`: the
    /// layout `[1, channels, 1, width]` of the programs.
    ///
    /// # Panics
    ///
    /// When `n` exceeds `stride` or `x` is too short for the last channel.
    pub fn pack_cols(&mut self, x: &[f16], n: usize, cols: usize, stride: usize) {
        assert!(n <= stride, "{n} tokens in a row of {stride}");
        self.resize(n, cols);
        if n == 0 || cols == 0 {
            return;
        }
        let needed = (cols - 1)
            .checked_mul(stride)
            .and_then(|v| v.checked_add(n));
        assert!(
            needed.is_some_and(|v| v <= x.len()),
            "length of a [{cols}][{stride}] input"
        );
        let mut wide = [0.0; 64];
        for (block, vectors) in self.data.chunks_exact_mut(n * RUN).enumerate() {
            let from = block * BLOCK;
            if cols - from < BLOCK {
                vectors.fill(Lanes::default());
            }
            for k in 0..BLOCK.min(cols - from) {
                let channel = &x[(from + k) * stride..][..n];
                let (lane, j) = (k / RUN, k % RUN);
                for (piece, tokens) in channel.chunks(wide.len()).enumerate() {
                    let wide_tokens = &mut wide[..tokens.len()];
                    super::convert::widen(tokens, wide_tokens);
                    let first = piece * 64;
                    for (t, value) in wide_tokens.iter().enumerate() {
                        vectors[(first + t) * RUN + j].0[lane] = *value;
                    }
                }
            }
        }
    }

    fn resize(&mut self, n: usize, cols: usize) {
        let vectors = cols
            .div_ceil(BLOCK)
            .checked_mul(n)
            .and_then(|v| v.checked_mul(RUN));
        self.tokens = n;
        self.cols = cols;
        self.data.resize(
            vectors.expect("activations fit in memory"),
            Lanes::default(),
        );
    }

    /// Blocks of [`BLOCK`] columns, the last one padded.
    pub(super) fn blocks(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    /// The vectors of `token` in `block`.
    pub(super) fn run(&self, block: usize, token: usize) -> &[Lanes] {
        &self.data[(block * self.tokens + token) * RUN..][..RUN]
    }

    /// All vectors, in the order that [`Activations`] documents.
    pub(super) fn vectors(&self) -> &[Lanes] {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_packings_place_columns_by_the_documented_order() {
        for (n, cols) in [(1, 1), (3, 127), (2, 128), (5, 300), (70, 129)] {
            let value = |t: usize, k: usize| f16::from_f32((t * 1000 + k) as f32 / 4.0);
            let rows: Vec<f16> = (0..n)
                .flat_map(|t| (0..cols).map(move |k| value(t, k)))
                .collect();
            let stride = n + 3;
            let columns: Vec<f16> = (0..cols)
                .flat_map(|k| (0..stride).map(move |t| value(t, k)))
                .collect();
            let (mut a, mut b) = (Activations::new(), Activations::new());
            // Left-overs of a wider call must not show.
            b.pack_rows(&vec![f16::ONE; 80 * 400], 80, 400);
            a.pack_rows(&rows, n, cols);
            b.pack_cols(&columns, n, cols, stride);
            assert_eq!(a.vectors(), b.vectors());
            for t in 0..n {
                for k in 0..cols.next_multiple_of(BLOCK) {
                    let expected = if k < cols { value(t, k).to_f32() } else { 0.0 };
                    let found = a.run(k / BLOCK, t)[k % RUN].0[k % BLOCK / RUN];
                    assert_eq!(found.to_bits(), expected.to_bits());
                }
            }
        }
    }
}
