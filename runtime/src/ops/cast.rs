//! Conversion between element types.

use std::sync::Arc;

use anemone_schemas::aimodel::ir::Elem;
use half::{bf16, f16};

use super::Float;
use crate::tensor::Data;
use crate::view::{View, storage_order};

/// Conversion to `elem`: floats round to nearest even, to integers they truncate
/// and saturate; to i1 it is `!= 0`.
pub(crate) fn cast(x: View, elem: Elem) -> View {
    let order = storage_order(&x.shape, &[&x.strides]);
    let x = if x.fills_buffer() {
        x
    } else {
        x.copied(&order)
    };
    let data = cast_data(&x.data, elem);
    View {
        data: Arc::new(data),
        ..x
    }
}

fn cast_data(data: &Data, elem: Elem) -> Data {
    macro_rules! to {
        ($convert:expr) => {
            match data {
                Data::F16(v) => v
                    .iter()
                    .map(|x| $convert(f64::from(*x)))
                    .collect::<Vec<_>>(),
                Data::Bf16(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::F32(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::I32(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::I16(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::I8(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::U32(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::U16(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::U8(v) => v.iter().map(|x| $convert(f64::from(*x))).collect(),
                Data::Bool(v) => v
                    .iter()
                    .map(|x| $convert(f64::from(u8::from(*x))))
                    .collect(),
            }
            .into()
        };
    }
    match (data, elem) {
        (Data::F16(v), Elem::F32) => {
            let mut out = vec![0.0; v.len()];
            f16::load(v, &mut out);
            out.into()
        }
        (Data::F32(v), Elem::F16) => {
            let mut out = vec![f16::ZERO; v.len()];
            f16::store(v, &mut out);
            out.into()
        }
        (_, Elem::F16) => to!(f16::from_f64),
        (_, Elem::Bf16) => to!(bf16::from_f64),
        (_, Elem::F32) => to!(|x| x as f32),
        (_, Elem::Bool) => to!(|x: f64| x != 0.0),
        // Integers to integers keep the low bits.
        (Data::F16(_) | Data::Bf16(_) | Data::F32(_), _) => match elem {
            Elem::Si32 => to!(|x| x as i32),
            Elem::Si16 => to!(|x| x as i16),
            Elem::Si8 => to!(|x| x as i8),
            Elem::Ui32 => to!(|x| x as u32),
            Elem::Ui16 => to!(|x| x as u16),
            _ => to!(|x| x as u8),
        },
        _ => match elem {
            Elem::Si32 => to!(|x| x as i64 as i32),
            Elem::Si16 => to!(|x| x as i64 as i16),
            Elem::Si8 => to!(|x| x as i64 as i8),
            Elem::Ui32 => to!(|x| x as i64 as u32),
            Elem::Ui16 => to!(|x| x as i64 as u16),
            _ => to!(|x| x as i64 as u8),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_truncate_floats_and_saturate() {
        let x = View::dense(&[5], Data::F32(vec![2.9, -2.9, 300.0, -1.0, f32::NAN]));
        assert_eq!(
            *cast(x.clone(), Elem::Ui8).data,
            Data::U8(vec![2, 0, 255, 0, 0])
        );
        assert_eq!(
            *cast(x.clone(), Elem::Si32).data,
            Data::I32(vec![2, -2, 300, -1, 0])
        );
        assert_eq!(*cast(x, Elem::Bool).data, Data::Bool(vec![true; 5]));
    }
}
