//! A drafter's tables and those of its model: which of them are one, and all of them as
//! constants of the program.

use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::asset;
use anemone_schemas::aimodel::ir::{Attr, Blob, BlobData, Module, Op};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::drafter::{self, DrafterCheckpoint, layer_tensor};
use anemone_schemas::manifest::{DrafterHead, Manifest};
use anemone_schemas::mapped::MappedFile;
use anemone_schemas::spec::LM_HEAD;

use super::matrices::{self, Matrices, Scratch, Source};
use super::{HeadSource, SHARED};
use crate::error::Error;
use crate::lower::{ConfidenceWeights, DrafterWeights, Layer, Linear, Markov, Part, function_name};
use crate::stop::Stop;

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
        self.checkpoint
            .for_each_block(name, matrices::BLOCK, |values| {
                matrices::halves(values, &mut buffer);
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
        scratch.f16(self.own(drafter::EMBEDDING), stop)?;
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

    /// Puts all weights into the module, matrices as `writer` makes them.
    pub(super) fn register(
        &self,
        module: &mut Module,
        head: DrafterHead,
        mut writer: Matrices<'_>,
    ) -> Result<DrafterWeights, Error> {
        let spec = self.checkpoint.spec();
        let vector =
            |name: &str| -> Result<Vec<f32>, Error> { Ok(self.checkpoint.read_f32(name)?) };
        let fuse = writer.linear(module, self.own(drafter::FUSE), drafter::FUSE)?;
        let mut layers = Vec::with_capacity(spec.layers);
        for l in 0..spec.layers {
            let mut linear = |part| {
                let name = layer_tensor(l, part);
                writer.linear(module, self.own(&name), &name)
            };
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
            let previous = writer.f16(self.own(drafter::MARKOV_IN))?;
            Some(Markov {
                previous: module.add_blob(Blob {
                    key: drafter::MARKOV_IN.to_string(),
                    data: previous,
                }),
                next: writer.linear(module, self.own(drafter::MARKOV_OUT), drafter::MARKOV_OUT)?,
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
            _ => vec![self.exact_head(module, &mut writer)?],
        };
        writer.finish()?;
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

    /// A matrix of the drafter.
    fn own<'b>(&'b self, name: &'b str) -> Source<'b> {
        Source::Drafter(self.checkpoint, name)
    }

    /// The output layer: the drafter's own bytes, the model's, or its tied embedding.
    fn exact_head(&self, module: &mut Module, writer: &mut Matrices<'_>) -> Result<Linear, Error> {
        let name = drafter::LM_HEAD;
        if self.checkpoint.has(name) {
            return writer.linear(module, self.own(name), name);
        }
        if let Some(model) = self.model {
            return writer.linear(module, Source::Model(model), name);
        }
        let shape = self.manifest.embedding.shape;
        let part = Part::F16(BlobData::File {
            path: self.table_path(),
            offset: 0,
            len: 2 * shape.iter().product::<usize>() as u64,
        });
        Ok(Linear::register(module, name, shape, part))
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

/// Name of the model's table that the drafter's `i`-th of [`SHARED`] may equal.
fn of_model(i: usize) -> &'static str {
    [anemone_schemas::spec::EMBEDDING, LM_HEAD][i]
}
