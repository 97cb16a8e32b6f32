//! Element types.

/// Element type of a tensor. The names are the dialect's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Elem {
    Bool,
    F64,
    F32,
    F16,
    Bf16,
    F8E5M2,
    F8E4M3,
    Tf32,
    F4E2M1,
    F8E8M0,
    ComplexF64,
    ComplexF32,
    ComplexF16,
    ComplexBf16,
    ComplexF8E5M2,
    ComplexF8E4M3,
    Si64,
    Si32,
    Si16,
    Si8,
    Si4,
    Si2,
    Ui64,
    Ui32,
    Ui16,
    Ui8,
    Ui6,
    Ui4,
    Ui3,
    Ui2,
    Ui1,
}

impl Elem {
    /// Bits one element takes in a resource blob; a bool takes a byte.
    pub fn bits(self) -> usize {
        match self {
            Self::ComplexF64 => 128,
            Self::F64 | Self::Si64 | Self::Ui64 | Self::ComplexF32 => 64,
            Self::F32
            | Self::Tf32
            | Self::Si32
            | Self::Ui32
            | Self::ComplexF16
            | Self::ComplexBf16 => 32,
            Self::F16
            | Self::Bf16
            | Self::Si16
            | Self::Ui16
            | Self::ComplexF8E5M2
            | Self::ComplexF8E4M3 => 16,
            Self::Bool | Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0 | Self::Si8 | Self::Ui8 => 8,
            Self::Ui6 => 6,
            Self::F4E2M1 | Self::Si4 | Self::Ui4 => 4,
            Self::Ui3 => 3,
            Self::Si2 | Self::Ui2 => 2,
            Self::Ui1 => 1,
        }
    }

    /// Whether it is a real floating-point type.
    pub(crate) fn is_float(self) -> bool {
        self >= Self::F64 && self <= Self::F8E8M0
    }

    /// Whether it is an integer type; a bool is not.
    pub(crate) fn is_integer(self) -> bool {
        self >= Self::Si64
    }

    /// Bytes of `n` elements in a resource blob: a bit stream, least significant
    /// bit first, without padding between rows. `None` on overflow.
    pub fn packed_len(self, n: usize) -> Option<usize> {
        Some(n.checked_mul(self.bits())?.div_ceil(8))
    }

    /// The dialect's name, as in `tensor<1x16xf16>`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "i1",
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E5M2 => "f8E5M2",
            Self::F8E4M3 => "f8E4M3FN",
            Self::Tf32 => "tf32",
            Self::F4E2M1 => "f4E2M1FN",
            Self::F8E8M0 => "f8E8M0FNU",
            Self::ComplexF64 => "complex<f64>",
            Self::ComplexF32 => "complex<f32>",
            Self::ComplexF16 => "complex<f16>",
            Self::ComplexBf16 => "complex<bf16>",
            Self::ComplexF8E5M2 => "complex<f8E5M2>",
            Self::ComplexF8E4M3 => "complex<f8E4M3FN>",
            Self::Si64 => "si64",
            Self::Si32 => "si32",
            Self::Si16 => "si16",
            Self::Si8 => "si8",
            Self::Si4 => "si4",
            Self::Si2 => "si2",
            Self::Ui64 => "ui64",
            Self::Ui32 => "ui32",
            Self::Ui16 => "ui16",
            Self::Ui8 => "ui8",
            Self::Ui6 => "ui6",
            Self::Ui4 => "ui4",
            Self::Ui3 => "ui3",
            Self::Ui2 => "ui2",
            Self::Ui1 => "ui1",
        }
    }
}
