//! `inspect`: a readable dump of a checkpoint, a store, a program or a model folder.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anemone_schemas::aimodel::asset;
use anemone_schemas::aimodel::ir::Module;
use anemone_schemas::aimodel::summary::{Summary, summarize};
use anemone_schemas::aimodel::text::{self, TextOptions};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::manifest::{MANIFEST_FILE, Manifest};
use anemone_schemas::store::Store;
use serde::Serialize;

use crate::error::Error;

/// File of a program in its asset.
const PROGRAM_FILE: &str = "main.mlirb";

/// What a path holds.
enum Kind {
    Program,
    Folder,
    Store,
    Checkpoint,
}

fn kind(path: &Path) -> Result<Kind, Error> {
    if path.join(PROGRAM_FILE).is_file() {
        Ok(Kind::Program)
    } else if path.join(MANIFEST_FILE).is_file() {
        Ok(Kind::Folder)
    } else if path.join("store.json").is_file() || path.join("matrices").is_dir() {
        Ok(Kind::Store)
    } else if path.join("config.json").is_file() {
        Ok(Kind::Checkpoint)
    } else {
        Err(Error::bad_input(format!(
            "`{}` is no checkpoint, quantized store, `.aimodel` or model folder",
            path.display()
        ))
        .hint("expected `config.json`, `store.json`, `main.mlirb` or `anemone.json` in it"))
    }
}

/// The dump; `full` prints a program's operations too.
///
/// # Errors
/// If `path` is none of the four, or is damaged.
pub fn run(path: &Path, full: bool) -> Result<String, Error> {
    match kind(path)? {
        Kind::Program => program(path, full),
        Kind::Folder => folder(path),
        Kind::Store => store(path),
        Kind::Checkpoint => checkpoint(path),
    }
}

/// The same as JSON: a program's [`Summary`], the manifest of a model folder or
/// store, the spec of a checkpoint. Each has a JSON Schema in `schemas/json`.
///
/// # Errors
/// As [`run`].
pub fn run_json(path: &Path) -> Result<String, Error> {
    match kind(path)? {
        Kind::Program => json(path, &read_program(path)?.1),
        Kind::Folder => json(path, &Manifest::read(path)?),
        Kind::Store => json(path, Store::open(path)?.manifest()),
        Kind::Checkpoint => json(path, Checkpoint::open(path)?.spec()),
    }
}

fn json(path: &Path, value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string_pretty(value)
        .map_err(|e| Error::bad_input(format!("`{}`: {e}", path.display())))
}

fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

fn checkpoint(path: &Path) -> Result<String, Error> {
    let ckpt = Checkpoint::open(path)?;
    let s = ckpt.spec();
    let mut out = format!(
        "checkpoint {}\n{:?}, {} layers, hidden {}, {} heads of {} ({} for keys), intermediate {}, \
         vocabulary {}, {} positions, head {:?}\nrope {:?}\n",
        path.display(),
        s.architecture,
        s.layers,
        s.hidden,
        s.heads,
        s.head_dim,
        s.kv_heads,
        s.intermediate,
        s.vocab,
        s.max_position,
        ckpt.head(),
        s.rope,
    );
    for (name, _) in s.tensors() {
        let t = ckpt.tensor(&name)?;
        let _ = writeln!(out, "{name} {:?} {:?}", t.dtype, t.shape);
    }
    for ignored in ckpt.ignored() {
        let _ = writeln!(out, "ignored: {ignored:?}");
    }
    for note in ckpt.notes() {
        let _ = writeln!(out, "note: {note}");
    }
    Ok(out)
}

fn store(path: &Path) -> Result<String, Error> {
    let store = Store::open(path)?;
    let m = store.manifest();
    let p = &m.provenance;
    let mut out = format!(
        "quantized store {}\nmethod {}, made by {} from checkpoint {}\n",
        path.display(),
        p.method,
        p.tool,
        p.source_fingerprint
    );
    let _ = writeln!(
        out,
        "{:<44} {:>13} {:>4} {:>12} {:>9} {:>12}",
        "matrix", "shape", "bits", "size", "rel.err", "weighted.err"
    );
    for r in &m.matrices {
        let _ = writeln!(
            out,
            "{:<44} {:>13} {:>4} {:>12} {:>9.5} {:>12.5e}{}",
            r.name,
            format!("{}x{}", r.rows, r.cols),
            r.form(),
            megabytes(r.bytes),
            r.report.plain_error,
            r.report.weighted_error,
            r.report
                .fallback
                .as_ref()
                .map_or(String::new(), |f| format!("  fallback: {f}")),
        );
    }
    for d in &m.dense {
        let _ = writeln!(
            out,
            "{:<44} {:>13} {:>17}",
            d.name,
            format!("{:?}", d.shape),
            megabytes(d.bytes)
        );
    }
    Ok(out)
}

fn folder(path: &Path) -> Result<String, Error> {
    let m = Manifest::read(path)?;
    let total: u64 = m.files.values().map(|f| f.bytes).sum();
    let mut out = format!(
        "model folder {}\n{} ({}), {} layers, hidden {}, vocabulary {} ({} known to the tokenizer)\n\
         weights {}, contexts {:?}, widths {:?}, {} in {} files\nstop ids {:?}\n",
        path.display(),
        m.model.name,
        m.model.architecture,
        m.model.layers,
        m.model.hidden,
        m.model.vocab,
        m.model.tokenizer_vocab,
        m.model.quantization,
        m.contexts,
        m.widths,
        megabytes(total),
        m.files.len(),
        m.stop
    );
    for c in &m.chunks {
        let bytes: u64 = m
            .files
            .iter()
            .filter(|(p, _)| p.starts_with(&format!("{}/", c.path)))
            .map(|(_, f)| f.bytes)
            .sum();
        let _ = writeln!(
            out,
            "{}: layers {}..{}, {} functions, taps {:?}{}, {}",
            c.path,
            c.layers[0],
            c.layers[1],
            c.functions.len(),
            c.taps,
            if c.head { ", output layer" } else { "" },
            megabytes(bytes)
        );
    }
    if let Some(d) = &m.drafter {
        let files = m
            .files
            .iter()
            .filter(|(p, _)| p.starts_with(&format!("{}/", d.path)));
        let bytes: u64 = files.map(|(_, f)| f.bytes).sum();
        let _ = writeln!(
            out,
            "{}: {:?} drafter, {} guesses from a block of {}, taps {:?}, weights {}, output layer \
             {:?}, embedding {}, {}",
            d.path,
            d.kind,
            d.guesses,
            d.block,
            d.taps,
            d.weights,
            d.head,
            d.embedding.path,
            megabytes(bytes)
        );
    }
    Ok(out)
}

fn read_program(path: &Path) -> Result<(Module, Summary), Error> {
    let module = asset::open_asset(path)?;
    let file = path.join(PROGRAM_FILE);
    let bytes = fs::metadata(&file).map_err(|e| Error::io(&file, &e))?.len();
    let summary = summarize(&module, bytes);
    Ok((module, summary))
}

fn program(path: &Path, full: bool) -> Result<String, Error> {
    let (module, summary) = read_program(path)?;
    let mut out = format!("program {}\n{summary}", path.display());
    if full {
        out.push_str(&text::to_text(&module, &TextOptions::default()));
    }
    Ok(out)
}
