//! `config.json` and `generation_config.json` to a [`ModelSpec`].
//!
//! Every key that `Qwen3ForCausalLM` or `LlamaForCausalLM` of transformers reads is either
//! taken over or must have the one value we compute; anything else would be a silently different
//! model. Keys it does not read (training settings, versions, tool notes) cannot
//! change it and are not looked at.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Error;
use crate::spec::{Architecture, ModelSpec, Rope, RopeKind};

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

/// Bound on every dimension, far above any model: products of three fit an u64.
pub(crate) const MAX_DIMENSION: usize = 1 << 20;

/// Reads both files; oddities that are no errors go to `notes`.
pub(super) fn read(dir: &Path, notes: &mut Vec<String>) -> Result<ModelSpec, Error> {
    let path = dir.join(CONFIG);
    let map: Map<String, Value> = read_json(&path)?;
    let config = Object {
        path: &path,
        parent: "",
        map: &map,
    };
    let architecture = read_architecture(&config)?;
    config.only_if_present("hidden_act", &"silu".into(), "`silu`")?;
    config.only_if_present("attention_bias", &false.into(), "`false`")?;
    if architecture == Architecture::Llama {
        config.only_if_present("mlp_bias", &false.into(), "`false`")?;
    }
    config.only_if_present("use_sliding_window", &false.into(), "`false`")?;
    if let Some(types) = config.get("layer_types") {
        let full = types
            .as_array()
            .is_some_and(|types| types.iter().all(|t| t == "full_attention"));
        if !full {
            return Err(config.unsupported("layer_types", types, "`full_attention` throughout"));
        }
    }
    if let Some(quantization) = config.get("quantization_config") {
        return Err(config.unsupported(
            "quantization_config",
            quantization,
            "unquantized checkpoints",
        ));
    }

    let heads = config.dimension("num_attention_heads")?;
    let kv_heads = match map.get("num_key_value_heads") {
        Some(Value::Null) => heads,
        _ => config.dimension("num_key_value_heads")?,
    };
    if heads % kv_heads != 0 {
        let expected = format!("a divisor of `num_attention_heads` = {heads}");
        return Err(config.bad("num_key_value_heads", &kv_heads.into(), expected));
    }
    let hidden = config.dimension("hidden_size")?;
    let head_dim = if architecture == Architecture::Llama && config.get("head_dim").is_none() {
        if !hidden.is_multiple_of(heads) {
            let expected = format!("a divisor of `hidden_size` = {hidden} if `head_dim` is absent");
            return Err(config.bad("num_attention_heads", &heads.into(), expected));
        }
        hidden / heads
    } else {
        config.dimension("head_dim")?
    };
    if head_dim % 2 != 0 {
        return Err(config.bad("head_dim", &head_dim.into(), "an even number"));
    }
    let max_position = config.count("max_position_embeddings", 1, 1 << 30)?;
    let vocab = config.count("vocab_size", 1, MAX_DIMENSION * 16)?;
    let mut eos = config.ids("eos_token_id", vocab)?;
    for id in generation_eos(dir, vocab)? {
        if !eos.contains(&id) {
            eos.push(id);
        }
    }
    Ok(ModelSpec {
        architecture,
        hidden,
        layers: config.count("num_hidden_layers", 1, 10_000)?,
        heads,
        kv_heads,
        head_dim,
        intermediate: config.dimension("intermediate_size")?,
        vocab,
        max_position,
        rms_eps: config.positive("rms_norm_eps")?,
        rope: read_rope(&config, max_position, notes)?,
        tie_word_embeddings: config.flag("tie_word_embeddings", false)?,
        bos: config.ids("bos_token_id", vocab)?.first().copied(),
        eos,
    })
}

/// `model_type`, which must agree with `architectures` if that is there.
fn read_architecture(config: &Object<'_>) -> Result<Architecture, Error> {
    let found = config.require("model_type")?;
    let (architecture, class, supported) = match found.as_str() {
        Some("qwen3") => (
            Architecture::Qwen3,
            "Qwen3ForCausalLM",
            "`[\"Qwen3ForCausalLM\"]`",
        ),
        Some("llama") => (
            Architecture::Llama,
            "LlamaForCausalLM",
            "`[\"LlamaForCausalLM\"]`",
        ),
        _ => return Err(config.unsupported("model_type", found, "`qwen3` and `llama`")),
    };
    match config.get("architectures") {
        Some(classes) if *classes != serde_json::json!([class]) => {
            Err(config.unsupported("architectures", classes, supported))
        }
        _ => Ok(architecture),
    }
}

fn generation_eos(dir: &Path, vocab: usize) -> Result<Vec<u32>, Error> {
    let path = dir.join(GENERATION_CONFIG);
    if !path.exists() {
        return Ok(Vec::new());
    }
    let map: Map<String, Value> = read_json(&path)?;
    Object {
        path: &path,
        parent: "",
        map: &map,
    }
    .ids("eos_token_id", vocab)
}

/// Reads either spelling: `rope_theta` beside `rope_scaling`, whose kind is `type` or
/// `rope_type`, or `rope_parameters` with both inside.
pub(crate) fn read_rope(
    config: &Object<'_>,
    max_position: usize,
    notes: &mut Vec<String>,
) -> Result<Rope, Error> {
    let (parent, empty) = match (config.get("rope_parameters"), config.get("rope_scaling")) {
        (Some(found), Some(_)) => {
            let expected = "absent when `rope_scaling` is present";
            return Err(config.bad("rope_parameters", found, expected));
        }
        (Some(_), None) => ("rope_parameters", Map::new()),
        (None, _) => ("rope_scaling", Map::new()),
    };
    let map = match config.get(parent) {
        Some(Value::Object(map)) => map,
        Some(other) => return Err(config.bad(parent, other, "an object")),
        None => &empty,
    };
    let rope = Object {
        path: config.path,
        parent,
        map,
    };
    let theta = if rope.get("rope_theta").is_some() {
        rope.positive("rope_theta")?
    } else {
        config.positive("rope_theta")?
    };
    if theta <= 1.0 {
        return Err(config.bad("rope_theta", &theta.into(), "a number above 1"));
    }
    for object in [config, &rope] {
        object.only_if_present("partial_rotary_factor", &1.0.into(), "`1.0`")?;
    }
    let kind = match (rope.get("rope_type"), rope.get("type")) {
        (Some(a), Some(b)) if a != b => {
            return Err(rope.bad("type", b, format!("the same as `rope_type`, {a}")));
        }
        (Some(kind), _) | (None, Some(kind)) => kind.as_str().unwrap_or_default(),
        (None, None) if map.keys().all(|key| key == "rope_theta") => "default",
        (None, None) => return Err(rope.missing("rope_type")),
    };
    let factor = || rope.number("factor", 1.0, 1e6);
    // As transformers: the config's own context length if no other is given.
    let original = || match rope.get("original_max_position_embeddings") {
        None => Ok(max_position),
        Some(_) => rope.count("original_max_position_embeddings", 1, 1 << 30),
    };
    let (kind, keys): (RopeKind, &[&str]) = match kind {
        "default" => (RopeKind::Default, &[]),
        "linear" => (RopeKind::Linear { factor: factor()? }, &["factor"]),
        "yarn" => {
            let factor = factor()?;
            let or = |key, default| match rope.get(key) {
                None => Ok(default),
                Some(_) => rope.positive(key),
            };
            let kind = RopeKind::Yarn {
                factor,
                original_max_position: original()?,
                beta_fast: or("beta_fast", 32.0)?,
                beta_slow: or("beta_slow", 1.0)?,
                attention_factor: or("attention_factor", yarn_attention_factor(&rope, factor)?)?,
                truncate: rope.flag("truncate", true)?,
            };
            let keys = &[
                "factor",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "attn_factor",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ];
            // vLLM's key, in DeepSeek-R1-0528-Qwen3-8B; the graph of transformers, which
            // is ours, does not have it.
            if let Some(value) = rope.get("attn_factor") {
                notes.push(format!(
                    "`attn_factor` = {value} of `{parent}` is left aside, as transformers does; \
                     its key is `attention_factor`"
                ));
            }
            (kind, keys)
        }
        "llama3" => {
            let low_freq_factor = rope.positive("low_freq_factor")?;
            let high_freq_factor = rope.positive("high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                let expected = format!("more than `low_freq_factor` = {low_freq_factor}");
                return Err(rope.bad("high_freq_factor", &high_freq_factor.into(), expected));
            }
            let kind = RopeKind::Llama3 {
                factor: factor()?,
                low_freq_factor,
                high_freq_factor,
                original_max_position: original()?,
            };
            let keys = &[
                "factor",
                "original_max_position_embeddings",
                "low_freq_factor",
                "high_freq_factor",
            ];
            (kind, keys)
        }
        _ => {
            let found = rope
                .get("rope_type")
                .or(rope.get("type"))
                .unwrap_or(&Value::Null);
            let supported = "`default`, `linear`, `yarn` and `llama3`";
            return Err(rope.unsupported("rope_type", found, supported));
        }
    };
    let common = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
    let unknown = map
        .iter()
        .find(|(key, _)| !keys.contains(&key.as_str()) && !common.contains(&key.as_str()));
    match unknown {
        Some((key, value)) => Err(rope.unsupported(key, value, "the keys of its `rope_type`")),
        None => Ok(Rope { theta, kind }),
    }
}

/// YaRN's default factor, `0.1 ln(factor) + 1`, or DeepSeek's ratio of two such.
fn yarn_attention_factor(rope: &Object<'_>, factor: f64) -> Result<f64, Error> {
    let mscale = |scale: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * scale * factor.ln() + 1.0
        }
    };
    let get = |key| match rope.get(key) {
        None => Ok(0.0),
        Some(_) => rope.number(key, 0.0, 1e6),
    };
    let (one, all) = (get("mscale")?, get("mscale_all_dim")?);
    Ok(if one != 0.0 && all != 0.0 {
        mscale(one) / mscale(all)
    } else {
        mscale(1.0)
    })
}

pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io {
        path: path.to_path_buf(),
        source,
    })?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Json {
        path: path.to_path_buf(),
        source,
    })
}

/// A JSON object that knows where it stands, for messages.
pub(crate) struct Object<'a> {
    pub(crate) path: &'a PathBuf,
    /// Key of this object in the file, or empty for the top.
    pub(crate) parent: &'a str,
    pub(crate) map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    /// The value, with null as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn require(&self, key: &str) -> Result<&'a Value, Error> {
        self.get(key).ok_or_else(|| self.missing(key))
    }

    pub(crate) fn count(&self, key: &str, min: usize, max: usize) -> Result<usize, Error> {
        let value = self.require(key)?;
        value
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| (min..=max).contains(n))
            .ok_or_else(|| self.bad(key, value, format!("a whole number from {min} to {max}")))
    }

    pub(crate) fn dimension(&self, key: &str) -> Result<usize, Error> {
        self.count(key, 1, MAX_DIMENSION)
    }

    fn number(&self, key: &str, min: f64, max: f64) -> Result<f64, Error> {
        let value = self.require(key)?;
        value
            .as_f64()
            .filter(|x| (min..=max).contains(x))
            .ok_or_else(|| self.bad(key, value, format!("a number from {min} to {max}")))
    }

    pub(crate) fn positive(&self, key: &str) -> Result<f64, Error> {
        let value = self.require(key)?;
        value
            .as_f64()
            .filter(|x| x.is_finite() && *x > 0.0)
            .ok_or_else(|| self.bad(key, value, "a number above 0"))
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.bad(key, value, "true or false")),
        }
    }

    /// One token id, several, or none.
    fn ids(&self, key: &str, vocab: usize) -> Result<Vec<u32>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let values = value
            .as_array()
            .map_or(std::slice::from_ref(value), Vec::as_slice);
        values
            .iter()
            .map(|id| {
                id.as_u64()
                    .filter(|&id| id < vocab as u64)
                    .and_then(|id| u32::try_from(id).ok())
                    .ok_or_else(|| self.bad(key, value, format!("token ids below {vocab}")))
            })
            .collect()
    }

    pub(crate) fn only_if_present(
        &self,
        key: &str,
        value: &Value,
        supported: &'static str,
    ) -> Result<(), Error> {
        match self.get(key) {
            Some(found) if found != value => Err(self.unsupported(key, found, supported)),
            _ => Ok(()),
        }
    }

    fn key(&self, key: &str) -> String {
        if self.parent.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.parent)
        }
    }

    pub(crate) fn missing(&self, key: &str) -> Error {
        Error::MissingKey {
            path: self.path.clone(),
            key: self.key(key),
        }
    }

    pub(crate) fn bad(&self, key: &str, found: &Value, expected: impl Into<String>) -> Error {
        Error::BadValue {
            path: self.path.clone(),
            key: self.key(key),
            found: found.to_string(),
            expected: expected.into(),
        }
    }

    pub(crate) fn unsupported(&self, key: &str, found: &Value, supported: &'static str) -> Error {
        Error::Unsupported {
            path: self.path.clone(),
            key: self.key(key),
            found: found.to_string(),
            supported,
        }
    }
}
