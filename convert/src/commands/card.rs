//! The two descriptions a published folder carries beside its manifest: the model
//! card for people and Apple's bundle metadata for its tools.

use std::fmt::Write;

use anemone_schemas::manifest::Manifest;
use anemone_schemas::report::QualityReport;
use serde_json::{Value, json};

use super::notices::Base;
use super::recipe::Recipe;

/// What a model card is made of.
pub(super) struct Card<'a> {
    pub(super) manifest: &'a Manifest,
    pub(super) report: Option<&'a QualityReport>,
    pub(super) base: &'a Base,
    pub(super) recipe: Option<Recipe>,
}

impl Card<'_> {
    /// The card, `README.md`, with Hugging Face front matter.
    pub(super) fn text(&self) -> String {
        let mut out = self.front_matter();
        out.push_str(&body(self.manifest, self.report));
        if let Some(recipe) = &self.recipe {
            let _ = write!(
                out,
                "\n## How it was made\n\n```sh\n{}\n```\n\nwith {}, from the checkpoint with \
                 fingerprint `{}`{}.\n",
                recipe.commands.join("\n"),
                recipe.producer,
                recipe.store.source_fingerprint,
                match &recipe.store.calibration {
                    Some(hash) => format!(", calibrated on text with SHA-256 `{hash}`"),
                    None => String::new(),
                }
            );
        }
        let _ = match self.base.name() {
            Some(name) => write!(
                out,
                "\n## Licence\n\nThat of the base model: {name}. Its licence and notices are in \
                 this folder where the base model has them.\n"
            ),
            None => write!(
                out,
                "\n## Licence\n\nThat of the base model, which was not known when this card was \
                 written.\n"
            ),
        };
        out
    }

    fn front_matter(&self) -> String {
        let mut out = format!("---\nbase_model: {}\n", yaml(&self.manifest.model.name));
        out.push_str("base_model_relation: quantized\nlibrary_name: anemone\n");
        let base = self.base;
        for (key, value) in [
            ("license", &base.license),
            ("license_name", &base.license_name),
            ("license_link", &base.license_link),
        ] {
            if let Some(value) = value {
                let _ = writeln!(out, "{key}: {}", yaml(value));
            }
        }
        if !base.language.is_empty() {
            out.push_str("language:\n");
            for language in &base.language {
                let _ = writeln!(out, "- {}", yaml(language));
            }
        }
        out.push_str("pipeline_tag: text-generation\ntags:\n- core-ai\n- apple-neural-engine\n");
        let bits = self.manifest.model.quantization.split('-').next();
        let _ = writeln!(out, "- {}\n---\n", yaml(bits.unwrap_or("lut4")));
        out
    }
}

/// A YAML scalar: as it is where that is safe, else in quotes.
fn yaml(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && !["yes", "no", "true", "false", "null", "on", "off"]
            .contains(&text.to_ascii_lowercase().as_str())
        && !text.contains(": ")
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_./:+ ".contains(&b));
    if plain {
        text.to_string()
    } else {
        json!(text).to_string()
    }
}

fn body(manifest: &Manifest, report: Option<&QualityReport>) -> String {
    let m = &manifest.model;
    let mut out = String::new();
    let _ = write!(
        out,
        "# {name} for the Apple Neural Engine\n\n\
         Chunk programs (`.aimodel`) of {name}, weights in {quant}, written by {producer}.\n\n\
         ## What is inside\n\n\
         | part | contents |\n|---|---|\n",
        name = m.name,
        quant = m.quantization,
        producer = manifest.producer,
    );
    for chunk in &manifest.chunks {
        let bytes: u64 = manifest
            .files
            .iter()
            .filter(|(path, _)| path.starts_with(&format!("{}/", chunk.path)))
            .map(|(_, f)| f.bytes)
            .sum();
        let _ = writeln!(
            out,
            "| `{}` | layers {} to {}{}, {:.1} MB |",
            chunk.path,
            chunk.layers[0],
            chunk.layers[1] - 1,
            if chunk.head {
                " and the output layer"
            } else {
                ""
            },
            bytes as f64 / 1e6
        );
    }
    let _ = write!(
        out,
        "| `{}` | token embeddings, fp16, {} x {} |\n\
         | `tokenizer/` | tokenizer of the base model |\n\n\
         Contexts {:?}, call widths {:?}; one function `extend_{{context}}_{{width}}` for each pair.\n\n\
         ## Quality\n\n",
        manifest.embedding.path,
        manifest.embedding.shape[0],
        manifest.embedding.shape[1],
        manifest.contexts,
        manifest.widths,
    );
    match report {
        Some(report) => {
            let _ = write!(
                out,
                "KL(teacher || student) in nats per token and top-1 agreement with the bf16 model \
                 (fingerprint `{}`), with 95% confidence intervals; `report.json` has the \
                 percentiles and the hashes of the text.\n\n{}",
                report.teacher,
                report.markdown()
            );
        }
        None => out.push_str("Not measured.\n"),
    }
    out.push_str(
        "\n## Limits\n\n\
         The figures were measured on a CPU. Nothing here was run on a Neural Engine by the \
         converter; speed and placement depend on the device.\n\n\
         ## Use\n\n```sh\nanemone run --model DIR \"your prompt\"\n```\n",
    );
    out
}

/// Apple's bundle description, `metadata.json` (version 0.2).
pub(super) fn bundle_metadata(manifest: &Manifest) -> Value {
    let m = &manifest.model;
    let key = |i: usize| {
        if manifest.chunks.len() == 1 {
            "main".to_string()
        } else {
            format!("chunk_{i}")
        }
    };
    let chunks = || manifest.chunks.iter().enumerate();
    let assets: serde_json::Map<String, Value> =
        chunks().map(|(i, c)| (key(i), json!(c.path))).collect();
    let functions: serde_json::Map<String, Value> = chunks()
        .map(|(i, c)| {
            let names: Vec<&str> = c.functions.iter().map(|f| f.name.as_str()).collect();
            (key(i), json!(names))
        })
        .collect();
    json!({
        "metadata_version": "0.2",
        "kind": "llm",
        "name": m.name,
        "assets": assets,
        "language": {
            "tokenizer": m.name,
            "vocab_size": m.vocab,
            "max_context_length": manifest.contexts.last(),
            "embedded_tokenizer": true,
            "function_map": functions,
        },
        "source": { "model_definition": "anemone", "hf_model_id": m.name },
        "compression": m.quantization,
        "compilation": { "targets": [] },
    })
}

#[cfg(test)]
mod tests {
    use super::yaml;

    #[test]
    fn values_that_yaml_would_read_otherwise_are_quoted() {
        for (text, scalar) in [
            ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
            ("apache-2.0", "apache-2.0"),
            ("no", "\"no\""),
            ("1.0", "\"1.0\""),
            ("a: b", "\"a: b\""),
            ("x\ninjected: y", "\"x\\ninjected: y\""),
            ("[x]", "\"[x]\""),
            ("", "\"\""),
        ] {
            assert_eq!(yaml(text), scalar);
        }
    }
}
