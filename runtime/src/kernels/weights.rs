//! Weight matrices as they lie in a file, checked once.

use super::activations::LANES;
use half::f16;
use thiserror::Error;

/// Why bytes do not form a weight matrix of the stated shape.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightsError {
    /// An index width that no kernel reads.
    #[error("lookup tables with {0}-bit indices, expected 1, 2, 3, 4, 6 or 8")]
    Bits(u8),
    /// A group without rows.
    #[error("lookup tables with groups of 0 rows, expected at least 1")]
    GroupRows,
    /// A shape whose size does not fit the address space.
    #[error("a weight matrix of {rows} x {cols} does not fit in memory")]
    Shape {
        /// Rows of the matrix (output channels).
        rows: usize,
        /// Columns of the matrix (input channels).
        cols: usize,
    },
    /// A part with another length than the shape asks for.
    #[error("`{part}` has a length of {found}, expected {expected}")]
    Length {
        /// `tables`, `indices`, `values` or `scales`.
        part: &'static str,
        /// The length that the shape asks for.
        expected: usize,
        /// The length found.
        found: usize,
    },
}

fn check_length(part: &'static str, expected: usize, found: usize) -> Result<(), WeightsError> {
    if expected == found {
        Ok(())
    } else {
        Err(WeightsError::Length {
            part,
            expected,
            found,
        })
    }
}

/// A matrix of lookup-table indices, borrowed from the file it lies in.
///
/// Element `(r, c)` is entry `i` of the table of group `r / group_rows`, where
/// `i` is the `bits`-bit number at bit `(r * cols + c) * bits` of `indices`,
/// least significant bit first. Rows are not padded, so a row may start inside
/// a byte. Tables are little-endian f16, `2^bits` entries each. No index can
/// leave its table, whatever the bytes are.
#[derive(Debug, Clone, Copy)]
pub struct LutWeights<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) bits: u8,
    pub(super) group_rows: usize,
    pub(super) tables: &'a [u8],
    pub(super) indices: &'a [u8],
}

impl<'a> LutWeights<'a> {
    /// Checks the lengths of `tables` and `indices` against the shape.
    ///
    /// # Errors
    ///
    /// When the index width is not supported, the group is empty, or a length
    /// is not exactly what the shape asks for.
    pub fn new(
        rows: usize,
        cols: usize,
        bits: u8,
        group_rows: usize,
        tables: &'a [u8],
        indices: &'a [u8],
    ) -> Result<Self, WeightsError> {
        if !matches!(bits, 1 | 2 | 3 | 4 | 6 | 8) {
            return Err(WeightsError::Bits(bits));
        }
        if group_rows == 0 {
            return Err(WeightsError::GroupRows);
        }
        let shape = WeightsError::Shape { rows, cols };
        let Some(total_bits) = rows
            .checked_mul(cols)
            .and_then(|n| n.checked_mul(usize::from(bits)))
        else {
            return Err(shape);
        };
        let Some(table_bytes) = rows.div_ceil(group_rows).checked_mul(2 << bits) else {
            return Err(shape);
        };
        check_length("tables", table_bytes, tables.len())?;
        check_length("indices", total_bits.div_ceil(8), indices.len())?;
        Ok(Self {
            rows,
            cols,
            bits,
            group_rows,
            tables,
            indices,
        })
    }

    /// Rows of the matrix (output channels).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix (input channels).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bits per index.
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// Bytes that one call streams: tables and indices.
    pub fn bytes(&self) -> usize {
        self.tables.len() + self.indices.len()
    }

    /// Which table, counted from that of row `first`, each row from there on has.
    /// Divides once for all of them.
    #[inline(always)]
    pub(super) fn tables_from(&self, first: usize) -> [usize; LANES] {
        // As tables are: no division for a tile of rows with one table.
        if (self.group_rows | first).is_multiple_of(LANES) {
            return [0; LANES];
        }
        let mut left = self.group_rows - first % self.group_rows;
        let mut table = 0;
        let mut tables = [0; LANES];
        for of in &mut tables {
            if left == 0 {
                (table, left) = (table + 1, self.group_rows);
            }
            *of = table;
            left -= 1;
        }
        tables
    }

    /// The group whose table `row` uses.
    pub(super) fn group_of(&self, row: usize) -> usize {
        row / self.group_rows
    }

    /// The table that `row` uses, as little-endian f16.
    pub(super) fn table(&self, row: usize) -> &'a [u8] {
        let bytes = 2 << self.bits;
        &self.tables[self.group_of(row) * bytes..][..bytes]
    }

    /// Element `(row, col)`, read by the definition.
    #[cfg(test)]
    pub(super) fn get(&self, row: usize, col: usize) -> f32 {
        let bit = (row * self.cols + col) * usize::from(self.bits);
        let low = u16::from(self.indices[bit / 8]);
        let high = self.indices.get(bit / 8 + 1).copied().map_or(0, u16::from);
        let window = (low | high << 8) >> (bit % 8);
        let index = usize::from(window & ((1 << self.bits) - 1));
        let table = self.table(row);
        f16::from_le_bytes([table[2 * index], table[2 * index + 1]]).to_f32()
    }
}

/// The elements of a [`DenseWeights`], row-major.
#[derive(Debug, Clone, Copy)]
pub enum DenseValues<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// Single precision.
    F32(&'a [f32]),
    /// Signed bytes with one scale per row. The scale multiplies the finished
    /// sum of a row, not each weight.
    I8 {
        /// The quantized elements.
        values: &'a [i8],
        /// One factor per row.
        scales: &'a [f32],
    },
}

/// A dense weight matrix, borrowed from the file it lies in.
#[derive(Debug, Clone, Copy)]
pub struct DenseWeights<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) values: DenseValues<'a>,
}

impl<'a> DenseWeights<'a> {
    /// Checks the lengths of `values` against the shape.
    ///
    /// # Errors
    ///
    /// When a length is not exactly what the shape asks for.
    pub fn new(rows: usize, cols: usize, values: DenseValues<'a>) -> Result<Self, WeightsError> {
        let elements = rows
            .checked_mul(cols)
            .ok_or(WeightsError::Shape { rows, cols })?;
        let found = match values {
            DenseValues::F16(v) => v.len(),
            DenseValues::F32(v) => v.len(),
            DenseValues::I8 { values, scales } => {
                check_length("scales", rows, scales.len())?;
                values.len()
            }
        };
        check_length("values", elements, found)?;
        Ok(Self { rows, cols, values })
    }

    /// Rows of the matrix (output channels).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix (input channels).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes that one call streams.
    pub fn bytes(&self) -> usize {
        match self.values {
            DenseValues::F16(v) => size_of_val(v),
            DenseValues::F32(v) => size_of_val(v),
            DenseValues::I8 { values, scales } => values.len() + size_of_val(scales),
        }
    }

    /// Element `(row, col)` before its row's scale.
    #[cfg(test)]
    pub(super) fn get(&self, row: usize, col: usize) -> f32 {
        let at = row * self.cols + col;
        match self.values {
            DenseValues::F16(v) => v[at].to_f32(),
            DenseValues::F32(v) => v[at],
            DenseValues::I8 { values, .. } => f32::from(values[at]),
        }
    }

    /// The factor of a finished sum of `row`, where there is one.
    pub(super) fn scale(&self, row: usize) -> Option<f32> {
        match self.values {
            DenseValues::I8 { scales, .. } => Some(scales[row]),
            DenseValues::F16(_) | DenseValues::F32(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_lengths_and_widths_are_refused() {
        assert!(LutWeights::new(3, 5, 4, 2, &[0; 64], &[0; 8]).is_ok());
        assert_eq!(
            LutWeights::new(3, 5, 4, 2, &[0; 62], &[0; 8]).unwrap_err(),
            WeightsError::Length {
                part: "tables",
                expected: 64,
                found: 62
            }
        );
        assert_eq!(
            LutWeights::new(3, 5, 4, 2, &[0; 64], &[0; 9]).unwrap_err(),
            WeightsError::Length {
                part: "indices",
                expected: 8,
                found: 9
            }
        );
        assert_eq!(
            LutWeights::new(3, 5, 5, 2, &[], &[]).unwrap_err(),
            WeightsError::Bits(5)
        );
        assert_eq!(
            LutWeights::new(3, 5, 4, 0, &[], &[]).unwrap_err(),
            WeightsError::GroupRows
        );
        let rows = usize::MAX / 2;
        assert_eq!(
            LutWeights::new(rows, 3, 4, 1, &[], &[]).unwrap_err(),
            WeightsError::Shape { rows, cols: 3 }
        );
        assert!(DenseWeights::new(2, 2, DenseValues::F32(&[0.0; 3])).is_err());
        let scales = [1.0; 1];
        assert!(
            DenseWeights::new(
                2,
                2,
                DenseValues::I8 {
                    values: &[0; 4],
                    scales: &scales
                }
            )
            .is_err()
        );
    }

    #[test]
    fn indices_are_read_least_significant_bit_first_across_bytes() {
        // Two rows of three 3-bit indices: 5 2 7 | 1 6 3.
        let stream = [5u32, 2, 7, 1, 6, 3]
            .iter()
            .rev()
            .fold(0u32, |s, i| s << 3 | i);
        let indices = &stream.to_le_bytes()[..3];
        let tables: Vec<u8> = (0..8)
            .flat_map(|i| f16::from_f32(i as f32).to_le_bytes())
            .collect();
        let w = LutWeights::new(2, 3, 3, 2, &tables, indices).unwrap();
        let read: Vec<f32> = (0..6).map(|i| w.get(i / 3, i % 3)).collect();
        assert_eq!(read, [5.0, 2.0, 7.0, 1.0, 6.0, 3.0]);
    }
}
