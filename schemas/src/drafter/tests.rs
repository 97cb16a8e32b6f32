use std::fs;

use safetensors::Dtype as StDtype;
use safetensors::tensor::TensorView as StView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

/// A drafter of two layers in its own folder.
struct Toy {
    dir: TempDir,
    config: Value,
    tensors: BTreeMap<String, Vec<usize>>,
}

impl Toy {
    fn dspark() -> Self {
        Self::new(json!({
            "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_act": "silu",
            "attention_bias": false, "hidden_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "intermediate_size": 12, "vocab_size": 10, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_types": ["full_attention", "full_attention"], "block_size": 7,
            "mask_token_id": 9, "target_layer_ids": [1, 3], "num_target_layers": 6,
            "markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": true,
            "confidence_head_with_markov": true, "tie_word_embeddings": false
        }))
    }

    fn dflash() -> Self {
        let mut toy = Self::dspark();
        let map = toy.config.as_object_mut().unwrap();
        for key in [
            "rope_parameters",
            "mask_token_id",
            "target_layer_ids",
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
        ] {
            map.remove(key);
        }
        map.insert("architectures".into(), json!(["DFlashDraftModel"]));
        map.insert("block_size".into(), json!(16));
        map.insert("rope_theta".into(), json!(10000));
        let ids = json!({"mask_token_id": 9, "target_layer_ids": [1, 3]});
        map.insert("dflash_config".into(), ids);
        let mut toy = Self::new(toy.config);
        toy.tensors.remove(EMBEDDING);
        toy.tensors.remove(LM_HEAD);
        toy
    }

    fn new(config: Value) -> Self {
        let mut toy = Self {
            dir: tempfile::tempdir().unwrap(),
            config,
            tensors: BTreeMap::new(),
        };
        toy.write_config();
        let spec = config::read(toy.dir.path()).unwrap();
        toy.tensors = spec.tensors().into_iter().collect();
        for name in [EMBEDDING, LM_HEAD] {
            toy.tensors.insert(name.into(), vec![10, 8]);
        }
        toy
    }

    fn write_config(&self) {
        fs::write(self.dir.path().join("config.json"), self.config.to_string()).unwrap();
    }

    fn open(&self) -> Result<DrafterCheckpoint, Error> {
        self.write_config();
        let bytes: BTreeMap<&String, Vec<u8>> = self
            .tensors
            .iter()
            .map(|(n, s)| (n, vec![0; 2 * s.iter().product::<usize>()]))
            .collect();
        let views = self.tensors.iter().map(|(name, shape)| {
            let view = StView::new(StDtype::BF16, shape.clone(), &bytes[name]).unwrap();
            (name, view)
        });
        let file = self.dir.path().join("model.safetensors");
        fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
        DrafterCheckpoint::open(self.dir.path())
    }

    /// The message of a config or tensors that are refused.
    fn refusal(&self) -> String {
        let error = self.open().unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&self.dir.path().display().to_string())
                || matches!(error, Error::Shape { .. }),
            "{error}"
        );
        error.to_string()
    }
}

#[test]
fn both_kinds_open_with_and_without_the_targets_tables() {
    let mut toy = Toy::dspark();
    let ckpt = toy.open().unwrap();
    let spec = ckpt.spec();
    assert_eq!((spec.kind, spec.guesses()), (DrafterKind::DSpark, 7));
    assert_eq!(spec.confidence, Some(Confidence::HiddenAndMarkov));
    assert_eq!(spec.rope.theta.to_bits(), 10_000_f64.to_bits());
    assert!(ckpt.has(EMBEDDING) && ckpt.has(LM_HEAD));
    // Two layers of eleven, and nine others.
    assert_eq!(ckpt.len(), 2 * 11 + 9);
    toy.tensors.remove(EMBEDDING);
    toy.tensors.remove(LM_HEAD);
    let ckpt = toy.open().unwrap();
    assert!(!ckpt.has(EMBEDDING) && !ckpt.has(LM_HEAD));

    let ckpt = Toy::dflash().open().unwrap();
    let spec = ckpt.spec();
    assert_eq!((spec.kind, spec.guesses()), (DrafterKind::DFlash, 15));
    assert_eq!((spec.mask_id, &spec.taps[..]), (9, &[1, 3][..]));
    assert_eq!(ckpt.len(), 2 * 11 + 3);
}

#[test]
fn five_layers_have_the_published_number_of_tensors() {
    let mut toy = Toy::dspark();
    toy.config["num_hidden_layers"] = json!(5);
    assert_eq!(Toy::new(toy.config).open().unwrap().len(), 64);
    let mut toy = Toy::dflash();
    toy.config["num_hidden_layers"] = json!(5);
    let mut toy = Toy::new(toy.config);
    toy.tensors.remove(EMBEDDING);
    toy.tensors.remove(LM_HEAD);
    assert_eq!(toy.open().unwrap().len(), 58);
}

#[test]
fn either_spelling_of_the_rotary_base_is_read() {
    let mut toy = Toy::dspark();
    let map = toy.config.as_object_mut().unwrap();
    map.remove("rope_parameters");
    map.insert("rope_theta".into(), json!(5000));
    let theta = toy.open().unwrap().spec().rope.theta;
    assert_eq!(theta.to_bits(), 5000_f64.to_bits());
}

#[test]
fn variants_are_refused_by_name() {
    for (key, value, expected) in [
        ("speculators_model_type", json!("dspark"), "speculators"),
        (
            "architectures",
            json!(["DSparkDraftModel"]),
            "DSparkDraftModel",
        ),
        (
            "dflash_config",
            json!({"projector_type": "dspark"}),
            "SpecForge",
        ),
        ("markov_head_type", json!("gated"), "vanilla"),
        ("log_snr_conditioning", json!(true), "log-SNR"),
        ("causal", json!(true), "see all of themselves"),
        ("attention_sinks", json!(true), "attention sinks"),
        (
            "layer_types",
            json!(["sliding_attention", "full_attention"]),
            "full_attention",
        ),
        ("rope_interleaved", json!(true), "rotary halves"),
        ("sample_from_anchor", json!(false), "anchor that guesses"),
        ("draft_vocab_size", json!(8), "whole vocabulary"),
        ("dspark_block_size", json!(5), "embedded in its target"),
        (
            "rope_parameters",
            json!({"rope_type": "su", "rope_theta": 1e4}),
            "rope_type",
        ),
    ] {
        let mut toy = Toy::dspark();
        toy.config[key] = value;
        let message = toy.refusal();
        assert!(message.contains(expected), "{key}: {message}");
    }
    for (tensor, expected) in [
        ("d2t", "reduced vocabulary"),
        ("mtp.layers.0.weight", "embedded in its target"),
        ("markov_head.gate.weight", "gated or recurrent"),
        ("path_selector.weight", "DFlash 2"),
        ("layers.0.self_attn.sinks", "attention sinks"),
        ("layers.9.self_attn.q_proj.weight", "does not use"),
    ] {
        let mut toy = Toy::dspark();
        toy.tensors.insert(tensor.into(), vec![1]);
        let message = toy.refusal();
        assert!(message.contains(expected), "{tensor}: {message}");
    }
}

#[test]
fn wrong_numbers_and_shapes_are_refused() {
    for (key, value) in [
        ("target_layer_ids", json!([1, 5])),
        ("target_layer_ids", json!([3, 1])),
        ("target_layer_ids", json!([])),
        ("target_layer_ids", json!([-1])),
        ("mask_token_id", json!(10)),
        ("block_size", json!(1)),
        ("block_size", json!(1_000_000)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(3)),
        ("num_hidden_layers", json!(1_000_000_000)),
        ("markov_rank", json!(-1)),
    ] {
        let mut toy = Toy::dspark();
        toy.config[key] = value.clone();
        assert!(toy.refusal().contains(key), "{key} {value}");
    }
    let mut toy = Toy::dspark();
    toy.tensors.insert(FUSE.into(), vec![8, 8]);
    assert!(toy.refusal().contains("expected [8, 16]"));
    let mut toy = Toy::dspark();
    toy.tensors.remove(MARKOV_OUT);
    assert!(toy.refusal().contains(MARKOV_OUT));
}
