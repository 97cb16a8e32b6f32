//! Lookup-table matrices: a table of 2^`bits` f16 values for every group of rows,
//! and one index per weight.
//!
//! This is the operand pair of Core AI's `lut_to_dense`: for a convolution weight
//! `[O, I, 1, 1]` with groups of `G` output channels the indices are `ui4[O, I, 1, 1]`
//! and the tables `f16[O/G, 1, 1, 1, 16, 1]`. Both parts are kept in the byte
//! layout of a Core AI resource, so that lowering copies them and converts nothing:
//!
//! ```text
//! indices  row-major stream of `bits`-bit numbers, least significant bit first, without
//!          padding between rows: index i is bits [i*b, (i+1)*b), bit k is bit k%8 of byte k/8
//! tables   group-major, little-endian f16, ascending within a table
//! ```
//!
//! On disk a matrix is a 64-byte header and the two parts, each at a multiple of 64 bytes:
//!
//! ```text
//!  0  [u8; 8]  magic "ANEMOLUT"      24  u64  columns
//!  8  u32      version (1)           32  u64  rows per group
//! 12  u32      bits per index        40  u64  bytes of the tables
//! 16  u64      rows                  48  u64  bytes of the indices
//!                                    56  u64  zero
//! ```
//!
//! An index may also stand for a vector of weights: those of 2 or 4 rows below each other. There
//! is then a row of indices for as many rows of weights, a table has vectors for entries,
//! in lexicographic order, and the header says version 2 and at 56 the length of a vector.

use std::io::{self, Write};

use half::f16;

mod error;
mod pack;

pub use error::LutError;
pub use pack::{pack, packed_len, unpack};

/// Index widths that Core AI has an integer type for.
pub const BITS: [u8; 6] = [1, 2, 3, 4, 6, 8];

/// Rows that share a table in the folders Anemone makes.
pub const DEFAULT_GROUP_ROWS: usize = 32;

/// Bytes of the header of a stored matrix.
pub const HEADER_LEN: usize = 64;

/// Lengths of vectors that an index can stand for.
pub const VECTORS: [usize; 3] = [1, 2, 4];

/// What a `vector` is where a file does not say.
pub fn single() -> usize {
    1
}

/// Whether a `vector` is that of single weights, which files do not say.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
pub fn is_single(vector: &usize) -> bool {
    *vector == 1
}

const MAGIC: [u8; 8] = *b"ANEMOLUT";
/// The latest version, of matrices of vectors; all others are of version 1.
const VERSION: u32 = 2;
const ALIGN: u64 = 64;

/// Shape of a lookup-table matrix; everything else about its layout follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LutShape {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Bits per index, one of [`BITS`].
    pub bits: u8,
    /// Rows that share a table. The last group may have fewer rows; Core AI can
    /// only express matrices where it does not ([`LutShape::has_equal_groups`]).
    pub group_rows: usize,
    /// Rows that an index stands for, one of [`VECTORS`]; divides rows and those of a group.
    pub vector: usize,
}

impl LutShape {
    /// Checks the numbers, and that all sizes derived from them fit into memory.
    ///
    /// # Errors
    /// [`LutError::Bits`] or [`LutError::Shape`].
    pub fn new(rows: usize, cols: usize, bits: u8, group_rows: usize) -> Result<Self, LutError> {
        if !BITS.contains(&bits) {
            return Err(LutError::Bits { found: bits.into() });
        }
        let addressable = rows
            .checked_mul(cols)
            .and_then(|n| n.checked_mul(8))
            .is_some_and(|n| isize::try_from(n).is_ok())
            && rows
                .checked_mul(2 << bits)
                .is_some_and(|n| isize::try_from(n).is_ok());
        if !addressable || rows == 0 || cols == 0 || group_rows == 0 {
            return Err(LutError::Shape {
                rows: rows as u64,
                cols: cols as u64,
                group_rows: group_rows as u64,
            });
        }
        Ok(Self {
            rows,
            cols,
            bits,
            group_rows,
            vector: 1,
        })
    }

    /// The same with indices that stand for `vector` rows each.
    ///
    /// # Errors
    /// [`LutError::Vector`].
    pub fn with_vector(self, vector: usize) -> Result<Self, LutError> {
        let whole = |rows: usize| rows.is_multiple_of(vector);
        let shape = Self { vector, ..self };
        if !VECTORS.contains(&vector) || !whole(self.rows) || !whole(self.group_rows) {
            return Err(LutError::Vector {
                vector: vector as u64,
                rows: self.rows,
                group_rows: self.group_rows,
            });
        }
        // Tables of vectors are larger by their length.
        let tables = shape.groups().checked_mul(shape.entries() * vector * 2);
        if tables.is_some_and(|n| isize::try_from(n).is_ok()) {
            return Ok(shape);
        }
        Err(LutError::Shape {
            rows: self.rows as u64,
            cols: self.cols as u64,
            group_rows: self.group_rows as u64,
        })
    }

    /// Number of tables.
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(self.group_rows)
    }

    /// Entries per table.
    pub fn entries(&self) -> usize {
        1 << self.bits
    }

    /// Values per table: as many for each entry as it has rows.
    pub fn values(&self) -> usize {
        self.entries() * self.vector
    }

    /// Rows of indices.
    pub fn index_rows(&self) -> usize {
        self.rows / self.vector
    }

    /// Whether every table serves the same number of rows, as `lut_to_dense` asks.
    pub fn has_equal_groups(&self) -> bool {
        self.rows.is_multiple_of(self.group_rows)
    }

    /// Bytes of all tables.
    pub fn tables_len(&self) -> usize {
        self.groups() * self.values() * size_of::<u16>()
    }

    /// Bytes of the packed indices.
    pub fn indices_len(&self) -> usize {
        packed_len(self.index_rows() * self.cols, self.bits)
    }

    /// Offset of the tables in a stored matrix.
    pub fn tables_offset(&self) -> u64 {
        HEADER_LEN as u64
    }

    /// Offset of the indices in a stored matrix.
    pub fn indices_offset(&self) -> u64 {
        (self.tables_offset() + self.tables_len() as u64).next_multiple_of(ALIGN)
    }

    /// Bytes of a stored matrix.
    pub fn file_len(&self) -> u64 {
        self.indices_offset() + self.indices_len() as u64
    }

    /// Reads the header of a stored matrix; `file_len` is the length of the whole file.
    ///
    /// # Errors
    /// Any header this version would not have written, or a file of another length.
    pub fn read_header(header: &[u8], file_len: u64) -> Result<Self, LutError> {
        let (Some(header), Some(magic)) = (header.get(..HEADER_LEN), header.first_chunk()) else {
            return Err(LutError::Truncated {
                found: header.len(),
            });
        };
        if *magic != MAGIC {
            return Err(LutError::Magic { found: *magic });
        }
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let vector = match u32_at(8) {
            1 => 1,
            VERSION => u64_at(56),
            found => return Err(LutError::Version { found }),
        };
        let bits = u8::try_from(u32_at(12)).map_err(|_| LutError::Bits {
            found: u32_at(12).into(),
        })?;
        let [rows, cols, group_rows] = [u64_at(16), u64_at(24), u64_at(32)];
        let too_large = |_| LutError::Shape {
            rows,
            cols,
            group_rows,
        };
        let shape = Self::new(
            usize::try_from(rows).map_err(too_large)?,
            usize::try_from(cols).map_err(too_large)?,
            bits,
            usize::try_from(group_rows).map_err(too_large)?,
        )?
        .with_vector(usize::try_from(vector).map_err(too_large)?)?;
        shape.expect("tables", shape.tables_len() as u64, u64_at(40))?;
        shape.expect("indices", shape.indices_len() as u64, u64_at(48))?;
        shape.expect("file", shape.file_len(), file_len)?;
        Ok(shape)
    }

    fn header(&self) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(&MAGIC);
        let version = if self.vector == 1 { 1 } else { VERSION };
        header[8..12].copy_from_slice(&version.to_le_bytes());
        header[12..16].copy_from_slice(&u32::from(self.bits).to_le_bytes());
        let fields = [
            self.rows,
            self.cols,
            self.group_rows,
            self.tables_len(),
            self.indices_len(),
            if self.vector == 1 { 0 } else { self.vector },
        ];
        for (slot, value) in header[16..].chunks_exact_mut(8).zip(fields) {
            slot.copy_from_slice(&(value as u64).to_le_bytes());
        }
        header
    }

    fn expect(&self, part: &'static str, expected: u64, found: u64) -> Result<(), LutError> {
        if expected == found {
            return Ok(());
        }
        Err(LutError::Length {
            part,
            rows: self.rows,
            cols: self.cols,
            expected,
            found,
        })
    }
}

/// A matrix of indices into tables. See the [module](self) for the layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LutMatrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Bits per index, one of [`BITS`].
    pub bits: u8,
    /// Rows that share a table; the last group may have fewer.
    pub group_rows: usize,
    /// Rows that an index stands for.
    pub vector: usize,
    /// f16 bit patterns, 2^`bits` ascending values or vectors per group of rows.
    pub tables: Vec<u16>,
    /// The packed indices.
    pub indices: Vec<u8>,
}

impl LutMatrix {
    /// Packs one index per weight or vector (row-major `codes`).
    ///
    /// # Errors
    /// Parts that do not fit the shape, an index beyond the table, or a table that
    /// is not finite and ascending.
    pub fn from_codes(shape: LutShape, tables: Vec<u16>, codes: &[u8]) -> Result<Self, LutError> {
        let count = shape.index_rows() * shape.cols;
        shape.expect("codes", count as u64, codes.len() as u64)?;
        if let Some(position) = codes.iter().position(|&c| (c as usize) >= shape.entries()) {
            return Err(LutError::Code {
                position,
                value: codes[position],
                bits: shape.bits,
            });
        }
        Self::from_parts(shape, tables, pack(codes, shape.bits))
    }

    /// Puts a matrix together from tables and packed indices.
    ///
    /// # Errors
    /// Parts that do not fit the shape, or a table that is not finite and ascending.
    pub fn from_parts(
        shape: LutShape,
        tables: Vec<u16>,
        indices: Vec<u8>,
    ) -> Result<Self, LutError> {
        let table_bytes = tables.len() as u64 * 2;
        shape.expect("tables", shape.tables_len() as u64, table_bytes)?;
        shape.expect("indices", shape.indices_len() as u64, indices.len() as u64)?;
        for (group, table) in tables.chunks_exact(shape.values()).enumerate() {
            check_table(group, table, shape.vector)?;
        }
        Ok(Self {
            rows: shape.rows,
            cols: shape.cols,
            bits: shape.bits,
            group_rows: shape.group_rows,
            vector: shape.vector,
            tables,
            indices,
        })
    }

    /// Reads a whole stored matrix.
    ///
    /// # Errors
    /// Anything that [`LutMatrix::write_to`] would not have written.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, LutError> {
        let shape = LutShape::read_header(bytes, bytes.len() as u64)?;
        let part = |offset: u64, len: usize| &bytes[offset as usize..][..len];
        let tables = part(shape.tables_offset(), shape.tables_len())
            .chunks_exact(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
            .collect();
        let indices = part(shape.indices_offset(), shape.indices_len()).to_vec();
        Self::from_parts(shape, tables, indices)
    }

    /// Writes header, tables and indices.
    ///
    /// # Errors
    /// Any error of `out`.
    pub fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let shape = self.shape();
        out.write_all(&shape.header())?;
        let tables: Vec<u8> = self.tables.iter().flat_map(|v| v.to_le_bytes()).collect();
        out.write_all(&tables)?;
        let end = shape.tables_offset() + tables.len() as u64;
        let padding = [0; ALIGN as usize];
        out.write_all(&padding[..(shape.indices_offset() - end) as usize])?;
        out.write_all(&self.indices)
    }

    /// The shape alone.
    pub fn shape(&self) -> LutShape {
        LutShape {
            rows: self.rows,
            cols: self.cols,
            bits: self.bits,
            group_rows: self.group_rows,
            vector: self.vector,
        }
    }

    /// One index per weight or vector, row-major.
    pub fn codes(&self) -> Vec<u8> {
        let count = self.shape().index_rows() * self.cols;
        unpack(&self.indices, self.bits, 0, count)
    }

    /// The table of a group, widened; vectors one after the other.
    pub fn table(&self, group: usize) -> Vec<f32> {
        let values = self.shape().values();
        self.tables[group * values..][..values]
            .iter()
            .map(|&bits| f16::from_bits(bits).to_f32())
            .collect()
    }

    /// Writes the weights of row `row` to `out`, which has one place per column.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let table = self.table(row / self.group_rows);
        let first = row / self.vector * self.cols;
        let codes = unpack(&self.indices, self.bits, first, self.cols);
        for (out, code) in out.iter_mut().zip(codes) {
            *out = table[usize::from(code) * self.vector + row % self.vector];
        }
    }

    /// All weights, row-major: what `lut_to_dense` computes.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, out) in out.chunks_exact_mut(self.cols).enumerate() {
            self.dequantize_row(row, out);
        }
        out
    }
}

fn check_table(group: usize, table: &[u16], vector: usize) -> Result<(), LutError> {
    let value = |bits: u16| f16::from_bits(bits).to_f32();
    for (at, &bits) in table.iter().enumerate() {
        if !value(bits).is_finite() {
            return Err(LutError::NotFinite {
                group,
                entry: at / vector,
                value: value(bits),
            });
        }
    }
    let vectors = |at: usize| {
        table[at * vector..][..vector]
            .iter()
            .map(|&bits| value(bits))
    };
    match (1..table.len() / vector).find(|&at| vectors(at).lt(vectors(at - 1))) {
        Some(entry) => Err(LutError::NotAscending { group, entry }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
