//! Configurations of the published models, key for key as in their `config.json`
//! and `generation_config.json` on the Hugging Face Hub.

use std::str::FromStr;

use serde_json::{Map, Value, json};

/// A published dense Qwen3 model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its repository on the Hugging Face Hub.
    pub repository: &'static str,
    /// Decoder layers.
    pub layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    tied: bool,
    kin: Kin,
}

/// Whose configuration files they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kin {
    Qwen3,
    DeepSeekR1,
}

const fn qwen3(
    name: &'static str,
    repository: &'static str,
    [layers, hidden, intermediate, heads]: [usize; 4],
    tied: bool,
) -> Published {
    Published {
        name,
        repository,
        layers,
        hidden,
        intermediate,
        heads,
        tied,
        kin: Kin::Qwen3,
    }
}

/// Every model known by name.
pub const PUBLISHED: [Published; 7] = [
    qwen3("qwen3-0.6b", "Qwen/Qwen3-0.6B", [28, 1024, 3072, 16], true),
    qwen3("qwen3-1.7b", "Qwen/Qwen3-1.7B", [28, 2048, 6144, 16], true),
    qwen3("qwen3-4b", "Qwen/Qwen3-4B", [36, 2560, 9728, 32], true),
    qwen3("qwen3-8b", "Qwen/Qwen3-8B", [36, 4096, 12288, 32], false),
    qwen3("qwen3-14b", "Qwen/Qwen3-14B", [40, 5120, 17408, 40], false),
    qwen3("qwen3-32b", "Qwen/Qwen3-32B", [64, 5120, 25600, 64], false),
    Published {
        kin: Kin::DeepSeekR1,
        ..qwen3(
            "r1-0528-qwen3-8b",
            "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
            [36, 4096, 12288, 32],
            false,
        )
    },
];

/// Key and value heads, head width and vocabulary are the same in all of them.
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 151_936;
/// Decoder layers of every published drafter.
const DRAFTER_LAYERS: usize = 5;
/// `<|endoftext|>` of Qwen3, `<｜begin▁of▁sentence｜>` of R1.
const BOS: u32 = 151_643;
/// `<|im_end|>` of Qwen3, `<｜end▁of▁sentence｜>` of R1.
const EOS: u32 = 151_645;

impl FromStr for Published {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        PUBLISHED
            .into_iter()
            .find(|p| p.name == name)
            .ok_or_else(|| {
                let names = PUBLISHED.map(|p| p.name).join(", ");
                format!("no model of that name is known; expected one of {names}")
            })
    }
}

impl Published {
    /// `config.json` of the model cut down to its first `layers` layers.
    pub fn config(&self, layers: usize) -> Value {
        let r1 = self.kin == Kin::DeepSeekR1;
        let rope_scaling = if r1 {
            json!({
                "attn_factor": 0.878_248_856_286_941_9,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "rope_type": "yarn",
            })
        } else {
            Value::Null
        };
        json!({
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": if r1 { 131_072 } else { 40_960 },
            "max_window_layers": layers,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-6,
            "rope_scaling": rope_scaling,
            "rope_theta": 1_000_000,
            "sliding_window": null,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_cache": !r1,
            "use_sliding_window": false,
            "vocab_size": VOCAB,
        })
    }

    /// `config.json` of the DSpark drafter published for the model, if there is one:
    /// the model's own with what is the drafter's replaced, as DeepSpec writes it.
    pub fn drafter_config(&self) -> Option<Value> {
        let taps = match self.name {
            "qwen3-4b" | "qwen3-8b" => [1, 9, 17, 25, 33],
            "qwen3-14b" => [1, 10, 19, 28, 37],
            _ => return None,
        };
        let mut config = self.config(self.layers);
        let own = json!({
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "confidence_head_with_markov": true,
            "enable_confidence_head": true,
            "layer_types": vec!["full_attention"; DRAFTER_LAYERS],
            "markov_head_type": "vanilla",
            "markov_rank": 256,
            "mask_token_id": 151_669,
            "max_window_layers": DRAFTER_LAYERS,
            "num_anchors": 512,
            "num_hidden_layers": DRAFTER_LAYERS,
            "num_target_layers": self.layers,
            "target_layer_ids": taps,
            "tie_word_embeddings": false,
        });
        if let (Value::Object(config), Value::Object(own)) = (&mut config, own) {
            config.extend(own);
        }
        Some(config)
    }

    /// `generation_config.json`.
    pub fn generation_config(&self) -> Value {
        let mut config = json!({
            "bos_token_id": BOS,
            "do_sample": true,
            "temperature": 0.6,
            "top_p": 0.95,
            "transformers_version": "4.51.0",
        });
        let own = match self.kin {
            Kin::Qwen3 => json!({
                "eos_token_id": [EOS, BOS],
                "pad_token_id": BOS,
                "top_k": 20,
            }),
            Kin::DeepSeekR1 => json!({
                "_from_model_config": true,
                "eos_token_id": EOS,
            }),
        };
        if let (Value::Object(config), Value::Object(own)) = (&mut config, own) {
            config.extend(own);
        }
        config
    }

    /// Name and shape of every tensor in the order of the model's `state_dict`,
    /// which decides how tensors fall into shards.
    pub(super) fn tensors(&self, layers: usize) -> Vec<(String, Vec<usize>)> {
        let (d, i) = (self.hidden, self.intermediate);
        let (q, kv) = (self.heads * HEAD_DIM, KV_HEADS * HEAD_DIM);
        let block: [(&str, &[usize]); 11] = [
            ("self_attn.q_proj", &[q, d]),
            ("self_attn.k_proj", &[kv, d]),
            ("self_attn.v_proj", &[kv, d]),
            ("self_attn.o_proj", &[d, q]),
            ("self_attn.q_norm", &[HEAD_DIM]),
            ("self_attn.k_norm", &[HEAD_DIM]),
            ("mlp.gate_proj", &[i, d]),
            ("mlp.up_proj", &[i, d]),
            ("mlp.down_proj", &[d, i]),
            ("input_layernorm", &[d]),
            ("post_attention_layernorm", &[d]),
        ];
        let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![VOCAB, d])];
        for layer in 0..layers {
            all.extend(block.iter().map(|(part, shape)| {
                (
                    format!("model.layers.{layer}.{part}.weight"),
                    shape.to_vec(),
                )
            }));
        }
        all.push(("model.norm.weight".to_owned(), vec![d]));
        if !self.tied {
            all.push(("lm_head.weight".to_owned(), vec![VOCAB, d]));
        }
        all
    }
}

/// A JSON object in the Hub's spelling: two blanks a level, ending in a newline.
pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// An index of shards.
pub(super) fn index(total_size: u64, weight_map: &Map<String, Value>) -> Value {
    json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map })
}
