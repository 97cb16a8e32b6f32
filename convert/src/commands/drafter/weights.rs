//! A drafter's matrices in the form the program keeps them, and which of them are the
//! model's.
//!
//! Matrices go through a scratch file in blocks, so that the largest costs no more
//! memory than the smallest.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::asset;
use anemone_schemas::aimodel::ir::{Attr, Blob, BlobData, Elem, Module, Op};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::drafter::{self, DrafterCheckpoint, layer_tensor};
use anemone_schemas::lut::DEFAULT_GROUP_ROWS;
use anemone_schemas::manifest::{DrafterHead, Manifest};
use anemone_schemas::mapped::MappedFile;
use anemone_schemas::spec::LM_HEAD;
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{DrafterOptions, HeadSource, SHARED};
use crate::error::Error;
use crate::lower::{ConfidenceWeights, DrafterWeights, Layer, Linear, Markov, Part, function_name};
use crate::quantize::{Calibration, Matrix, Method, Quantizer, Settings};
use crate::stop::Stop;

/// Elements converted at a time.
const BLOCK: usize = 1 << 20;

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
}

impl WeightForm {
    /// Its name in the manifest.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Lut4 => "lut4-g32",
            Self::Lut8 => "lut8-g32",
        }
    }

    fn bits(self) -> Option<u8> {
        match self {
            Self::F16 => None,
            Self::Lut4 => Some(4),
            Self::Lut8 => Some(8),
        }
    }
}

/// Where a matrix is read from.
#[derive(Clone, Copy)]
enum Source<'a> {
    Drafter(&'a str),
    Model(&'a Checkpoint),
}

/// The drafter's weights, and what is known of their likeness to the model's.
pub(super) struct Tables<'a> {
    checkpoint: &'a DrafterCheckpoint,
    manifest: &'a Manifest,
    folder: &'a Path,
    model: Option<&'a Checkpoint>,
    /// Whether embedding and output layer are the model's, where that is known.
    same: [Option<bool>; 2],
}

impl<'a> Tables<'a> {
    pub(super) fn new(
        checkpoint: &'a DrafterCheckpoint,
        manifest: &'a Manifest,
        folder: &'a Path,
        model: Option<&'a Checkpoint>,
    ) -> Self {
        Self {
            checkpoint,
            manifest,
            folder,
            model,
            same: [None; 2],
        }
    }

    /// Compares embedding and output layer with the model's: with its checkpoint byte
    /// for byte if that is given, else in fp16 with the folder's embedding table, which
    /// is the output layer too where the model ties them. A table that the drafter does
    /// not bring is the model's.
    pub(super) fn compare(&mut self, stop: &Stop) -> Result<(), Error> {
        for (i, name) in SHARED.into_iter().enumerate() {
            stop.check()?;
            let in_folder = i == 0 || self.manifest.model.tied_head;
            self.same[i] = match self.model {
                _ if !self.checkpoint.has(name) => Some(true),
                Some(model) => {
                    let (ours, theirs) =
                        (self.checkpoint.tensor(name)?, model.tensor(of_model(i))?);
                    Some(ours.dtype == theirs.dtype && ours.bytes == theirs.bytes)
                }
                None if in_folder => Some(self.equals_table(name)?),
                None => None,
            };
        }
        Ok(())
    }

    fn equals_table(&self, name: &str) -> Result<bool, Error> {
        let path = self.table_path();
        let table = MappedFile::open(&path).map_err(|e| Error::io(&path, &e))?;
        let (mut at, mut equal) = (0, true);
        let mut buffer = Vec::new();
        self.checkpoint.for_each_block(name, BLOCK, |values| {
            halves(values, &mut buffer);
            let end = at + buffer.len();
            equal = equal && table.get(at..end) == Some(&buffer[..]);
            at = end;
        })?;
        Ok(equal && at == table.len())
    }

    fn table_path(&self) -> PathBuf {
        self.folder.join(&self.manifest.embedding.path)
    }

    /// Whether the block's embeddings come from the model's table.
    pub(super) fn embedding_is_shared(&self) -> bool {
        self.same[0] == Some(true)
    }

    /// Writes the drafter's own embedding table.
    pub(super) fn write_embedding(&self, to: &Path, stop: &Stop) -> Result<(), Error> {
        let mut scratch = Scratch::create(to)?;
        scratch.convert(self.checkpoint, Source::Drafter(drafter::EMBEDDING), stop)?;
        scratch.finish()
    }

    /// Where the output layer comes from.
    pub(super) fn head(&self, wanted: HeadSource) -> Result<DrafterHead, Error> {
        let tied = self.manifest.model.tied_head;
        let own = self.checkpoint.has(drafter::LM_HEAD);
        let exact = own || tied || self.model.is_some();
        match (wanted, exact) {
            (HeadSource::Chunk, _) | (HeadSource::Auto, false) => Ok(DrafterHead::Chunk),
            (HeadSource::Exact, false) => Err(Error::usage(format!(
                "`{}` has no `{}`, and the model's is in the folder only quantized",
                self.checkpoint.dir().display(),
                drafter::LM_HEAD
            ))
            .hint("pass the model's checkpoint with `--model`, or `--head chunk`")),
            (_, true) if self.same[1] == Some(true) => Ok(DrafterHead::Model),
            (_, true) => Ok(DrafterHead::Own),
        }
    }

    /// Puts all weights into the module, by way of the file `scratch`.
    pub(super) fn register(
        &self,
        module: &mut Module,
        head: DrafterHead,
        options: &DrafterOptions,
        scratch: &Path,
        stop: &Stop,
    ) -> Result<DrafterWeights, Error> {
        let spec = self.checkpoint.spec();
        let mut writer = Writer {
            tables: self,
            scratch: Scratch::create(scratch)?,
            quantizer: match options.weights.bits() {
                None => None,
                Some(bits) => {
                    let settings = Settings {
                        bits,
                        ..Settings::default()
                    };
                    Some(Quantizer::new(settings, options.jobs)?)
                }
            },
            stop,
        };
        let vector =
            |name: &str| -> Result<Vec<f32>, Error> { Ok(self.checkpoint.read_f32(name)?) };
        let fuse = writer.linear(module, drafter::FUSE)?;
        let mut layers = Vec::with_capacity(spec.layers);
        for l in 0..spec.layers {
            let mut linear = |part| writer.linear(module, &layer_tensor(l, part));
            let norm = |part| vector(&layer_tensor(l, part));
            layers.push(Layer {
                q: linear("self_attn.q_proj")?,
                k: linear("self_attn.k_proj")?,
                v: linear("self_attn.v_proj")?,
                o: linear("self_attn.o_proj")?,
                gate: linear("mlp.gate_proj")?,
                up: linear("mlp.up_proj")?,
                down: linear("mlp.down_proj")?,
                input_norm: norm("input_layernorm")?,
                post_norm: norm("post_attention_layernorm")?,
                q_norm: norm("self_attn.q_norm")?,
                k_norm: norm("self_attn.k_norm")?,
            });
        }
        let markov = if spec.markov_rank > 0 {
            let previous = writer.f16(Source::Drafter(drafter::MARKOV_IN))?;
            Some(Markov {
                previous: module.add_blob(Blob {
                    key: drafter::MARKOV_IN.to_string(),
                    data: previous,
                }),
                next: writer.linear(module, drafter::MARKOV_OUT)?,
            })
        } else {
            None
        };
        let confidence = if spec.confidence.is_some() {
            let mut hidden = vector(drafter::CONFIDENCE)?;
            let markov = hidden.split_off(spec.hidden);
            Some(ConfidenceWeights {
                hidden,
                markov,
                bias: vector(drafter::CONFIDENCE_BIAS)?[0],
            })
        } else {
            None
        };
        let head = match head {
            DrafterHead::Chunk => self.chunk_head(module)?,
            _ => vec![writer.head(module)?],
        };
        writer.scratch.finish()?;
        Ok(DrafterWeights {
            fuse,
            fuse_norm: vector(drafter::FUSE_NORM)?,
            layers,
            norm: vector(drafter::FINAL_NORM)?,
            head,
            markov,
            confidence,
        })
    }

    /// The output layer as the last chunk has it: its slices in the order of their rows.
    fn chunk_head(&self, module: &mut Module) -> Result<Vec<Linear>, Error> {
        let chunk = self.manifest.chunks.last();
        let chunk = chunk.ok_or_else(|| Error::bad_input("a folder without chunks"))?;
        let path = self.folder.join(&chunk.path);
        let program = asset::open_asset(&path)?;
        let (context, width) = (self.manifest.contexts[0], self.manifest.widths[0]);
        let parts = lookup_tables(&program, &function_name(context, width), LM_HEAD);
        let hidden = self.manifest.model.hidden;
        let rows: usize = parts.iter().map(|p| p.0).sum();
        if rows != self.manifest.model.vocab {
            return Err(Error::bad_input(format!(
                "`{}` has {rows} rows of `{LM_HEAD}` in lookup tables, expected {}",
                path.display(),
                self.manifest.model.vocab
            ))
            .hint("pass the model's checkpoint with `--model`"));
        }
        Ok(parts
            .into_iter()
            .enumerate()
            .map(|(i, (rows, part))| {
                Linear::register(module, &format!("{LM_HEAD}.{i}"), [rows, hidden], part)
            })
            .collect())
    }
}

/// Rows and bytes of the table look-ups of a function whose indices are blobs of the
/// matrix `name`, in program order.
fn lookup_tables(program: &Module, function: &str, name: &str) -> Vec<(usize, Part)> {
    let Some(graph) = program.graph(function) else {
        return Vec::new();
    };
    let ops: Vec<&Op> = program
        .region(graph.region)
        .ops
        .iter()
        .map(|&o| program.op(o))
        .collect();
    let blob = |value| {
        let constant = ops.iter().find(|o| o.results.contains(&value))?;
        match program.attr(constant.prop("value")?) {
            Attr::Resource(blob) => Some(program.blob(*blob)),
            _ => None,
        }
    };
    let part = |op: &Op| {
        let [indices, tables, ..] = op.operands[..] else {
            return None;
        };
        let (elem, shape) = (
            program.tensor_type(indices)?.elem,
            program.tensor_type(indices)?.dims()?,
        );
        let groups = *program.tensor_type(tables)?.dims()?.first()?;
        let (indices, tables) = (blob(indices)?, blob(tables)?);
        let rows = *shape.first()?;
        if !indices.key.starts_with(name) || groups == 0 {
            return None;
        }
        let part = Part::Lut {
            elem,
            group_rows: rows / groups,
            indices: indices.data.clone(),
            tables: tables.data.clone(),
        };
        Some((rows, part))
    };
    let lookups = ops.iter().filter(|o| o.name == "primitive.lut_to_dense_v1");
    lookups.filter_map(|op| part(op)).collect()
}

/// Converts matrices one after the other.
struct Writer<'a> {
    tables: &'a Tables<'a>,
    scratch: Scratch,
    quantizer: Option<Quantizer>,
    stop: &'a Stop,
}

impl Writer<'_> {
    fn linear(&mut self, module: &mut Module, name: &str) -> Result<Linear, Error> {
        self.matrix(module, Source::Drafter(name), name)
    }

    /// The output layer: the drafter's own bytes, the model's, or its tied embedding.
    fn head(&mut self, module: &mut Module) -> Result<Linear, Error> {
        if self.tables.checkpoint.has(drafter::LM_HEAD) {
            return self.linear(module, drafter::LM_HEAD);
        }
        if let Some(model) = self.tables.model {
            return self.matrix(module, Source::Model(model), drafter::LM_HEAD);
        }
        let shape = self.tables.manifest.embedding.shape;
        let part = Part::F16(BlobData::File {
            path: self.tables.table_path(),
            offset: 0,
            len: 2 * shape.iter().product::<usize>() as u64,
        });
        Ok(Linear::register(module, drafter::LM_HEAD, shape, part))
    }

    fn matrix(
        &mut self,
        module: &mut Module,
        from: Source<'_>,
        name: &str,
    ) -> Result<Linear, Error> {
        let shape = from.shape(self.tables.checkpoint)?;
        let [rows, _] = shape;
        let part = match &self.quantizer {
            Some(quantizer) if rows % DEFAULT_GROUP_ROWS == 0 => {
                self.stop.check()?;
                let values = from.values(self.tables.checkpoint)?;
                quantized(&mut self.scratch, quantizer, name, shape, &values)?
            }
            _ => Part::F16(self.f16(from)?),
        };
        Ok(Linear::register(module, name, shape, part))
    }

    fn f16(&mut self, from: Source<'_>) -> Result<BlobData, Error> {
        self.scratch
            .convert(self.tables.checkpoint, from, self.stop)
    }
}

fn quantized(
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
        elem: if lut.bits == 4 { Elem::Ui4 } else { Elem::Ui8 },
        group_rows: lut.group_rows,
        indices: scratch.append(&lut.indices)?,
        tables: scratch.append(&tables)?,
    })
}

impl Source<'_> {
    fn shape(self, checkpoint: &DrafterCheckpoint) -> Result<[usize; 2], Error> {
        let shape = match self {
            Self::Drafter(name) => checkpoint.tensor(name)?.shape,
            Self::Model(model) => model.tensor(LM_HEAD)?.shape,
        };
        match shape {
            &[rows, cols] => Ok([rows, cols]),
            other => Err(Error::bad_input(format!("a matrix of shape {other:?}"))),
        }
    }

    fn values(self, checkpoint: &DrafterCheckpoint) -> Result<Vec<f32>, Error> {
        Ok(match self {
            Self::Drafter(name) => checkpoint.read_f32(name)?,
            Self::Model(model) => model.read_f32(LM_HEAD)?.1,
        })
    }
}

/// Name of the model's table that the drafter's `i`-th of [`SHARED`] may equal.
fn of_model(i: usize) -> &'static str {
    [anemone_schemas::spec::EMBEDDING, LM_HEAD][i]
}

/// A file that matrices are appended to.
struct Scratch {
    out: BufWriter<File>,
    path: PathBuf,
    at: u64,
}

impl Scratch {
    fn create(path: &Path) -> Result<Self, Error> {
        let file = File::create(path).map_err(|e| Error::io(path, &e))?;
        Ok(Self {
            out: BufWriter::with_capacity(1 << 20, file),
            path: path.to_path_buf(),
            at: 0,
        })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<BlobData, Error> {
        self.out
            .write_all(bytes)
            .map_err(|e| Error::io(&self.path, &e))?;
        let data = BlobData::File {
            path: self.path.clone(),
            offset: self.at,
            len: bytes.len() as u64,
        };
        self.at += bytes.len() as u64;
        Ok(data)
    }

    /// Appends a matrix in fp16.
    fn convert(
        &mut self,
        checkpoint: &DrafterCheckpoint,
        from: Source<'_>,
        stop: &Stop,
    ) -> Result<BlobData, Error> {
        let start = self.at;
        let mut buffer = Vec::new();
        let mut failure = None;
        let mut each = |values: &[f32]| {
            if failure.is_some() {
                return;
            }
            halves(values, &mut buffer);
            let large = values.iter().find(|v| f16::from_f32(**v).is_infinite());
            failure = match large {
                Some(v) => Some(Error::bad_input(format!(
                    "a weight of {v} is too large for fp16"
                ))),
                None => stop
                    .check()
                    .map_err(Error::from)
                    .and_then(|()| self.append(&buffer))
                    .err(),
            };
        };
        match from {
            Source::Drafter(name) => checkpoint.for_each_block(name, BLOCK, &mut each)?,
            Source::Model(model) => {
                let [rows, cols] = from.shape(checkpoint)?;
                let step = (BLOCK / cols).max(1);
                for first in (0..rows).step_by(step) {
                    let rows: Vec<u32> =
                        (first..rows.min(first + step)).map(|r| r as u32).collect();
                    each(&model.read_rows_f32(LM_HEAD, &rows)?);
                }
            }
        }
        match failure {
            Some(e) => Err(e),
            None => Ok(BlobData::File {
                path: self.path.clone(),
                offset: start,
                len: self.at - start,
            }),
        }
    }

    fn finish(mut self) -> Result<(), Error> {
        self.out.flush().map_err(|e| Error::io(&self.path, &e))
    }
}

/// Little-endian fp16 of `values`, rounded to nearest even.
fn halves(values: &[f32], out: &mut Vec<u8>) {
    let mut rounded = vec![f16::ZERO; values.len()];
    rounded.convert_from_f32_slice(values);
    out.clear();
    out.extend(rounded.iter().flat_map(|v| v.to_le_bytes()));
}
