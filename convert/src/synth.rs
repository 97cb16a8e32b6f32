//! `synth`: a checkpoint with the exact configuration and shapes of a published
//! model, and random weights. It costs no download and behaves like the real one in
//! everything but what it says: sizes, time, memory, formats.
//!
//! The files are laid out as published: tensors in `state_dict` order, a new shard
//! when the next tensor would bring one over 4 GB, and within a shard by name. The
//! values depend on seed, tensor and position only, so the bytes do not depend on
//! threads; a shard is written as it is computed, in constant memory.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anemone_schemas::atomic::{self, AtomicDir};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::drafter::{self, DrafterCheckpoint};
use anemone_schemas::tokenizer::TokenizerFolder;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::stop::Stop;
use crate::ui::Ui;

mod published;
mod values;

pub use published::{PUBLISHED, Published};

use values::Stream;

/// Bytes of tensors in one shard, as the Qwen3 repositories have it.
const SHARD_BYTES: u64 = 4_000_000_000;
/// Bytes computed at a time, and by one thread.
const BLOCK_BYTES: usize = 32 << 20;
const PIECE_BYTES: usize = 256 << 10;
/// Standard deviation of the matrices: `initializer_range` of the config.
const DEVIATION: f64 = 0.02;

/// What to make.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    /// Whose configuration to take.
    pub like: Published,
    /// Number of layers, if not all.
    pub layers: Option<usize>,
    /// Seed of the weights.
    pub seed: u64,
    /// Folder whose tokenizer files are copied.
    pub tokenizer: Option<PathBuf>,
    /// Checkpoint folder to make.
    pub output: PathBuf,
}

/// One safetensors file to be written.
struct Shard {
    file: String,
    /// Tensors by name, with their shapes.
    tensors: BTreeMap<String, Vec<usize>>,
}

/// The layers asked for.
fn layers(options: &SynthOptions) -> Result<usize, Error> {
    let like = options.like;
    let layers = options.layers.unwrap_or(like.layers);
    if layers == 0 || layers > like.layers {
        return Err(Error::usage(format!(
            "{layers} layers: `{}` has {}",
            like.repository, like.layers
        )));
    }
    Ok(layers)
}

/// Names and sizes of the weight files that [`run`] would write.
///
/// # Errors
/// A layer count out of range.
pub fn sizes(options: &SynthOptions) -> Result<Vec<(String, u64)>, Error> {
    let shards = divide(options.like.tensors(layers(options)?));
    let data = |shard: &Shard| {
        let tensors = shard.tensors.values();
        tensors
            .map(|shape| shape.iter().product::<usize>() as u64 * 2)
            .sum::<u64>()
    };
    let size = |shard: &Shard| header(shard).len() as u64 + data(shard);
    Ok(shards.iter().map(|s| (s.file.clone(), size(s))).collect())
}

/// Runs the command. The folder appears whole or not at all.
///
/// # Errors
/// A layer count out of range, a bad tokenizer folder, or an output that exists.
pub fn run(options: &SynthOptions, ui: Ui, stop: &Stop) -> Result<Checkpoint, Error> {
    let (like, layers) = (options.like, layers(options)?);
    let staged = AtomicDir::create(&options.output).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => {
            Error::usage(e.to_string()).hint("choose another output folder, or pass `--overwrite`")
        }
        _ => Error::io(&options.output, &e),
    })?;
    let dir = staged.path();
    let shards = divide(like.tensors(layers));
    write_shards(dir, &shards, options.seed, ui, stop)?;
    let text = |name: &str, value: &Value| {
        let path = dir.join(name);
        fs::write(&path, published::pretty(value)).map_err(|e| Error::io(&path, &e))
    };
    if shards.len() > 1 {
        text("model.safetensors.index.json", &index(&shards))?;
    }
    text("config.json", &like.config(layers))?;
    text("generation_config.json", &like.generation_config())?;
    if let Some(from) = &options.tokenizer {
        copy_tokenizer(from, dir)?;
    }
    // The strict reader is the judge of what was written.
    drop(Checkpoint::open(dir)?);
    staged
        .commit()
        .map_err(|e| Error::io(&options.output, &e))?;
    Ok(Checkpoint::open(&options.output)?)
}

/// Makes the DSpark drafter published for the model, in one file as published, with
/// tables of its own that are not those of [`run`]'s model.
///
/// # Errors
/// A model without a published drafter, or an output that exists.
pub fn run_drafter(
    options: &SynthOptions,
    ui: Ui,
    stop: &Stop,
) -> Result<DrafterCheckpoint, Error> {
    let like = options.like;
    let config = like.drafter_config().ok_or_else(|| {
        Error::usage(format!("no drafter is published for `{}`", like.repository))
            .hint("there are some for qwen3-4b, qwen3-8b and qwen3-14b")
    })?;
    let staged = AtomicDir::create(&options.output)
        .map_err(|e| Error::usage(e.to_string()).hint("choose another output folder"))?;
    let dir = staged.path();
    let path = dir.join("config.json");
    fs::write(&path, published::pretty(&config)).map_err(|e| Error::io(&path, &e))?;
    let spec = drafter::read_spec(dir)?;
    let table = vec![spec.vocab, spec.hidden];
    let tables = [drafter::EMBEDDING, drafter::LM_HEAD].map(|n| (n.to_owned(), table.clone()));
    let shard = Shard {
        file: "model.safetensors".to_owned(),
        tensors: spec.tensors().into_iter().chain(tables).collect(),
    };
    write_shards(dir, &[shard], options.seed, ui, stop)?;
    drop(DrafterCheckpoint::open(dir)?);
    staged
        .commit()
        .map_err(|e| Error::io(&options.output, &e))?;
    Ok(DrafterCheckpoint::open(&options.output)?)
}

fn write_shards(dir: &Path, shards: &[Shard], seed: u64, ui: Ui, stop: &Stop) -> Result<(), Error> {
    let count = shards.iter().map(|s| s.tensors.len()).sum();
    let stage = ui.stage("synth", count);
    for shard in shards {
        let path = dir.join(&shard.file);
        atomic::write_file(&path, |out| {
            out.write_all(&header(shard))
                .map_err(|e| Error::io(&path, &e))?;
            for (name, shape) in &shard.tensors {
                write_tensor(out, &path, name, shape, seed, stop)?;
                stage.step(name);
            }
            Ok::<(), Staged>(())
        })
        .map_err(|Staged(e)| e)?;
    }
    Ok(())
}

/// An error on its way out of [`atomic::write_file`], which adds I/O errors of its own.
struct Staged(Error);

impl From<Error> for Staged {
    fn from(e: Error) -> Self {
        Self(e)
    }
}

impl From<io::Error> for Staged {
    fn from(e: io::Error) -> Self {
        Self(Error::io(Path::new("shard"), &e))
    }
}

fn bytes(shape: &[usize]) -> u64 {
    2 * shape.iter().product::<usize>() as u64
}

/// Fills shards in order, as `save_pretrained` does.
fn divide(tensors: Vec<(String, Vec<usize>)>) -> Vec<Shard> {
    let mut parts: Vec<BTreeMap<String, Vec<usize>>> = vec![BTreeMap::new()];
    let mut size = 0;
    for (name, shape) in tensors {
        let next = bytes(&shape);
        if size + next > SHARD_BYTES && size > 0 {
            parts.push(BTreeMap::new());
            size = 0;
        }
        size += next;
        let part = parts.last_mut().expect("starts with one");
        part.insert(name, shape);
    }
    let n = parts.len();
    let file = |i: usize| match n {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
    };
    parts
        .into_iter()
        .enumerate()
        .map(|(i, tensors)| Shard {
            file: file(i),
            tensors,
        })
        .collect()
}

/// Length and JSON header of a shard, padded so that the data start at a multiple of
/// eight.
fn header(shard: &Shard) -> Vec<u8> {
    let mut json = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut begin = 0;
    for (name, shape) in &shard.tensors {
        let end = begin + bytes(shape);
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, end] });
        let _ = write!(json, ",{}:{entry}", Value::from(name.as_str()));
        begin = end;
    }
    json.push('}');
    while json.len() % 8 != 0 {
        json.push(' ');
    }
    [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
}

fn index(shards: &[Shard]) -> Value {
    let mut total = 0;
    let mut map = BTreeMap::new();
    for shard in shards {
        for (name, shape) in &shard.tensors {
            total += bytes(shape);
            map.insert(name.clone(), Value::from(shard.file.as_str()));
        }
    }
    published::index(total, &map.into_iter().collect::<Map<_, _>>())
}

fn write_tensor(
    out: &mut impl Write,
    path: &Path,
    name: &str,
    shape: &[usize],
    seed: u64,
    stop: &Stop,
) -> Result<(), Error> {
    let stream = Stream::new(seed, name);
    let norm = shape.len() == 1;
    let scale = DEVIATION / std::f64::consts::SQRT_2;
    let total = bytes(shape) as usize;
    let mut block = vec![0; total.min(BLOCK_BYTES)];
    let mut done = 0;
    while done < total {
        stop.check()?;
        let block = &mut block[..BLOCK_BYTES.min(total - done)];
        block
            .par_chunks_mut(PIECE_BYTES)
            .enumerate()
            .for_each(|(i, piece)| {
                // Of two bytes each.
                let first = (done / 2 + i * (PIECE_BYTES / 2)) as u64;
                if norm {
                    values::fill(piece, first, |p| stream.near_one(p));
                } else {
                    values::fill(piece, first, |p| scale * stream.student_t(p));
                }
            });
        out.write_all(block).map_err(|e| Error::io(path, &e))?;
        done += block.len();
    }
    Ok(())
}

/// Copies the tokenizer's files except the configurations, which are the model's own.
fn copy_tokenizer(from: &Path, to: &Path) -> Result<(), Error> {
    let tokenizer = TokenizerFolder::open(from)?;
    for name in tokenizer.files() {
        let target = to.join(name);
        if !target.exists() {
            fs::copy(from.join(name), &target).map_err(|e| Error::io(&from.join(name), &e))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(name: &str) -> Vec<u64> {
        let like = name.parse::<Published>().unwrap();
        divide(like.tensors(like.layers))
            .iter()
            .map(|s| header(s).len() as u64 + s.tensors.values().map(|t| bytes(t)).sum::<u64>())
            .collect()
    }

    /// File sizes as the Hub lists them.
    #[test]
    fn shards_are_those_of_the_published_repositories() {
        assert_eq!(
            sizes("qwen3-4b"),
            [3_957_900_840, 3_987_450_520, 99_630_640]
        );
        assert_eq!(
            sizes("qwen3-8b"),
            [
                3_996_250_744,
                3_993_160_032,
                3_959_604_768,
                3_187_841_392,
                1_244_659_840
            ]
        );
    }

    fn options(output: PathBuf) -> SynthOptions {
        SynthOptions {
            like: "qwen3-0.6b".parse().unwrap(),
            layers: Some(1),
            seed: 3,
            tokenizer: None,
            output,
        }
    }

    #[test]
    fn bytes_depend_on_the_seed_and_not_on_threads() {
        let make = |threads: usize, seed: u64| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let (mut out, path) = (Vec::new(), Path::new("memory"));
            let shape = [3 * PIECE_BYTES / 1000, 999];
            pool.install(|| write_tensor(&mut out, path, "w", &shape, seed, &Stop::default()))
                .unwrap();
            assert_eq!(out.len() as u64, bytes(&shape));
            out
        };
        let one = make(1, 3);
        assert_eq!(one, make(3, 3));
        assert_ne!(one, make(1, 4));
    }

    #[test]
    fn weights_are_finite_with_the_configs_deviation_and_norms_near_one() {
        let dir = tempfile::tempdir().unwrap();
        let ckpt = run(&options(dir.path().join("m")), Ui::Quiet, &Stop::default()).unwrap();
        let (_, up) = ckpt.read_f32("model.layers.0.mlp.up_proj.weight").unwrap();
        let n = up.len() as f64;
        let square: f64 = up.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
        assert!((square.sqrt() - 0.02).abs() < 0.0005, "{}", square.sqrt());
        let (_, norm) = ckpt.read_f32("model.norm.weight").unwrap();
        assert!(norm.iter().all(|w| (0.8..=1.2).contains(w)));
    }

    #[test]
    fn every_published_config_is_accepted_by_the_strict_reader() {
        // The reader needs tensors too, so this checks the parsed spec of one-layer
        // headers over sparse files.
        let dir = tempfile::tempdir().unwrap();
        for like in PUBLISHED {
            let model = dir.path().join(like.name);
            fs::create_dir(&model).unwrap();
            fs::write(model.join("config.json"), like.config(1).to_string()).unwrap();
            let shards = divide(like.tensors(1));
            for shard in &shards {
                let path = model.join(&shard.file);
                let head = header(shard);
                fs::write(&path, &head).unwrap();
                let data: u64 = shard.tensors.values().map(|t| bytes(t)).sum();
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(head.len() as u64 + data).unwrap();
            }
            if shards.len() > 1 {
                let text = index(&shards).to_string();
                fs::write(model.join("model.safetensors.index.json"), text).unwrap();
            }
            let ckpt = Checkpoint::open(&model).unwrap_or_else(|e| panic!("{}: {e}", like.name));
            let spec = ckpt.spec();
            assert_eq!(spec.layers, 1);
            assert_eq!(
                (spec.kv_heads, spec.head_dim, spec.vocab),
                (8, 128, 151_936)
            );
        }
    }

    #[test]
    fn more_layers_than_published_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let wrong = SynthOptions {
            layers: Some(29),
            ..options(dir.path().join("m"))
        };
        let e = run(&wrong, Ui::Quiet, &Stop::default()).unwrap_err();
        assert!(e.message.contains("29 layers"), "{e}");
    }
}
