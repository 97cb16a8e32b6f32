//! A drafter's matrices in the form the program keeps them.
//!
//! They go through a scratch file in blocks of rows, so that the largest costs no more
//! memory than the smallest; those that get tables are read whole, one at a time.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::ir::{BlobData, Module};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::drafter::DrafterCheckpoint;
use anemone_schemas::spec::LM_HEAD;
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::form::{WeightForm, index};
use crate::error::Error;
use crate::lower::{Linear, Part};
use crate::quantize::{Calibration, Matrix, Method, Quantizer, Settings, int8};
use crate::stop::Stop;

/// Elements converted at a time.
pub(super) const BLOCK: usize = 1 << 20;

/// Where a matrix is read from.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Drafter(&'a DrafterCheckpoint, &'a str),
    /// The output layer of the model.
    Model(&'a Checkpoint),
}

impl Source<'_> {
    fn shape(self) -> Result<[usize; 2], Error> {
        let shape = match self {
            Self::Drafter(checkpoint, name) => checkpoint.tensor(name)?.shape,
            Self::Model(model) => model.tensor(LM_HEAD)?.shape,
        };
        match shape {
            &[rows, cols] => Ok([rows, cols]),
            other => Err(Error::bad_input(format!("a matrix of shape {other:?}"))),
        }
    }

    fn values(self) -> Result<Vec<f32>, Error> {
        Ok(match self {
            Self::Drafter(checkpoint, name) => checkpoint.read_f32(name)?,
            Self::Model(model) => model.read_f32(LM_HEAD)?.1,
        })
    }

    /// Calls `each` with some whole rows after the other, until it fails.
    fn for_rows(
        self,
        stop: &Stop,
        mut each: impl FnMut(&[f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let [rows, cols] = self.shape()?;
        let step = (BLOCK / cols).max(1);
        let mut done = Ok(());
        let mut checked = |values: &[f32]| {
            if done.is_ok() {
                done = fits(values)
                    .and_then(|()| Ok(stop.check()?))
                    .and_then(|()| each(values));
            }
        };
        match self {
            Self::Drafter(checkpoint, name) => {
                checkpoint.for_each_block(name, step * cols, checked)?;
            }
            Self::Model(model) => {
                for first in (0..rows).step_by(step) {
                    let rows: Vec<u32> =
                        (first..rows.min(first + step)).map(|r| r as u32).collect();
                    checked(&model.read_rows_f32(LM_HEAD, &rows)?);
                }
            }
        }
        done
    }
}

/// Whether half precision can hold all of `values`.
fn fits(values: &[f32]) -> Result<(), Error> {
    match values.iter().find(|v| f16::from_f32(**v).is_infinite()) {
        Some(v) => Err(Error::bad_input(format!(
            "a weight of {v} is too large for fp16"
        ))),
        None => Ok(()),
    }
}

/// Makes matrices one after the other, or only their outlines.
pub(super) struct Matrices<'a> {
    form: WeightForm,
    made: Option<Made<'a>>,
}

struct Made<'a> {
    scratch: Scratch,
    quantizer: Option<Quantizer>,
    stop: &'a Stop,
}

impl<'a> Matrices<'a> {
    /// Matrices in `form` by way of the file `scratch`.
    pub(super) fn new(
        form: WeightForm,
        jobs: usize,
        scratch: &Path,
        stop: &'a Stop,
    ) -> Result<Self, Error> {
        let quantizer = form.bits().map(|bits| {
            let settings = Settings {
                bits,
                ..Settings::default()
            };
            Quantizer::new(settings, jobs)
        });
        let made = Some(Made {
            scratch: Scratch::create(scratch)?,
            quantizer: quantizer.transpose()?,
            stop,
        });
        Ok(Self { form, made })
    }

    /// Matrices of which only the lengths are of interest.
    pub(super) fn outlines(form: WeightForm) -> Self {
        Self { form, made: None }
    }

    pub(super) fn linear(
        &mut self,
        module: &mut Module,
        from: Source<'_>,
        name: &str,
    ) -> Result<Linear, Error> {
        let shape = from.shape()?;
        let form = self.form.of(shape[0]);
        let part = match &mut self.made {
            None => form.outline(shape),
            Some(made) => made.part(form, from, name, shape)?,
        };
        Ok(Linear::register(module, name, shape, part))
    }

    /// A matrix that stays in half precision whatever the form.
    pub(super) fn f16(&mut self, from: Source<'_>) -> Result<BlobData, Error> {
        match &mut self.made {
            None => match WeightForm::F16.outline(from.shape()?) {
                Part::F16(data) => Ok(data),
                _ => unreachable!("the outline has the form asked for"),
            },
            Some(made) => made.scratch.f16(from, made.stop),
        }
    }

    pub(super) fn finish(self) -> Result<(), Error> {
        self.made.map_or(Ok(()), |made| made.scratch.finish())
    }
}

impl Made<'_> {
    fn part(
        &mut self,
        form: WeightForm,
        from: Source<'_>,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Part, Error> {
        match &self.quantizer {
            Some(quantizer) if form != WeightForm::F16 => {
                self.stop.check()?;
                let values = from.values()?;
                tables(&mut self.scratch, quantizer, name, shape, &values)
            }
            None if form == WeightForm::Int8 => self.scratch.int8(from, self.stop),
            _ => Ok(Part::F16(self.scratch.f16(from, self.stop)?)),
        }
    }
}

fn tables(
    scratch: &mut Scratch,
    quantizer: &Quantizer,
    name: &str,
    [rows, cols]: [usize; 2],
    values: &[f32],
) -> Result<Part, Error> {
    let matrix = Matrix {
        name,
        rows,
        cols,
        data: values,
    };
    // Unweighted tables look at no statistics, only at their lengths.
    let calibration = Calibration {
        name,
        cols,
        hessian: &vec![0.0; cols * cols],
        sumsq: &vec![1.0; cols],
        rows: 1,
    };
    let prepared = quantizer.prepare(calibration, Method::KMeansUnweighted)?;
    let (lut, _) = quantizer.quantize(matrix, &prepared, None)?;
    let tables: Vec<u8> = lut.tables.iter().flat_map(|v| v.to_le_bytes()).collect();
    Ok(Part::Lut {
        elem: index(lut.bits),
        group_rows: lut.group_rows,
        indices: scratch.append(&lut.indices)?,
        tables: scratch.append(&tables)?,
    })
}

/// A file that matrices are appended to.
pub(super) struct Scratch {
    out: BufWriter<File>,
    path: PathBuf,
    at: u64,
}

impl Scratch {
    pub(super) fn create(path: &Path) -> Result<Self, Error> {
        let file = File::create(path).map_err(|e| Error::io(path, &e))?;
        Ok(Self {
            out: BufWriter::with_capacity(1 << 20, file),
            path: path.to_path_buf(),
            at: 0,
        })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<BlobData, Error> {
        let start = self.at;
        self.out
            .write_all(bytes)
            .map_err(|e| Error::io(&self.path, &e))?;
        self.at += bytes.len() as u64;
        Ok(self.since(start))
    }

    /// What was appended from `offset` on.
    fn since(&self, offset: u64) -> BlobData {
        BlobData::File {
            path: self.path.clone(),
            offset,
            len: self.at - offset,
        }
    }

    /// Appends a matrix in fp16.
    pub(super) fn f16(&mut self, from: Source<'_>, stop: &Stop) -> Result<BlobData, Error> {
        let start = self.at;
        let mut buffer = Vec::new();
        from.for_rows(stop, |values| {
            halves(values, &mut buffer);
            self.append(&buffer).map(drop)
        })?;
        Ok(self.since(start))
    }

    /// Appends a matrix as integers of eight bits, and the factors of its rows.
    fn int8(&mut self, from: Source<'_>, stop: &Stop) -> Result<Part, Error> {
        let [rows, cols] = from.shape()?;
        let start = self.at;
        let (mut scales, mut entries) = (Vec::with_capacity(2 * rows), Vec::new());
        from.for_rows(stop, |values| {
            entries.clear();
            for row in values.chunks(cols) {
                let scale = int8::row_scale(row);
                scales.extend(scale.to_le_bytes());
                let scale = scale.to_f32();
                entries.extend(row.iter().map(|v| int8::entry(*v, scale).cast_unsigned()));
            }
            self.append(&entries).map(drop)
        })?;
        let entries = self.since(start);
        let scales = self.append(&scales)?;
        Ok(Part::Int8 { entries, scales })
    }

    pub(super) fn finish(mut self) -> Result<(), Error> {
        self.out.flush().map_err(|e| Error::io(&self.path, &e))
    }
}

/// Little-endian fp16 of `values`, rounded to nearest even.
pub(super) fn halves(values: &[f32], out: &mut Vec<u8>) {
    let mut rounded = vec![f16::ZERO; values.len()];
    rounded.convert_from_f32_slice(values);
    out.clear();
    out.extend(rounded.iter().flat_map(|v| v.to_le_bytes()));
}
