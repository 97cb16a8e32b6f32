//! A Hugging Face model folder: `config.json` and memory-mapped safetensors.
//!
//! [`Checkpoint::open`] answers every question that can be asked before work begins:
//! is the config one we understand in full, is every shard complete, do index and
//! shards agree, is every tensor of the model there with its right shape, and is
//! there nothing else. What it returns can be read tensor by tensor without further
//! structural errors; only values can still be bad, and [`Checkpoint::read_f32`]
//! refuses those.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::hex;
use crate::mapped::MappedFile;
use crate::spec::{EMBEDDING, LM_HEAD, ModelSpec};

pub(crate) mod config;
mod error;
pub(crate) mod shards;
pub(crate) mod values;

#[cfg(test)]
mod tests;

pub use error::Error;
pub use values::Dtype;

use shards::Located;

/// Which table the output projection uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Head {
    /// The embedding table.
    Tied,
    /// `lm_head.weight`.
    Own,
}

/// A tensor as it lies in its file.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: &'a [usize],
    /// Little-endian elements; the start is not aligned.
    pub bytes: &'a [u8],
}

/// A tensor of the folder that the model does not use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ignored {
    /// Its name.
    pub tensor: String,
    /// Why nothing is lost.
    pub reason: String,
}

/// An open, fully checked model folder. See the [module documentation](self).
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    spec: ModelSpec,
    head: Head,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Located>,
    ignored: Vec<Ignored>,
    notes: Vec<String>,
    fingerprint: OnceLock<String>,
}

/// The spec of a folder by `config.json` and `generation_config.json` alone, without
/// weights; whether the output projection is tied is then what the config says.
///
/// # Errors
/// A config that is absent, malformed, or asks for what we do not compute.
pub fn read_spec(dir: &Path) -> Result<ModelSpec, Error> {
    config::read(dir, &mut Vec::new())
}

/// A mapped file and what it looked like when it was mapped.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) map: MappedFile,
    /// Time of the last change, and which file it is.
    state: (SystemTime, u64),
}

/// When a file was last changed, and its number in the file system where there is one.
fn state(meta: &Metadata) -> io::Result<(SystemTime, u64)> {
    #[cfg(unix)]
    let number = std::os::unix::fs::MetadataExt::ino(meta);
    #[cfg(not(unix))]
    let number = 0;
    Ok((meta.modified()?, number))
}

impl Checkpoint {
    /// Opens a folder and checks all of it but the values.
    ///
    /// # Errors
    /// Whatever is wrong with the folder, naming the file, key or tensor.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let mut notes = Vec::new();
        let mut spec = config::read(dir, &mut notes)?;
        let shards::Found {
            shards,
            mut tensors,
            notes: more,
        } = shards::open(dir)?;
        notes.extend(more);
        let mut ignored = Vec::new();
        let head = decide_head(dir, &spec, &shards, &tensors, &mut notes)?;
        if head == Head::Tied && tensors.remove(LM_HEAD).is_some() {
            ignored.push(Ignored {
                tensor: LM_HEAD.to_owned(),
                reason: format!("a copy of `{EMBEDDING}`"),
            });
        }
        spec.tie_word_embeddings = head == Head::Tied;
        ignored.extend(cover(dir, &spec, &mut tensors)?);
        Ok(Self {
            dir: dir.to_path_buf(),
            spec,
            head,
            shards,
            tensors,
            ignored,
            notes,
            fingerprint: OnceLock::new(),
        })
    }

    /// The same model cut off after its first `layers` layers. The others are left aside,
    /// and the fingerprint is that of the shorter model.
    ///
    /// # Errors
    /// [`Error::TooManyLayers`] for more layers than there are, or none.
    pub fn first_layers(mut self, layers: usize) -> Result<Self, Error> {
        if layers == 0 || layers > self.spec.layers {
            return Err(Error::TooManyLayers {
                dir: self.dir,
                asked: layers,
                found: self.spec.layers,
            });
        }
        self.spec.layers = layers;
        let kept: BTreeSet<String> = self.spec.tensors().into_iter().map(|t| t.0).collect();
        for (tensor, _) in self.tensors.extract_if(.., |name, _| !kept.contains(name)) {
            self.ignored.push(Ignored {
                tensor,
                reason: format!("only the first {layers} layers are asked for"),
            });
        }
        self.fingerprint = OnceLock::new();
        Ok(self)
    }

    /// The model's dimensions; its `tie_word_embeddings` agrees with [`Self::head`].
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The folder it was opened from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Which table the output projection uses, decided by the tensors present: without
    /// `lm_head.weight` the config must say tied; with it, a model that says tied is
    /// tied only if both tables are the same bytes.
    pub fn head(&self) -> Head {
        self.head
    }

    /// Tensors left aside, with the reason for each.
    pub fn ignored(&self) -> &[Ignored] {
        &self.ignored
    }

    /// Oddities that are not errors, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The model's tensors in name order, with their shapes.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors
            .iter()
            .map(|(name, at)| (name.as_str(), at.shape.as_slice()))
    }

    /// The raw elements of a tensor. In a tied model `lm_head.weight` is the embedding.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`] for a name the model does not have.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, Error> {
        let stored = match (name, self.head) {
            (LM_HEAD, Head::Tied) => EMBEDDING,
            _ => name,
        };
        let located = self
            .tensors
            .get(stored)
            .ok_or_else(|| Error::NoSuchTensor {
                dir: self.dir.clone(),
                tensor: name.to_owned(),
            })?;
        Ok(located.view(&self.shards))
    }

    /// A tensor's shape and its elements widened to f32, which is exact.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`], or [`Error::NonFinite`] at the first NaN or infinity.
    pub fn read_f32(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error> {
        let view = self.tensor(name)?;
        let mut out = vec![0.0; view.shape.iter().product()];
        values::widen(name, view.dtype, view.bytes, 0, &mut out)?;
        Ok((view.shape.to_vec(), out))
    }

    /// Chosen rows of a matrix, in the order asked for, widened to f32.
    ///
    /// # Errors
    /// As [`Self::read_f32`], or [`Error::RowOutOfRange`].
    pub fn read_rows_f32(&self, name: &str, rows: &[u32]) -> Result<Vec<f32>, Error> {
        let view = self.tensor(name)?;
        let count = view.shape.first().copied().unwrap_or(0);
        let width: usize = view.shape.iter().skip(1).product();
        let stride = width * view.dtype.size();
        let mut out = vec![0.0; rows.len() * width];
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(width.max(1))) {
            let at = row as usize;
            if at >= count {
                return Err(Error::RowOutOfRange {
                    tensor: name.to_owned(),
                    row: at,
                    rows: count,
                });
            }
            let bytes = &view.bytes[at * stride..(at + 1) * stride];
            values::widen(name, view.dtype, bytes, at * width, out)?;
        }
        Ok(out)
    }

    /// SHA-256, in hex, of the model itself: its spec and every tensor's name, type,
    /// shape and bytes. How tensors are spread over shards does not matter. The first
    /// call reads the whole checkpoint.
    pub fn fingerprint(&self) -> String {
        self.fingerprint
            .get_or_init(|| {
                let mut hash = Sha256::new();
                // Debug prints f64 with the shortest digits that read back the same.
                hash.update(format!("{:?}\n", self.spec));
                for (name, located) in &self.tensors {
                    let view = located.view(&self.shards);
                    hash.update(format!("{name} {} {:?}\n", view.dtype, view.shape));
                    hash.update(view.bytes);
                }
                hex(&hash.finalize())
            })
            .clone()
    }

    /// Confirms that no shard was replaced or rewritten since it was opened. To be
    /// called before the results of a long read are made final.
    ///
    /// # Errors
    /// [`Error::Changed`] naming the file.
    pub fn unchanged(&self) -> Result<(), Error> {
        for shard in &self.shards {
            let path = shard.map.path();
            let same = std::fs::metadata(path).is_ok_and(|meta| {
                meta.len() == shard.map.len() as u64
                    && state(&meta).is_ok_and(|now| now == shard.state)
            });
            if !same {
                return Err(Error::Changed {
                    path: path.to_path_buf(),
                });
            }
        }
        Ok(())
    }
}

fn decide_head(
    dir: &Path,
    spec: &ModelSpec,
    shards: &[Shard],
    tensors: &BTreeMap<String, Located>,
    notes: &mut Vec<String>,
) -> Result<Head, Error> {
    match (tensors.get(LM_HEAD), spec.tie_word_embeddings) {
        (None, true) => Ok(Head::Tied),
        (None, false) => Err(Error::HeadMissing {
            dir: dir.to_path_buf(),
        }),
        (Some(_), false) => Ok(Head::Own),
        (Some(head), true) => {
            let head = head.view(shards);
            let same = tensors.get(EMBEDDING).is_some_and(|embedding| {
                let embedding = embedding.view(shards);
                embedding.dtype == head.dtype
                    && embedding.shape == head.shape
                    && embedding.bytes == head.bytes
            });
            notes.push(if same {
                format!("`{LM_HEAD}` is a copy of `{EMBEDDING}`; it is read once")
            } else {
                format!(
                    "the config says the output projection is tied, but `{LM_HEAD}` differs \
                     from `{EMBEDDING}`; the tensor is used"
                )
            });
            Ok(if same { Head::Tied } else { Head::Own })
        }
    }
}

/// Leaves in `tensors` exactly those of the spec, all present and rightly shaped, and
/// returns the others if there is a reason to ignore each.
fn cover(
    dir: &Path,
    spec: &ModelSpec,
    tensors: &mut BTreeMap<String, Located>,
) -> Result<Vec<Ignored>, Error> {
    let mut used = BTreeMap::new();
    for (name, shape) in spec.tensors() {
        let Some(located) = tensors.remove(&name) else {
            return Err(Error::MissingTensor {
                dir: dir.to_path_buf(),
                tensor: name,
            });
        };
        if located.shape != shape {
            return Err(Error::Shape {
                tensor: name,
                expected: shape,
                found: located.shape,
            });
        }
        used.insert(name, located);
    }
    std::mem::swap(tensors, &mut used);
    used.into_keys()
        .map(|name| {
            if name.ends_with(".rotary_emb.inv_freq") {
                Ok(Ignored {
                    tensor: name,
                    reason: "recomputed from the config".to_owned(),
                })
            } else {
                Err(Error::UnknownTensor {
                    dir: dir.to_path_buf(),
                    tensor: name,
                })
            }
        })
        .collect()
}
