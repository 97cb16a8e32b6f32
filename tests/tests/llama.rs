//! The line on a Llama of random weights, with three query heads: what its programs compute
//! is what the teacher computes with the same tables.

use std::fs;
use std::path::Path;

use anemone_convert::commands::eval::{self, EvalOptions};
use anemone_convert::quantize::Method;
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_schemas::checkpoint::read_spec;
use anemone_schemas::report::Measured;
use anemone_tests::line::{lowered, quantized, scratch};
use anemone_tests::reference::data;
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

/// How far the simulator may be from the programs, as a share of the divergence.
const SIMULATOR_TOLERANCE: f64 = 0.05;

/// Uniform in (-1, 1).
fn uniform(seed: u64, i: u64) -> f32 {
    let mut z = (seed.wrapping_mul(0xd134_2543_de82_ef95) ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn write_model(dir: &Path) {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 8,
        "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 4096,
        "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true, "eos_token_id": 4064
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(data("tiny-qwen3").join(file), dir.join(file)).unwrap();
    }
    let spec = read_spec(dir).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = spec
        .tensors()
        .into_iter()
        .enumerate()
        .map(|(seed, (name, shape))| {
            let scale = if shape.len() == 1 {
                0.3
            } else {
                // Large enough that layers matter and distributions are far from flat.
                3.0 / (shape[1] as f32).sqrt()
            };
            let shift = f32::from(u8::from(shape.len() == 1));
            let count = shape.iter().product::<usize>() as u64;
            let values = (0..count).map(|i| shift + scale * uniform(seed as u64, i));
            let bytes = values
                .flat_map(|v| bf16::from_f32(v).to_le_bytes())
                .collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

#[test]
fn programs_of_a_llama_compute_what_the_teacher_does() {
    let dir = scratch("llama");
    let model = dir.join("model");
    fs::create_dir_all(&model).unwrap();
    write_model(&model);
    let store = quantized(&model, &dir, Method::TwoSided, 2048);
    let folder = lowered(&store, &dir, 256);
    let options = EvalOptions {
        model,
        store: Some(store),
        folder: Some(folder),
        text: Vec::new(),
        window: 128,
        tokens: 512,
        threads: 2,
    };
    let report = eval::run(&options, Ui::Quiet, &Stop::default()).unwrap();
    let of = |measured: Measured| {
        let mut students = report.students.iter();
        students.find(|s| s.measured == measured).unwrap()
    };
    let (shipped, simulated) = (of(Measured::ShippedPrograms), of(Measured::Simulator));
    for (a, b) in shipped.sets.iter().zip(&simulated.sets) {
        // Random models find texts surprising; a flat one would have the vocabulary's size.
        assert!(a.ppl_teacher.unwrap() > 8192.0, "{a:?}");
        // Random layers amplify the rounding of the weights, so the divergence is no small one;
        // but programs and simulator must have the same.
        assert!(b.kl_mean < 1.5, "{b:?}");
        let gap = (a.kl_mean - b.kl_mean).abs();
        assert!(gap < SIMULATOR_TOLERANCE * b.kl_mean, "{a:?} {b:?}");
    }
}
