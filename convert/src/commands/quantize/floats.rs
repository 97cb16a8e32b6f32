//! Numbers of scratch files, little-endian f32.

use std::io::{self, Read, Write};

/// Writes values one after another.
pub(in crate::commands) fn write_f32<'a>(
    out: &mut impl Write,
    values: impl Iterator<Item = &'a f32>,
) -> io::Result<()> {
    for value in values {
        out.write_all(&value.to_le_bytes())?;
    }
    Ok(())
}

/// Reads the next values.
pub(in crate::commands) fn read_f32(from: &mut impl Read, count: usize) -> io::Result<Vec<f32>> {
    let mut bytes = vec![0; count * 4];
    from.read_exact(&mut bytes)?;
    let (values, _) = bytes.as_chunks::<4>();
    Ok(values.iter().map(|b| f32::from_le_bytes(*b)).collect())
}
