//! `config.json` of a drafter to a [`DrafterSpec`].
//!
//! DeepSpec copies the target's config and overrides what is the drafter's, so keys
//! that are not looked at here may describe the target. z-lab keeps the layers it taps
//! and the mask id inside `dflash_config`.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Confidence, DrafterKind, DrafterSpec};
use crate::checkpoint::Error;
use crate::checkpoint::config::{MAX_DIMENSION, Object, read_json, read_rope};

/// Longest block: more than a verify call could take.
const MAX_BLOCK: usize = 64;

/// Keys that only other packagings have, with what each means.
const FOREIGN_KEYS: [(&str, &str); 6] = [
    (
        "speculators_model_type",
        "DeepSpec's and z-lab's own packaging, not that of `speculators`",
    ),
    (
        "transformer_layer_config",
        "DeepSpec's and z-lab's own packaging, not that of `speculators`",
    ),
    ("attention_sinks", "drafters without attention sinks"),
    (
        "log_snr_conditioning",
        "drafters without log-SNR conditioning",
    ),
    ("quantization_config", "unquantized checkpoints"),
    ("d2t", "drafters with the target's whole vocabulary"),
];

pub(super) fn read(dir: &Path) -> Result<DrafterSpec, Error> {
    let path = dir.join("config.json");
    let map: Map<String, Value> = read_json(&path)?;
    let config = Object {
        path: &path,
        parent: "",
        map: &map,
    };
    refuse_foreign_keys(&config)?;
    let kind = kind(&config)?;
    let inner = match config.get("dflash_config") {
        Some(Value::Object(map)) => Some(map),
        Some(other) => return Err(config.bad("dflash_config", other, "an object")),
        None => None,
    };
    let own = inner.map_or(&map, |m| m);
    // Where the drafter's ids are: beside the rest, or in an object of their own.
    let ids = Object {
        path: &path,
        parent: if inner.is_some() { "dflash_config" } else { "" },
        map: own,
    };
    if let Some(projector) = ids.get("projector_type") {
        let supported = "DeepSpec's packaging of DSpark, not SpecForge's";
        return Err(ids.unsupported("projector_type", projector, supported));
    }
    let heads = config.dimension("num_attention_heads")?;
    let kv_heads = config.dimension("num_key_value_heads")?;
    if heads % kv_heads != 0 {
        let expected = format!("a divisor of `num_attention_heads` = {heads}");
        return Err(config.bad("num_key_value_heads", &kv_heads.into(), expected));
    }
    let hidden = config.dimension("hidden_size")?;
    let head_dim = match config.get("head_dim") {
        Some(_) => config.dimension("head_dim")?,
        None => hidden / heads,
    };
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(config.bad("head_dim", &head_dim.into(), "an even number"));
    }
    let vocab = config.count("vocab_size", 1, MAX_DIMENSION * 16)?;
    let draft_vocab = config.get("draft_vocab_size");
    if draft_vocab.is_some_and(|v| v != vocab) {
        let supported = "the target's whole vocabulary";
        let found = draft_vocab.unwrap_or(&Value::Null);
        return Err(config.unsupported("draft_vocab_size", found, supported));
    }
    let target_layers = config.count("num_target_layers", 2, 10_000)?;
    let (markov_rank, confidence) = heads_of(&config, kind)?;
    let max_position = match config.get("max_position_embeddings") {
        Some(_) => config.count("max_position_embeddings", 1, 1 << 30)?,
        None => 1 << 30,
    };
    Ok(DrafterSpec {
        kind,
        hidden,
        layers: config.count("num_hidden_layers", 1, 64)?,
        heads,
        kv_heads,
        head_dim,
        intermediate: config.dimension("intermediate_size")?,
        vocab,
        rms_eps: config.positive("rms_norm_eps")?,
        rope: read_rope(&config, max_position, &mut Vec::new())?,
        target_layers,
        taps: taps(&ids, target_layers)?,
        block: config.count("block_size", 2, MAX_BLOCK)?,
        mask_id: u32::try_from(ids.count("mask_token_id", 0, vocab - 1)?)
            .map_err(|_| ids.missing("mask_token_id"))?,
        markov_rank,
        confidence,
    })
}

/// The family by the name of the model's class.
fn kind(config: &Object<'_>) -> Result<DrafterKind, Error> {
    let found = config.require("architectures")?;
    let class = match found.as_array().map(Vec::as_slice) {
        Some([one]) => one.as_str().unwrap_or_default(),
        _ => "",
    };
    match class {
        "Qwen3DSparkModel" => Ok(DrafterKind::DSpark),
        "DFlashDraftModel" => Ok(DrafterKind::DFlash),
        _ => Err(config.unsupported(
            "architectures",
            found,
            "`Qwen3DSparkModel` of DeepSpec and `DFlashDraftModel` of z-lab",
        )),
    }
}

/// Width of the Markov head and input of the confidence head.
fn heads_of(config: &Object<'_>, kind: DrafterKind) -> Result<(usize, Option<Confidence>), Error> {
    let rank = match config.get("markov_rank") {
        None => 0,
        Some(_) => config.count("markov_rank", 0, MAX_DIMENSION)?,
    };
    if rank > 0 {
        config.only_if_present("markov_head_type", &"vanilla".into(), "`vanilla`")?;
    }
    let confident = config.flag("enable_confidence_head", false)?;
    if kind == DrafterKind::DFlash && (rank > 0 || confident) {
        let (key, found) = if rank > 0 {
            ("markov_rank", Value::from(rank))
        } else {
            ("enable_confidence_head", Value::from(true))
        };
        let supported = "a DFlash drafter without Markov and confidence heads";
        return Err(config.unsupported(key, &found, supported));
    }
    let with_markov = config.flag("confidence_head_with_markov", false)?;
    let confidence = match (confident, with_markov) {
        (false, _) => None,
        (true, true) if rank > 0 => Some(Confidence::HiddenAndMarkov),
        (true, true) => {
            let expected = "false without a Markov head";
            return Err(config.bad("confidence_head_with_markov", &true.into(), expected));
        }
        (true, false) => Some(Confidence::Hidden),
    };
    Ok((rank, confidence))
}

/// The tapped layers: ascending, and none of them the last, whose output is normed.
fn taps(ids: &Object<'_>, target_layers: usize) -> Result<Vec<usize>, Error> {
    let found = ids.require("target_layer_ids")?;
    let expected = || format!("ascending layers from 0 to {}", target_layers - 2);
    let list = found.as_array().filter(|l| (1..=64).contains(&l.len()));
    let taps: Option<Vec<usize>> = list.and_then(|list| {
        let layer = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
        list.iter().map(layer).collect()
    });
    taps.filter(|t| t.windows(2).all(|w| w[0] < w[1]))
        .filter(|t| t.iter().all(|&l| l + 1 < target_layers))
        .ok_or_else(|| ids.bad("target_layer_ids", found, expected()))
}

/// Refuses what would be read as another drafter than it is.
fn refuse_foreign_keys(config: &Object<'_>) -> Result<(), Error> {
    for (key, supported) in FOREIGN_KEYS {
        if let Some(found) = config.get(key).filter(|v| **v != Value::Bool(false)) {
            return Err(config.unsupported(key, found, supported));
        }
    }
    let embedded = config
        .map
        .iter()
        .find(|(key, _)| key.starts_with("dspark_"));
    if let Some((key, found)) = embedded {
        let supported = "a drafter in a folder of its own, not one embedded in its target";
        return Err(config.unsupported(key, found, supported));
    }
    for (key, value, supported) in [
        ("hidden_act", Value::from("silu"), "`silu`"),
        ("attention_bias", false.into(), "`false`"),
        ("use_sliding_window", false.into(), "`false`"),
        ("causal", false.into(), "blocks that see all of themselves"),
        (
            "is_causal",
            false.into(),
            "blocks that see all of themselves",
        ),
        ("rope_interleaved", false.into(), "rotary halves, not pairs"),
        ("sample_from_anchor", true.into(), "an anchor that guesses"),
        ("logits_start", 0.into(), "an anchor that guesses"),
    ] {
        config.only_if_present(key, &value, supported)?;
    }
    if let Some(types) = config.get("layer_types") {
        let full = types
            .as_array()
            .is_some_and(|types| types.iter().all(|t| t == "full_attention"));
        if !full {
            return Err(config.unsupported("layer_types", types, "`full_attention` throughout"));
        }
    }
    Ok(())
}

/// Refuses tensors that tell another variant, with its name.
pub(super) fn refuse_foreign_tensors<'a>(
    dir: &Path,
    names: impl Iterator<Item = &'a String>,
) -> Result<(), Error> {
    for name in names {
        let variant = if name == "d2t" || name == "t2d" {
            "a reduced vocabulary"
        } else if name.starts_with("mtp.") {
            "a drafter embedded in its target"
        } else if name.contains("markov_head.") && !name.starts_with("markov_head.markov_w") {
            "a Markov head that is gated or recurrent"
        } else if name.contains("selector") || name.contains("conv") {
            "the path selector and convolutions of DFlash 2"
        } else if name.contains("sink") {
            "attention sinks"
        } else if name.contains("snr") {
            "log-SNR conditioning"
        } else {
            continue;
        };
        return Err(Error::DrafterVariant {
            dir: dir.to_path_buf(),
            tensor: name.clone(),
            variant,
        });
    }
    Ok(())
}
