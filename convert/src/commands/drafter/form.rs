//! Forms of a drafter's matrices. Each has a length that the shape fixes, so a plan makes
//! the same program without reading a matrix.

use std::path::PathBuf;

use anemone_schemas::aimodel::ir::{BlobData, Elem};
use anemone_schemas::lut::DEFAULT_GROUP_ROWS;

use crate::lower::Part;

/// The form of a drafter's matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightForm {
    /// Half precision.
    #[default]
    F16,
    /// Tables of 16 values, one for each 32 rows.
    Lut4,
    /// Tables of 256 values, one for each 32 rows.
    Lut8,
    /// Eight-bit integers, and a factor in half precision for each row.
    Int8,
}

impl WeightForm {
    /// Its name in the manifest.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Lut4 => "lut4-g32",
            Self::Lut8 => "lut8-g32",
            Self::Int8 => "int8-row",
        }
    }

    /// Bits of an index, if it has tables.
    pub(super) fn bits(self) -> Option<u8> {
        match self {
            Self::F16 | Self::Int8 => None,
            Self::Lut4 => Some(4),
            Self::Lut8 => Some(8),
        }
    }

    /// The form that a matrix of so many rows gets: one without whole tables stays f16.
    pub(super) fn of(self, rows: usize) -> Self {
        if self.bits().is_some() && !rows.is_multiple_of(DEFAULT_GROUP_ROWS) {
            return Self::F16;
        }
        self
    }

    /// A matrix in this form, lengths alone.
    pub(super) fn outline(self, [rows, cols]: [usize; 2]) -> Part {
        let blob = |len: usize| BlobData::File {
            path: PathBuf::new(),
            offset: 0,
            len: len as u64,
        };
        match self.bits() {
            Some(bits) => Part::Lut {
                elem: index(bits),
                group_rows: DEFAULT_GROUP_ROWS,
                indices: blob(rows * cols * usize::from(bits) / 8),
                tables: blob((rows / DEFAULT_GROUP_ROWS * 2) << bits),
            },
            None if self == Self::Int8 => Part::Int8 {
                entries: blob(rows * cols),
                scales: blob(rows * 2),
            },
            None => Part::F16(blob(rows * cols * 2)),
        }
    }
}

/// Type of an index of so many bits.
pub(super) fn index(bits: u8) -> Elem {
    if bits == 4 { Elem::Ui4 } else { Elem::Ui8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_without_whole_tables_stay_f16_but_have_rows_to_scale() {
        assert_eq!(WeightForm::Lut4.of(48), WeightForm::F16);
        assert_eq!(WeightForm::Lut8.of(64), WeightForm::Lut8);
        assert_eq!(WeightForm::Int8.of(48), WeightForm::Int8);
    }
}
