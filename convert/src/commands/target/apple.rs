//! `target --layout apple`: one program and a bundle for Apple's own runner.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anemone_schemas::aimodel::asset::{self, Metadata};
use anemone_schemas::aimodel::ir::BlobData;
use anemone_schemas::atomic::{self, AtomicDir};
use anemone_schemas::exit::Exit;
use anemone_schemas::spec::EMBEDDING;
use anemone_schemas::store::{DenseElem, Store};
use half::f16;
use serde_json::json;

use super::{TOKENIZER_DIR, TargetOptions, notices, quantization_name, store_spec};
use crate::commands::files::stream;
use crate::commands::lint::first_error;
use crate::commands::package::BUNDLE_FILE;
use crate::commands::text::open_tokenizer;
use crate::error::Error;
use crate::lower::{APPLE_WIDTHS, Chunks, EmbeddingTable, lower_apple};
use crate::stop::Stop;
use crate::ui::Ui;

/// Smallest largest magnitude an embedding is scaled by.
const LEAST_MAGNITUDE: f32 = 1e-6;
/// The embeddings on their way into the program.
const ENTRIES_FILE: &str = "embedding.i8";

/// Makes the bundle `{name}.aimodel`, `tokenizer/` and `metadata.json`, whole or not at
/// all. The plan has one chunk, no taps and the widths of Apple's runner.
///
/// # Errors
/// A bad store, options that the runner has no use for, or an output that exists.
pub fn run_apple(options: &TargetOptions, ui: Ui, stop: &Stop) -> Result<(), Error> {
    if options.chunks != Chunks::Count(1) || options.with_logits || !options.taps.is_empty() {
        return Err(Error::usage(
            "Apple's runner takes one program that gives logits and nothing else".to_owned(),
        )
        .hint("leave out `--chunks`, `--max-chunk-mb`, `--with-logits` and `--taps`"));
    }
    let store = Store::open(&options.store)?;
    let spec = store_spec(&store)?;
    let tokenizer = open_tokenizer(store.dir())?;
    tokenizer.check_fits(spec.vocab)?;
    let (known, files) = (tokenizer.size(), tokenizer.files().to_vec());
    drop(tokenizer);
    let mut plan = options.plan(&store, &spec, known)?;
    plan.widths = APPLE_WIDTHS.to_vec();
    let staged = AtomicDir::create(&options.output).map_err(|e| {
        Error::new(Exit::Usage, e.to_string())
            .hint("choose another output folder, or pass `--overwrite`")
    })?;
    let stage = ui.stage("target", 3);
    let entries = staged.path().join(ENTRIES_FILE);
    let embedding = quantize_embedding(&store, &entries)?;
    stage.step("embedding");
    stop.check()?;
    let module = lower_apple(&store, &plan, embedding)?;
    let name = file_name(&options.name);
    let program = format!("{name}.aimodel");
    if let Some(broken) = first_error(&module) {
        return Err(Error::new(
            Exit::Verification,
            format!("`{program}`: {broken}"),
        ));
    }
    let metadata = Metadata {
        producer: Some(crate::PRODUCER.to_string()),
        description: Some(options.name.clone()),
        license: notices::base(store.dir()).name().cloned(),
        ..Metadata::default()
    };
    asset::write_asset(&staged.path().join(&program), &module, &metadata)?;
    fs::remove_file(&entries).map_err(|e| Error::io(&entries, &e))?;
    stage.step("program");
    stop.check()?;
    let folder = staged.path().join(TOKENIZER_DIR);
    fs::create_dir(&folder).map_err(|e| Error::io(&folder, &e))?;
    for file in files {
        let (from, to) = (store.dir().join(file), folder.join(file));
        fs::copy(&from, &to).map_err(|e| Error::io(&from, &e))?;
    }
    let bundle = json!({
        "metadata_version": "0.2",
        "kind": "llm",
        "name": name,
        "assets": { "main": program },
        "language": {
            "tokenizer": options.name,
            "vocab_size": spec.vocab,
            "max_context_length": options.max_context,
            "embedded_tokenizer": true,
            "function_map": { "main": ["main"] },
        },
        "source": { "model_definition": "anemone", "hf_model_id": options.name },
        "compression": quantization_name(&store),
        "compilation": { "targets": [] },
    });
    let path = staged.path().join(BUNDLE_FILE);
    atomic::write_bytes(&path, format!("{bundle:#}\n").as_bytes())
        .map_err(|e| Error::io(&path, &e))?;
    stage.step("bundle");
    staged.commit().map_err(|e| Error::io(&options.output, &e))
}

/// The last part of a name such as `Qwen/Qwen3-0.6B`, as a file may be called.
fn file_name(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let kept: String = last
        .chars()
        .map(|c| if plain(c) { c } else { '_' })
        .collect();
    let kept = kept.trim_start_matches('.');
    if kept.is_empty() { "model" } else { kept }.to_owned()
}

/// Writes the embeddings to `to` as eight-bit integers with one scale, the largest
/// magnitude at 127.
fn quantize_embedding(store: &Store, to: &Path) -> Result<EmbeddingTable, Error> {
    let table = store.dense(EMBEDDING)?;
    if table.elem != DenseElem::F16 {
        return Err(Error::bad_input(format!(
            "`{EMBEDDING}` of `{}` is not fp16",
            store.dir().display()
        )));
    }
    let value = |&bytes: &[u8; 2]| f16::from_le_bytes(bytes).to_f32();
    let unreadable = |e: std::io::Error| Error::io(&table.path, &e);
    let mut largest = LEAST_MAGNITUDE;
    stream(&table.path, table.offset, table.len, |slab| {
        let values = slab.as_chunks().0.iter().map(value);
        largest = values.fold(largest, |most, v| most.max(v.abs()));
        Ok(())
    })
    .map_err(unreadable)?;
    let scale = f16::from_f32(largest / 127.0).to_f32();
    let mut out = BufWriter::new(File::create_new(to).map_err(|e| Error::io(to, &e))?);
    stream(&table.path, table.offset, table.len, |slab| {
        let entry = |v: f32| (v / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
        let entries: Vec<u8> = (slab.as_chunks().0.iter())
            .map(|bytes| entry(value(bytes)) as u8)
            .collect();
        out.write_all(&entries)
    })
    .map_err(unreadable)?;
    out.flush().map_err(|e| Error::io(to, &e))?;
    Ok(EmbeddingTable {
        entries: BlobData::File {
            path: to.to_path_buf(),
            offset: 0,
            len: table.len / 2,
        },
        scale,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_names_of_files() {
        assert_eq!(file_name("Qwen/Qwen3-0.6B"), "Qwen3-0.6B");
        assert_eq!(file_name("a b:c"), "a_b_c");
        assert_eq!(file_name("x/.."), "model");
    }
}
