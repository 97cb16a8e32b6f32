//! The state of a training in a file, so that an interrupted one goes on after its last step.
//!
//! ```text
//! 64 bytes  key of the training: what determines its result
//! u64       steps taken
//! then for every parameter, in the order of their names, and each of its numbers:
//!           f32 value, f64 mean gradient, f64 mean of its square
//! ```
//!
//! All numbers are little-endian.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use anemone_schemas::atomic;
use anemone_schemas::store::Key;

use super::student::Student;
use crate::error::Error;

/// Bytes before the numbers.
const HEADER: usize = 64 + 8;
/// Bytes of a number and its means.
const NUMBER: usize = 4 + 8 + 8;

/// Writes the state after so many steps.
///
/// # Errors
/// An error of the file, which is then as it was.
pub(super) fn write(path: &Path, key: &Key, student: &Student<'_>) -> Result<(), Error> {
    let fill = |out: &mut BufWriter<File>| -> io::Result<()> {
        out.write_all(key.as_str().as_bytes())?;
        out.write_all(&(student.steps() as u64).to_le_bytes())?;
        for (value, means) in student.numbers() {
            out.write_all(&value.to_le_bytes())?;
            out.write_all(&means[0].to_le_bytes())?;
            out.write_all(&means[1].to_le_bytes())?;
        }
        Ok(())
    };
    atomic::write_file(path, fill).map_err(|e| Error::io(path, &e))
}

/// Brings a student at its start to where an earlier run was, if that left a state of the same
/// training.
pub(super) fn resume(path: &Path, key: &Key, student: &mut Student<'_>) {
    let Ok(bytes) = fs::read(path) else {
        return;
    };
    let (Some(header), Some(numbers)) = (bytes.get(..HEADER), bytes.get(HEADER..)) else {
        return;
    };
    let (found, steps) = header.split_at(64);
    let expected = student.numbers().count().checked_mul(NUMBER);
    if found != key.as_str().as_bytes() || expected != Some(numbers.len()) {
        return;
    }
    let steps = u64::from_le_bytes(std::array::from_fn(|i| steps[i]));
    let f64_at =
        |of: &[u8; NUMBER], at: usize| f64::from_le_bytes(std::array::from_fn(|i| of[at + i]));
    let numbers = numbers.as_chunks::<NUMBER>().0.iter().map(|of| {
        let value = f32::from_le_bytes(std::array::from_fn(|i| of[i]));
        (value, [f64_at(of, 4), f64_at(of, 12)])
    });
    student.go_on(usize::try_from(steps).unwrap_or(usize::MAX), numbers);
}
