//! Tensors that get no tables: fp16, or integers of eight bits.

use anemone_calib::Weights;
use anemone_schemas::exit::Exit;
use anemone_schemas::store::{DenseElem, DenseRecord, Key};
use half::f16;

use super::work::Work;
use crate::error::Error;
use crate::quantize::int8;

/// Rows in memory at a time.
const ROWS: usize = 1024;

/// Puts a tensor into a store in fp16; what fp16 cannot hold is refused.
pub(super) fn put_f16(
    work: &mut Work<'_>,
    weights: &dyn Weights,
    name: &str,
    shape: &[usize],
) -> Result<(), Error> {
    put(work, name, DenseElem::F16, shape, &mut |rows| {
        let values = weights.rows(name, rows)?;
        let mut bytes = Vec::with_capacity(values.len() * 2);
        for value in values {
            bytes.extend(finite(name, value, f16::from_f32(value))?.to_le_bytes());
        }
        Ok(bytes)
    })
}

/// Puts a matrix into a store as integers of eight bits, and the factors of its rows as fp16.
pub(super) fn put_int8(
    work: &mut Work<'_>,
    weights: &dyn Weights,
    name: &str,
    shape: &[usize],
) -> Result<(), Error> {
    let cols = shape[1];
    let factors = DenseRecord::scales(name);
    put(work, &factors, DenseElem::F16, &shape[..1], &mut |rows| {
        let values = weights.rows(name, rows)?;
        let mut bytes = Vec::with_capacity(rows.len() * 2);
        for row in values.chunks(cols) {
            let largest = row.iter().fold(0.0f32, |most, v| most.max(v.abs()));
            bytes.extend(finite(name, largest, int8::row_scale(row))?.to_le_bytes());
        }
        Ok(bytes)
    })?;
    put(work, name, DenseElem::I8, shape, &mut |rows| {
        let values = weights.rows(name, rows)?;
        let mut bytes = Vec::with_capacity(values.len());
        for row in values.chunks(cols) {
            let scale = int8::row_scale(row).to_f32();
            bytes.extend(row.iter().map(|v| int8::entry(*v, scale).cast_unsigned()));
        }
        Ok(bytes)
    })
}

/// Refuses what became infinite in fp16.
fn finite(name: &str, value: f32, half: f16) -> Result<f16, Error> {
    if half.is_finite() {
        return Ok(half);
    }
    let what = format!("`{name}` holds {value}, which fp16 cannot");
    Err(Error::new(Exit::Numerical, what))
}

/// Gives the bytes of rows.
type Encode<'a> = &'a mut dyn FnMut(&[u32]) -> Result<Vec<u8>, Error>;

/// Puts a tensor into a store, some rows at a time, unless it is there.
fn put(
    work: &mut Work<'_>,
    name: &str,
    elem: DenseElem,
    shape: &[usize],
    encode: Encode<'_>,
) -> Result<(), Error> {
    let tag: &[u8] = match elem {
        DenseElem::I8 => b"int8",
        _ => b"f16",
    };
    let key = Key::of([tag, work.seed.as_bytes(), name.as_bytes()]);
    if work.writer.has_dense(name, &key)? {
        return Ok(());
    }
    let all: Vec<u32> = (0..shape[0] as u32).collect();
    let mut failed = None;
    let put = work.writer.put_dense(name, &key, elem, shape, |out| {
        for rows in all.chunks(ROWS) {
            match encode(rows) {
                Ok(bytes) => out.write_all(&bytes)?,
                Err(e) => {
                    let message = e.message.clone();
                    failed = Some(e);
                    return Err(std::io::Error::other(message));
                }
            }
        }
        Ok(())
    });
    match failed {
        Some(e) => Err(e),
        None => Ok(put?),
    }
}
