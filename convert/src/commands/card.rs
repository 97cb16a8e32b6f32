//! The two descriptions a published folder carries beside its manifest: the model
//! card for people and Apple's bundle metadata for its tools.

use std::fmt::Write;

use anemone_schemas::manifest::Manifest;
use anemone_schemas::report::QualityReport;
use serde_json::{Value, json};

/// The model card, `README.md`, with Hugging Face front matter.
pub(super) fn model_card(manifest: &Manifest, report: Option<&QualityReport>) -> String {
    let m = &manifest.model;
    let mut out = String::new();
    let _ = write!(
        out,
        "---\n\
         base_model: {name}\n\
         base_model_relation: quantized\n\
         library_name: anemone\n\
         pipeline_tag: text-generation\n\
         tags:\n- core-ai\n- apple-neural-engine\n- lut4\n\
         ---\n\n\
         # {name} for the Apple Neural Engine\n\n\
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
