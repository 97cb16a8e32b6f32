use std::fs;
use std::path::{Path, PathBuf};

use safetensors::Dtype as StDtype;
use safetensors::tensor::TensorView as StView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::spec::{Architecture, FINAL_NORM, Linear, RopeKind};

/// A two-layer model of random-looking bf16 weights in its own folder.
struct Toy {
    dir: TempDir,
    config: Value,
    tensors: BTreeMap<String, (StDtype, Vec<usize>, Vec<u8>)>,
}

impl Toy {
    fn new() -> Self {
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "attention_bias": false, "use_sliding_window": false, "sliding_window": null,
            "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 12, "vocab_size": 10,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
            "rope_scaling": null, "tie_word_embeddings": true, "bos_token_id": 1,
            "eos_token_id": 2, "transformers_version": "4.51.0"
        });
        let mut toy = Self {
            dir: tempfile::tempdir().unwrap(),
            config,
            tensors: BTreeMap::new(),
        };
        toy.write_config();
        let spec = read_spec(toy.dir.path()).unwrap();
        for (at, (name, shape)) in spec.tensors().into_iter().enumerate() {
            toy.put(&name, &shape, at);
        }
        toy
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn put(&mut self, name: &str, shape: &[usize], seed: usize) {
        let n: usize = shape.iter().product();
        let bytes = (0..n)
            .flat_map(|i| {
                half::bf16::from_f32(((i * 31 + seed * 7) % 13) as f32 / 8.0).to_le_bytes()
            })
            .collect();
        self.tensors
            .insert(name.to_owned(), (StDtype::BF16, shape.to_vec(), bytes));
    }

    fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.config[key] = value;
        self
    }

    fn write_config(&self) {
        let text = serde_json::to_string(&self.config).unwrap();
        fs::write(self.path().join("config.json"), text).unwrap();
    }

    fn write_shard(&self, file: &str, keep: impl Fn(&str) -> bool) {
        let views: Vec<_> = self
            .tensors
            .iter()
            .filter(|(name, _)| keep(name))
            .map(|(name, (dtype, shape, bytes))| {
                (name, StView::new(*dtype, shape.clone(), bytes).unwrap())
            })
            .collect();
        let bytes = safetensors::serialize(views, None).unwrap();
        fs::write(self.path().join(file), bytes).unwrap();
    }

    /// Writes config and a single weight file.
    fn write(&self) -> &Self {
        self.write_config();
        self.write_shard("model.safetensors", |_| true);
        self
    }

    /// Writes config, two shards and an index that `edit` may spoil.
    fn write_sharded(&self, edit: impl FnOnce(&mut Value)) -> &Self {
        self.write_config();
        let second = |name: &str| name.contains(".1.");
        self.write_shard("a.safetensors", |name| !second(name));
        self.write_shard("b.safetensors", second);
        let map: BTreeMap<&str, &str> = self
            .tensors
            .keys()
            .map(|n| {
                (
                    n.as_str(),
                    if second(n) {
                        "b.safetensors"
                    } else {
                        "a.safetensors"
                    },
                )
            })
            .collect();
        let total: usize = self.tensors.values().map(|t| t.2.len()).sum();
        let mut index = json!({"metadata": {"total_size": total}, "weight_map": map});
        edit(&mut index);
        fs::write(
            self.path().join("model.safetensors.index.json"),
            index.to_string(),
        )
        .unwrap();
        self
    }

    fn open(&self) -> Result<Checkpoint, Error> {
        Checkpoint::open(self.path())
    }

    fn error(&self) -> Error {
        self.open().unwrap_err()
    }

    /// The error of a config in which one key is replaced.
    fn config_error(key: &str, value: Value) -> Error {
        let mut toy = Self::new();
        toy.set(key, value).write();
        toy.error()
    }
}

fn truncate(path: PathBuf, len: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

#[test]
fn a_whole_checkpoint_opens_from_one_file_or_from_shards() {
    let toy = Toy::new();
    toy.write();
    let single = toy.open().unwrap();
    assert_eq!(single.head(), Head::Tied);
    assert_eq!((single.spec().hidden, single.spec().layers), (8, 2));
    assert_eq!(
        (single.spec().bos, single.spec().eos.as_slice()),
        (Some(1), &[2][..])
    );
    let (shape, values) = single.read_f32(&Linear::Down.tensor(1)).unwrap();
    assert_eq!(shape, Linear::Down.shape(single.spec()));
    let stored = &toy.tensors[&Linear::Down.tensor(1)].2;
    for (x, b) in values.iter().zip(stored.as_chunks::<2>().0) {
        assert_eq!(x.to_bits() >> 16, u32::from(u16::from_le_bytes(*b)));
    }
    let print = single.fingerprint();

    fs::remove_file(toy.path().join("model.safetensors")).unwrap();
    toy.write_sharded(|_| ());
    let sharded = toy.open().unwrap();
    assert_eq!(sharded.fingerprint(), print);
    assert_eq!(sharded.read_f32(&Linear::Down.tensor(1)).unwrap().1, values);
    assert!(sharded.notes().is_empty() && sharded.ignored().is_empty());
    sharded.unchanged().unwrap();
}

#[test]
fn a_changed_weight_changes_the_fingerprint_and_is_noticed() {
    let mut toy = Toy::new();
    toy.write();
    let before = toy.open().unwrap();
    let print = before.fingerprint();
    toy.tensors.get_mut(FINAL_NORM).unwrap().2[0] ^= 1;
    // As a download tool does it: a new file under the old name.
    toy.write_shard("new", |_| true);
    let new = fs::File::open(toy.path().join("new")).unwrap();
    new.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    fs::rename(toy.path().join("new"), toy.path().join("model.safetensors")).unwrap();
    assert!(matches!(before.unchanged(), Err(Error::Changed { .. })));
    // Another file of the same size, made at the same time.
    let (path, copy) = (
        toy.path().join("model.safetensors"),
        toy.path().join("copy"),
    );
    let before = toy.open().unwrap();
    fs::copy(&path, &copy).unwrap();
    let copied = fs::File::options().write(true).open(&copy).unwrap();
    copied.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    before.unchanged().unwrap();
    fs::rename(copy, path).unwrap();
    assert!(matches!(before.unchanged(), Err(Error::Changed { .. })));
    assert_ne!(toy.open().unwrap().fingerprint(), print);
}

#[test]
fn rows_are_gathered_in_the_order_asked_for() {
    let toy = Toy::new();
    let checkpoint = toy.write().open().unwrap();
    let (_, all) = checkpoint.read_f32(EMBEDDING).unwrap();
    let rows = checkpoint.read_rows_f32(EMBEDDING, &[7, 0]).unwrap();
    assert_eq!(rows[..8], all[56..64]);
    assert_eq!(rows[8..], all[..8]);
    assert!(matches!(
        checkpoint.read_rows_f32(EMBEDDING, &[10]),
        Err(Error::RowOutOfRange {
            row: 10,
            rows: 10,
            ..
        })
    ));
}

#[test]
fn a_config_that_asks_for_something_else_is_refused_by_key() {
    let cases = [
        ("model_type", json!("mistral")),
        ("architectures", json!(["Qwen3ForSequenceClassification"])),
        ("architectures", json!(["Qwen3MoeForCausalLM"])),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("use_sliding_window", json!(true)),
        (
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
        ),
        ("quantization_config", json!({"quant_method": "gptq"})),
        ("partial_rotary_factor", json!(0.5)),
    ];
    for (key, value) in cases {
        match Toy::config_error(key, value.clone()) {
            Error::Unsupported { key: k, found, .. } => {
                assert_eq!((k.as_str(), found), (key, value.to_string()));
            }
            other => panic!("{key}: {other}"),
        }
    }
}

#[test]
fn a_llama_has_no_head_norms_and_may_leave_out_the_head_width() {
    let mut toy = Toy::new();
    toy.set("model_type", "llama".into())
        .set("architectures", json!(["LlamaForCausalLM"]))
        .set("head_dim", Value::Null);
    let heads = |name: &String| name.contains("q_norm") || name.contains("k_norm");
    assert_eq!(toy.tensors.keys().filter(|n| heads(n)).count(), 4);
    toy.tensors.retain(|name, _| !heads(name));
    let checkpoint = toy.write().open().unwrap();
    assert_eq!(checkpoint.spec().head_dim, 4);
    assert_eq!(checkpoint.spec().architecture, Architecture::Llama);

    for (key, value) in [
        ("mlp_bias", json!(true)),
        ("architectures", json!(["Qwen3ForCausalLM"])),
    ] {
        let mut other = Toy::new();
        other
            .set("model_type", "llama".into())
            .set("architectures", Value::Null);
        other.set(key, value).write_config();
        let found = read_spec(other.path()).unwrap_err();
        assert!(
            matches!(&found, Error::Unsupported { key: k, .. } if k == key),
            "{found}"
        );
    }
    toy.set("num_attention_heads", 3.into()).write_config();
    let found = read_spec(toy.path()).unwrap_err();
    let key = "num_attention_heads";
    assert!(
        matches!(&found, Error::BadValue { key: k, .. } if k == key),
        "{found}"
    );
}

#[test]
fn a_config_value_out_of_range_is_refused_by_key() {
    let cases = [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(8.5)),
        ("hidden_size", json!("8")),
        ("num_hidden_layers", json!(-1)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(5)),
        ("vocab_size", json!(u64::MAX)),
        ("rms_norm_eps", json!(0.0)),
        ("rope_theta", json!(1.0)),
        ("rope_scaling", json!("yarn")),
        ("tie_word_embeddings", json!("yes")),
        ("eos_token_id", json!([2, 10])),
        ("bos_token_id", json!(-1)),
    ];
    for (key, value) in cases {
        match Toy::config_error(key, value) {
            Error::BadValue { key: k, .. } => assert_eq!(k, key),
            other => panic!("{key}: {other}"),
        }
    }
}

#[test]
fn a_config_without_a_dimension_is_refused() {
    for key in [
        "model_type",
        "hidden_size",
        "head_dim",
        "rope_theta",
        "rms_norm_eps",
    ] {
        match Toy::config_error(key, Value::Null) {
            Error::MissingKey { key: k, .. } => assert_eq!(k, key),
            other => panic!("{key}: {other}"),
        }
    }
}

#[test]
fn every_spelling_of_rope_scaling_is_read() {
    let yarn = RopeKind::Yarn {
        factor: 4.0,
        original_max_position: 32,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * 4f64.ln() + 1.0,
        truncate: true,
    };
    let read = |key: &str, value: Value| {
        let mut toy = Toy::new();
        toy.set(key, value).write();
        toy.open().unwrap().spec().rope.clone()
    };
    let original = json!(32);
    for kind in ["type", "rope_type"] {
        let value =
            json!({kind: "yarn", "factor": 4.0, "original_max_position_embeddings": original});
        let rope = read("rope_scaling", value);
        assert_eq!((rope.theta, rope.kind), (1e4, yarn.clone()));
    }
    let value = json!({"rope_type": "yarn", "factor": 4, "rope_theta": 5e5,
        "original_max_position_embeddings": original});
    let rope = read("rope_parameters", value);
    assert_eq!((rope.theta, rope.kind), (5e5, yarn));
    let value = json!({"type": "linear", "factor": 2.0});
    assert_eq!(
        read("rope_scaling", value).kind,
        RopeKind::Linear { factor: 2.0 }
    );
    let value = json!({"rope_type": "default", "rope_theta": 3e4});
    assert_eq!(read("rope_parameters", value).kind, RopeKind::Default);
    let value = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": original});
    let llama3 = RopeKind::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 32,
    };
    assert_eq!(read("rope_scaling", value).kind, llama3);
}

#[test]
fn a_key_only_vllm_reads_is_noted_and_left_aside() {
    let mut toy = Toy::new();
    let value = json!({"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.878});
    toy.set("rope_scaling", value).write();
    let ckpt = toy.open().unwrap();
    let factor = ckpt.spec().rope.attention_factor();
    assert!((f64::from(factor) - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-7);
    assert!(ckpt.notes()[0].contains("attn_factor"));
}

#[test]
fn an_unknown_rope_kind_or_key_is_never_plain_rope() {
    for (value, bad_key) in [
        (
            json!({"rope_type": "longrope", "factor": 2.0}),
            "rope_scaling.rope_type",
        ),
        (
            json!({"type": "dynamic", "factor": 2.0}),
            "rope_scaling.rope_type",
        ),
        (
            json!({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}),
            "rope_scaling.beta_fast",
        ),
        (
            json!({"rope_type": "default", "mrope_section": [1]}),
            "rope_scaling.mrope_section",
        ),
        (json!({"factor": 2.0}), "rope_scaling.rope_type"),
        (json!({"rope_type": "linear"}), "rope_scaling.factor"),
        (
            json!({"rope_type": "linear", "factor": 0.5}),
            "rope_scaling.factor",
        ),
        (
            json!({"rope_type": "linear", "type": "yarn", "factor": 2}),
            "rope_scaling.type",
        ),
        (json!({"rope_type": 3}), "rope_scaling.rope_type"),
    ] {
        match Toy::config_error("rope_scaling", value) {
            Error::Unsupported { key, .. }
            | Error::BadValue { key, .. }
            | Error::MissingKey { key, .. } => assert_eq!(key, bad_key),
            other => panic!("{bad_key}: {other}"),
        }
    }
}

#[test]
fn stop_ids_of_both_configs_are_united() {
    let toy = Toy::new();
    toy.write();
    let generation = json!({"eos_token_id": [3, 2]}).to_string();
    fs::write(toy.path().join("generation_config.json"), generation).unwrap();
    assert_eq!(toy.open().unwrap().spec().eos, [2, 3]);
}

#[test]
fn a_cut_shard_is_an_incomplete_download_with_both_sizes() {
    let toy = Toy::new();
    toy.write_sharded(|_| ());
    let path = toy.path().join("b.safetensors");
    let bytes = fs::read(&path).unwrap();
    let whole = bytes.len() as u64;
    for len in [whole - 1, whole - 200, 100, 8, 7, 0] {
        fs::write(&path, &bytes).unwrap();
        truncate(path.clone(), len);
        match toy.error() {
            Error::Truncated {
                path: p,
                expected,
                exact,
                found,
            } => {
                assert_eq!((p, found), (path.clone(), len));
                assert!(expected > found);
                if exact {
                    assert_eq!(expected, whole);
                } else {
                    assert!(expected <= whole && len <= 100);
                }
            }
            other => panic!("{len}: {other}"),
        }
        assert!(
            toy.error()
                .to_string()
                .ends_with("hint: incomplete download")
        );
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        toy.error(),
        Error::ShardMissing { tensors: 11, .. }
    ));
    let left = toy.path().join(".cache/huggingface/download");
    fs::create_dir_all(&left).unwrap();
    let left = left.join("b.incomplete");
    fs::write(&left, "").unwrap();
    let named = format!("hint: incomplete download, it left `{}`", left.display());
    assert!(toy.error().to_string().ends_with(&named), "{}", toy.error());
    fs::remove_file(toy.path().join("model.safetensors.index.json")).unwrap();
    assert!(toy.error().to_string().ends_with(&named), "{}", toy.error());
}

#[test]
fn bytes_after_the_data_and_broken_headers_are_refused() {
    let toy = Toy::new();
    toy.write();
    let path = toy.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    bytes.push(0);
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(toy.error(), Error::TrailingBytes { .. }));
    bytes[8] = b'[';
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(toy.error(), Error::Header { .. }));
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(toy.error(), Error::Header { .. }));
}

#[test]
fn index_and_shards_must_agree_both_ways() {
    let norm = FINAL_NORM;
    let toy = Toy::new();
    toy.write_sharded(|index| index["weight_map"][norm] = json!("b.safetensors"));
    assert!(matches!(toy.error(), Error::ListedButAbsent { tensor, .. } if tensor == norm));
    toy.write_sharded(|index| index["weight_map"]["wte.weight"] = json!("a.safetensors"));
    assert!(matches!(toy.error(), Error::ListedButAbsent { tensor, .. } if tensor == "wte.weight"));
    toy.write_sharded(|index| {
        index["weight_map"].as_object_mut().unwrap().remove(norm);
    });
    assert!(matches!(toy.error(), Error::PresentButUnlisted { tensor, .. } if tensor == norm));
    toy.write_sharded(|_| ());
    toy.write_shard("b.safetensors", |name| name.contains(".1.") || name == norm);
    assert!(matches!(toy.error(), Error::Duplicate { tensor, .. } if tensor == norm));
    toy.write_sharded(|index| index["metadata"]["total_size"] = json!(1));
    assert_eq!(toy.open().unwrap().notes().len(), 1);
    toy.write_sharded(|index| *index = json!({"weight_map": 3}));
    assert!(matches!(toy.error(), Error::Json { .. }));
    toy.write();
    assert!(matches!(toy.error(), Error::TwoWeightSets { .. }));
}

#[test]
fn a_shard_name_cannot_leave_the_folder() {
    let toy = Toy::new();
    let outside = tempfile::tempdir().unwrap();
    let absolute = outside.path().join("x.safetensors");
    let names = [
        "../x.safetensors",
        "sub/x.safetensors",
        "./a.safetensors",
        absolute.to_str().unwrap(),
        "..\\x.safetensors",
        "a.safetensors\0",
        "a.bin",
        ".safetensors",
        "..",
        "",
    ];
    for name in names {
        toy.write_sharded(|index| index["weight_map"][FINAL_NORM] = json!(name));
        assert!(matches!(toy.error(), Error::ShardName { .. }), "{name}");
    }
}

#[cfg(unix)]
#[test]
fn shards_may_be_links_but_not_folders() {
    let toy = Toy::new();
    toy.write();
    let path = toy.path().join("model.safetensors");
    let blob = toy.path().join("blob");
    fs::rename(&path, &blob).unwrap();
    std::os::unix::fs::symlink(&blob, &path).unwrap();
    toy.open().unwrap();
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(toy.error(), Error::Io { .. }));
}

#[test]
fn every_tensor_is_used_or_ignored_with_a_reason_or_refused() {
    let mut toy = Toy::new();
    toy.put("model.layers.0.self_attn.rotary_emb.inv_freq", &[2], 0);
    toy.write();
    assert_eq!(toy.open().unwrap().ignored().len(), 1);
    toy.put("model.layers.2.mlp.up_proj.weight", &[12, 8], 0);
    toy.write();
    assert!(matches!(toy.error(), Error::UnknownTensor { tensor, .. } if tensor.contains(".2.")));

    let mut toy = Toy::new();
    let gone = Linear::Gate.tensor(1);
    toy.tensors.remove(&gone);
    toy.write();
    assert!(matches!(toy.error(), Error::MissingTensor { tensor, .. } if tensor == gone));
    toy.put(&gone, &[8, 12], 0);
    toy.write();
    assert!(matches!(toy.error(), Error::Shape { tensor, .. } if tensor == gone));
    let bytes = vec![0; 96];
    toy.tensors
        .insert(gone.clone(), (StDtype::I8, vec![12, 8], bytes));
    toy.write();
    match toy.error() {
        Error::UnsupportedDtype { tensor, found, .. } => {
            assert_eq!((tensor, found.as_str()), (gone, "I8"));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn the_head_is_decided_by_the_tensors_present() {
    let mut toy = Toy::new();
    toy.set("tie_word_embeddings", json!(false)).write();
    assert!(matches!(toy.error(), Error::HeadMissing { .. }));

    toy.put(LM_HEAD, &[10, 8], 99);
    toy.write();
    let own = toy.open().unwrap();
    assert_eq!(
        (own.head(), own.spec().tie_word_embeddings),
        (Head::Own, false)
    );
    assert!(own.notes().is_empty());

    toy.set("tie_word_embeddings", json!(true)).write();
    let overruled = toy.open().unwrap();
    assert_eq!(
        (overruled.head(), overruled.spec().tie_word_embeddings),
        (Head::Own, false)
    );
    assert_eq!(overruled.notes().len(), 1);

    let embedding = toy.tensors[EMBEDDING].clone();
    toy.tensors.insert(LM_HEAD.to_owned(), embedding);
    toy.write();
    let tied = toy.open().unwrap();
    assert_eq!((tied.head(), tied.ignored().len()), (Head::Tied, 1));
    assert_eq!(
        tied.read_f32(LM_HEAD).unwrap(),
        tied.read_f32(EMBEDDING).unwrap()
    );
}

#[test]
fn a_nan_or_infinite_weight_is_named_with_its_index() {
    let name = Linear::Up.tensor(0);
    let cases = [
        (StDtype::BF16, 0x7fc0u32, 2),
        (StDtype::F16, 0x7c00, 2),
        (StDtype::F32, 0xff80_0000, 4),
    ];
    for (dtype, bits, size) in cases {
        let mut toy = Toy::new();
        let mut bytes = vec![0; 96 * size];
        bytes[41 * size..42 * size].copy_from_slice(&bits.to_le_bytes()[..size]);
        toy.tensors
            .insert(name.clone(), (dtype, vec![12, 8], bytes));
        let checkpoint = toy.write().open().unwrap();
        match checkpoint.read_f32(&name).unwrap_err() {
            Error::NonFinite { tensor, index, .. } => assert_eq!((&tensor, index), (&name, 41)),
            other => panic!("{other}"),
        }
        assert!(matches!(
            checkpoint.read_rows_f32(&name, &[0, 5]),
            Err(Error::NonFinite { index: 41, .. })
        ));
        assert!(checkpoint.read_rows_f32(&name, &[4, 6]).is_ok());
    }
}
