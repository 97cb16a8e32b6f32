//! The rules of the Neural Engine and the known defects of Core AI, in one table.
//!
//! Sources, as abbreviated there:
//!
//! | | |
//! |---|---|
//! | NE | `neural_engine_rules.md` of the model-authoring skill in Apple's coreai-models |
//! | CI | `common_issues.md` there |
//! | WC | the working-with-coreai skill there |
//! | MC | the model-compression-exploration skill there |
//! | model code | Apple's Python model code and Swift runner in coreai-models |
//! | export | programs written by Apple's exporter (coreai-core 1.0.0b3) |
//! | ct, cm | issues of apple/coreai-torch and apple/coreai-models |
//! | cli | the rule table of coreai-cli 0.1 |
//! | notes | ANEMLL Forge and Core AI zoo notes |
//!
//! Where Apple's own Qwen3 does not keep a rule, the rule warns: the program runs
//! on the engine all the same.

use serde::Serialize;

use self::Severity::{Error, Note, Warning};

/// How much a finding weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know.
    Note,
    /// May cost speed or accuracy, or breaks a rule Apple itself breaks.
    Warning,
    /// The engine rejects or miscomputes it, and the program runs elsewhere.
    Error,
}

impl Severity {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// Where a rule is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Checked {
    /// Here, on the program.
    Statically,
    /// Elsewhere, since a program does not show it: by whom.
    Elsewhere(&'static str),
}

/// One rule.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rule {
    /// Stable identifier.
    pub id: &'static str,
    /// Severity of a finding unless a documented exception lowers it.
    pub severity: Severity,
    /// What to keep, and why.
    pub text: &'static str,
    /// Who says so.
    pub source: &'static str,
    /// Where it is checked.
    pub checked: Checked,
}

const fn rule(
    id: &'static str,
    severity: Severity,
    text: &'static str,
    source: &'static str,
) -> Rule {
    Rule {
        id,
        severity,
        text,
        source,
        checked: Checked::Statically,
    }
}

const fn elsewhere(
    id: &'static str,
    by: &'static str,
    text: &'static str,
    source: &'static str,
) -> Rule {
    Rule {
        checked: Checked::Elsewhere(by),
        ..rule(id, Note, text, source)
    }
}

/// Every rule, in the order of its identifier.
#[rustfmt::skip]
pub const RULES: &[Rule] = &[
    // Types, ranks, shapes.
    rule("A1", Error, "tensors have at most five axes; exception: the tables of `lut_to_dense`, two axes more than their weight", "NE; model code (sam3)"),
    rule("A2", Error, "the engine computes in f16, int8 and int16; other floats go to GPU or CPU, 32-bit integers serve as shapes, offsets and ids only; exception: scores widened to f32 for an argmax warn", "NE, CI"),
    rule("A3", Error, "float constants (eps, scales, signs) are f16, or they widen what they touch", "NE, CI; model code"),
    rule("A4", Error, "no casts between float widths; exception: scores widened for an argmax warn", "NE, CI"),
    rule("A5", Error, "every shape is static, one function per context and width; exception: composite bodies that no function calls are noted", "NE, WC"),
    rule("A6", Warning, "a constant below 6.1e-5 is subnormal in f16 and may be flushed to zero (1e-6 of RMSNorm is)", "export"),
    elsewhere("A7", "the runtime, which binds contiguous buffers", "bound tensors are contiguous", "CI"),
    rule("A8", Error, "no control flow and no shape that depends on data", "WC"),
    elsewhere("A9", "the encoder, which knows signed and unsigned apart", "descriptors spell `si32`, not `i32`", "CI"),
    // Layout and alignment.
    rule("B1", Warning, "the last axis of inputs and outputs is a multiple of 64 bytes, best a power of two (Apple's mask of width 8 or 16 is not)", "NE"),
    rule("B2", Warning, "no last axis of extent 1: rows are padded to 64 bytes, 32 times the memory in f16; exception: convolution weights", "NE"),
    rule("B3", Warning, "convolutions read [1, C, 1, S] with tokens on the last axis; tokens on the batch axis read the weights once per token", "NE"),
    rule("B4", Warning, "few transposes and reshapes, and none that undoes the one before", "NE"),
    rule("B5", Error, "caches are [layers, 1, kv heads * head width, 1, context]", "NE; model code (cache)"),
    rule("B6", Error, "constrained caches are IOSurface, 8 channels interleaved, rows aligned to 8 times the longest context, the same in all functions that share them", "model code (base)"),
    rule("B7", Warning, "an embedding table input is int8 [vocabulary, 1, hidden], IOSurface, 8 rows interleaved", "NE; model code"),
    rule("B8", Warning, "gathered rotary factors are IOSurface with rows aligned to 32", "model code (mlir_ops)"),
    elsewhere("B9", "the runtime, by the manifest's `offset_multiple`", "cache writes start at multiples of 4", "model code (StaticShapeEngine)"),
    rule("B10", Error, "logits are f16 without hardware constraints", "model code (StaticShapeEngine)"),
    // Operations.
    rule("C1", Error, "projections are 1x1 convolutions, not matrix products with a weight; exception: a product that is `out_logits` itself warns, as in Apple's output layer", "NE"),
    rule("C2", Error, "attention is written per head or per group, not as one fused operation", "NE; model code (sdpa)"),
    rule("C3", Warning, "softmax runs over the channel axis, which leaves the spatial axes to be split; exception: over the last axis above 4096 keys it is noted", "NE; model code (sdpa)"),
    rule("C4", Error, "masks are added, finite (0 or -40000) and f16 [1, keys, 1, queries]; no constant is infinite or NaN", "NE, CI; model code"),
    elsewhere("C5", "numeric tests of the lowering", "scale before the product of queries and keys", "model code (sdpa)"),
    elsewhere("C6", "nobody: optional", "queries times keys as an einsum without transposes", "NE"),
    rule("C7", Warning, "RMSNorm reduces the channel axis (Apple's Qwen3 reduces the last); exception: norms of a head's width", "NE; model code (layer_norm)"),
    rule("C8", Note, "one operation instead of its parts, where there is one", "NE, CI"),
    rule("C9", Warning, "no tanh and no erf: 2 sigmoid(2x) - 1, and gelu in its sigmoid form", "CI; model code (gelu)"),
    rule("C10", Error, "rotary tables are not indexed by position in the graph; exception: inside Apple's composite `rope_cached_cos_sin_gather`", "NE, CI"),
    rule("C11", Error, "gather and scatter only inside Apple's known composites", "CI"),
    elsewhere("C12", "the design: states and `slice_update`, as Apple's model code has it", "the skill recommends caches that are only read in the graph", "NE against model code"),
    rule("C13", Error, "constrained states are read through `copy_discarding_constraints` and written through `copy_with_constraints`", "export"),
    rule("C14", Warning, "ends of `slice_update` lie within the tensor (Apple's export relies on clamping)", "export"),
    rule("C15", Error, "convolution strides are at most 3, at most 2 for palettized weights", "NE"),
    elsewhere("C16", "nobody: there is no pooling", "pooling strides are 2 or 4", "NE"),
    rule("C17", Warning, "prefill has a width of 64: token by token, f16 drifts", "NE, CI"),
    rule("C18", Warning, "a square in f16 overflows from 256 on: scale by a power of two before it", "derived from export"),
    // Compression.
    rule("D1", Warning, "weights are palettized with 2, 4, 6 or 8 bits per tensor or per group of output channels, or int8 or int4 per channel; blocks along the input are the GPU's", "WC, NE"),
    rule("D2", Warning, "no weight is left uncompressed where others are compressed", "MC"),
    rule("D3", Warning, "embeddings, norms and biases are not palettized", "model code; MA"),
    rule("D4", Error, "tables are f16 with one entry per index value, two axes more than the weight, axis 0", "export"),
    elsewhere("D5", "the test suite", "re-authored against source above 70 dB, compiled above 40 dB, 4-bit above 35 dB", "WC"),
    elsewhere("D6", "`eval`", "sensitive layers may need 8 bits", "model code (recipes)"),
    elsewhere("D7", "`eval`", "first and last layers err most", "MC"),
    rule("D8", Warning, "a model on a phone stays below 2 GB", "WC"),
    // Contract of Apple's runner, where a program is made for it.
    rule("E1", Error, "functions are `extend_{C}_{w}` or `prompt_opt_{C}_{w}` and there is a `gather_embeddings_{w}` for each width", "model code (StaticShapeEngine)"),
    rule("E2", Error, "the decoder has the states `key_cache` and `value_cache`, or none", "model code (StaticShapeEngine)"),
    rule("E3", Error, "ids and step are si32, positions ui16, mask and logits f16, under the runner's names", "model code (StaticShapeEngine)"),
    // Known defects.
    rule("K1", Warning, "an argmax of f16 gave wrong ids under acceleration on some systems; one cast to f16 aborts", "ct 116"),
    elsewhere("K2", "the runtime's self-test of every program", "an f16 output layer gave zeros under acceleration", "ct 115"),
    rule("K3", Note, "a cache write at a run-time offset crashed the GPU and corrupted the engine's cache on betas of OS 27", "cm 5"),
    rule("K4", Note, "the GPU keeps one of several writes to a state in one call; the engine keeps all", "cli"),
    rule("K5", Error, "a growing state of 2048 and more is corrupt from the first token", "cm 124"),
    elsewhere("K6", "the runtime, which zeroes what it allocates", "states start at zero, or masked slots give NaN", "measured; notes"),
    rule("K7", Warning, "floor, trunc and ceil are the identity on the GPU, round takes ties away from zero", "ct 10"),
    rule("K8", Warning, "float to int to float is cancelled", "ct 9"),
    rule("K9", Error, "a mask of integer comparisons cast to float corrupts another tensor", "ct 11"),
    rule("K10", Note, "the engine's SiLU errs near zero, and x * sigmoid(x) is fused back to it; x / 2 * (1 + tanh(x / 2)) is accurate", "ct 21; notes"),
    rule("K11", Warning, "log of a sum of exponentials overflows f16: subtract the maximum first", "ct 21"),
    rule("K12", Error, "fused attention with a mask and a long query crashes the GPU", "notes"),
    elsewhere("K13", "the runtime's load options", "`expectFrequentReshapes` on fixed shapes specializes anew", "notes"),
    rule("K14", Warning, "a symlinked asset is not followed by the loader (seen by the command, not in a program)", "notes"),
    rule("K15", Warning, "debug locations of coreai-torch 0.4.0 are refused from beta 2 on", "ct 37, ct 44"),
    rule("K16", Error, "outputs and states have distinct names; stock engines take exactly two states", "notes"),
    elsewhere("K17", "`verify`", "metadata, logits, template and stop ids agree", "notes"),
    elsewhere("K18", "the runtime's placement check", "a sandboxed first launch cached a placement on the GPU", "notes"),
    rule("K19", Error, "contexts end at 16384: the engine's compiler fails at 32768 and the program runs elsewhere, without an error", "measured on M3 Pro"),
];

/// The rule of an identifier.
///
/// # Panics
/// If there is none.
pub(super) fn find(id: &str) -> &'static Rule {
    RULES
        .iter()
        .find(|r| r.id == id)
        .unwrap_or_else(|| panic!("no rule `{id}`"))
}
