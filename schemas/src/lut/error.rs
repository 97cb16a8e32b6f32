//! What is wrong with a lookup-table matrix.

use super::{BITS, HEADER_LEN, VECTORS, VERSION};

/// Why bytes or parts are not a lookup-table matrix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LutError {
    /// The file is shorter than its header.
    #[error("{found} bytes are too few for the {HEADER_LEN}-byte header of a lookup-table matrix")]
    Truncated {
        /// Bytes there are.
        found: usize,
    },
    /// Another kind of file.
    #[error("no lookup-table matrix: the file starts with {found:02x?} instead of `ANEMOLUT`")]
    Magic {
        /// The first eight bytes.
        found: [u8; 8],
    },
    /// Written by a later version of the tools.
    #[error(
        "version {found} of the lookup-table matrix format is unknown, this program reads up to version {VERSION}"
    )]
    Version {
        /// The version in the header.
        found: u32,
    },
    /// An index width without a Core AI type.
    #[error("{found} bits per index are not supported, expected one of {BITS:?}")]
    Bits {
        /// The width asked for.
        found: u64,
    },
    /// No rows, no columns or no rows in a group, or more than memory can address.
    #[error(
        "a matrix of {rows} x {cols} in groups of {group_rows} rows is empty or too large to address"
    )]
    Shape {
        /// Rows.
        rows: u64,
        /// Columns.
        cols: u64,
        /// Rows per table.
        group_rows: u64,
    },
    /// Vectors of a length that is not supported, or does not divide the rows.
    #[error(
        "vectors of {vector} rows in a matrix of {rows} rows, {group_rows} to a table: \
         expected one of {VECTORS:?} that divides both"
    )]
    Vector {
        /// Rows of a vector.
        vector: u64,
        /// Rows.
        rows: usize,
        /// Rows per table.
        group_rows: usize,
    },
    /// A part that does not have the length its shape asks for.
    #[error("{part} of a {rows} x {cols} matrix: expected {expected} bytes, found {found}")]
    Length {
        /// `tables`, `indices`, `codes` or `file`.
        part: &'static str,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// What the shape asks for.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// A table value that is infinite or not a number.
    #[error("entry {entry} of table {group} is {value}, expected a finite f16 value")]
    NotFinite {
        /// Which table.
        group: usize,
        /// Which value of it.
        entry: usize,
        /// The value.
        value: f32,
    },
    /// A table whose values do not ascend.
    #[error("entry {entry} of table {group} is smaller than the one before it, tables must ascend")]
    NotAscending {
        /// Which table.
        group: usize,
        /// Which value of it.
        entry: usize,
    },
    /// An index beyond its table.
    #[error("index {value} of weight {position} does not fit into {bits} bits")]
    Code {
        /// Row-major position of the weight.
        position: usize,
        /// The index found.
        value: u8,
        /// Bits per index.
        bits: u8,
    },
}
