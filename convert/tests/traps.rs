//! What went wrong for users of other converters, in cases that no other suite has.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anemone_runtime::engine::Engine;
use anemone_schemas::tokenizer::ChatMessage;
use common::{
    PROGRAM, alone, assert_same, command, contents, converted, edit_json, fails, ok, store, text,
    tiny, tiny_copy,
};
use serde_json::{Value, json};

fn quantize<'a>(model: &'a str, store: &'a str) -> Vec<&'a str> {
    let args = ["quantize", model, "-o", store, "--tokens", "512"];
    [&args[..], &["--method", "kmeans", "--guided", "false"]].concat()
}

/// Changes bytes of a tensor and returns nothing of what they were.
fn edit_tensor(model: &Path, name: &str, change: impl FnOnce(&mut [u8])) {
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let [from, to] =
        [0, 1].map(|i| header[name]["data_offsets"][i].as_u64().unwrap() as usize + 8 + length);
    change(&mut bytes[from..to]);
    fs::write(&path, bytes).unwrap();
}

#[test]
fn what_was_made_of_another_checkpoint_is_not_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let (made, whole) = (dir.path().join("made"), dir.path().join("whole"));
    ok(&quantize(text(&model), text(&made)));
    let before = contents(&made);
    // A run that was killed at its last step.
    fs::remove_file(made.join("store.json")).unwrap();
    edit_tensor(&model, "model.norm.weight", |bytes| bytes.rotate_left(2));
    ok(&quantize(text(&model), text(&made)));
    assert!(contents(&made) != before, "the other norm changed nothing");
    ok(&quantize(text(&model), text(&whole)));
    assert_same(&whole, &made);
}

#[test]
fn a_plan_lists_what_is_left_aside() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let data = &bytes[8 + length..];
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    header[name] =
        json!({"dtype": "F32", "shape": [2], "data_offsets": [data.len(), data.len() + 8]});
    let mut head = header.to_string().into_bytes();
    head.resize(head.len().next_multiple_of(8), b' ');
    let file = [&(head.len() as u64).to_le_bytes(), &head[..], data, &[0; 8]].concat();
    fs::write(&path, file).unwrap();
    let args = quantize(text(&model), "unused");
    let plan = ok(&[&args[..], &["--dry-run"]].concat());
    assert!(
        plan.contains(&format!("`{name}` is left aside: ")),
        "{plan}"
    );
}

#[test]
fn a_context_beyond_the_models_positions_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    edit_json(&model.join("config.json"), |config| {
        config["max_position_embeddings"] = 1024.into();
    });
    let store = store(&model, dir.path());
    let folder = dir.path().join("folder");
    let args = ["target", text(&store), "-o", text(&folder)];
    fails(
        &[&args[..], &["--max-context", "2048"]].concat(),
        2,
        &["context 2048 is over the 1024 positions"],
    );
    assert!(!folder.exists());
}

#[test]
fn a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    edit_json(&model.join("tokenizer.json"), |tokenizer| {
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        let mut one = added[0].clone();
        (one["id"], one["content"]) = (4096.into(), "<|one too many|>".into());
        added.push(one);
        // Ids of added tokens follow those of the vocabulary, without holes.
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        vocab.insert("<|one too many|>".into(), 4096.into());
    });
    let out = dir.path().join("store");
    fails(
        &quantize(text(&model), text(&out)),
        3,
        &["tokenizer.json", "4097 tokens", "4096 rows"],
    );
}

#[test]
fn a_method_that_calibration_was_too_poor_for_is_an_error_if_strict() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (tiny_copy(dir.path()), dir.path().join("store"));
    // A layer whose inputs are all zero: nothing can be said of what it does with them.
    edit_tensor(&model, "model.layers.1.input_layernorm.weight", |bytes| {
        bytes.fill(0);
    });
    let args = [
        "quantize",
        text(&model),
        "-o",
        text(&store),
        "--tokens",
        "512",
    ];
    let args = [&args[..], &["--method", "gptq", "--guided", "false"]].concat();
    let out = command().args(&args).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("used "), "no fallback was needed:\n{said}");
    fails(
        &[&args[..], &["--strict"]].concat(),
        5,
        &["store", "model.layers.1.self_attn.", "hint: "],
    );
}

/// A tiny model whose configs name the end of the text alone as an end, whose template
/// writes a beginning, and whose tokenizer adds one too.
fn talkative(dir: &Path) -> std::path::PathBuf {
    let model = tiny_copy(dir);
    for file in ["config.json", "generation_config.json"] {
        edit_json(&model.join(file), |config| {
            config["eos_token_id"] = 4064.into();
        });
    }
    let begin = "<|endoftext|>";
    edit_json(&model.join("tokenizer_config.json"), |config| {
        config["eos_token"] = begin.into();
        config["chat_template"] = "<|endoftext|>{% for m in messages %}<|im_start|>{{ m.role }}\n\
            {{ m.content }}<|im_end|>\n{% endfor %}"
            .into();
    });
    let _ = fs::remove_file(model.join("chat_template.jinja"));
    edit_json(&model.join("tokenizer.json"), |tokenizer| {
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": begin, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin: {"id": begin, "ids": [4064], "tokens": [begin]}}
        });
    });
    model
}

#[test]
fn answers_end_with_the_turn_and_conversations_begin_once() {
    let dir = tempfile::tempdir().unwrap();
    let folder = converted(&talkative(dir.path()), dir.path());
    let manifest: Value =
        serde_json::from_slice(&fs::read(folder.join("anemone.json")).unwrap()).unwrap();
    // 4066 is what the template writes after an answer.
    assert_eq!(manifest["stop"], json!([4064, 4066]));
    let shown = ok(&["inspect", text(&folder)]);
    assert!(shown.contains("stop ids [4064, 4066]"), "{shown}");
    ok(&["verify", text(&folder)]);

    let engine = Engine::open(&folder, 1).unwrap();
    let message = ChatMessage {
        role: "user".into(),
        content: "Hi".into(),
    };
    let ids = engine.chat_prompt(&[message]).unwrap();
    assert_eq!(ids[0], 4064);
    assert!(!ids[1..].contains(&4064), "begun twice: {ids:?}");
}

/// A script with a file system of so many KiB at `mount`, in a namespace of its own; `$0` is
/// the command. Nothing if `ANEMONE_NO_NAMESPACES` says that the machine allows none.
fn on_a_small_disk(mount: &Path, kib: u64, script: &str, args: &[&str]) -> Option<Output> {
    let options = ["--user", "--map-root-user", "--mount"];
    if std::env::var_os("ANEMONE_NO_NAMESPACES").is_some() {
        return None;
    }
    let allowed = Command::new("unshare").args(options).arg("true").output();
    assert!(
        allowed.is_ok_and(|out| out.status.success()),
        "`unshare {}` is not allowed here, so no small disk can be made; \
         `ANEMONE_NO_NAMESPACES=1` leaves this test out",
        options.join(" ")
    );
    let mut shell = alone(Command::new("unshare"));
    shell.args(options).args(["sh", "-c"]);
    shell.arg(format!(
        "disk='{}'; mount -t tmpfs -o size={kib}k none \"$disk\" || exit 99\n{script}",
        mount.display()
    ));
    shell.arg(PROGRAM).args(args);
    Some(shell.output().unwrap())
}

#[test]
fn a_small_disk_is_refused_with_numbers_or_found_full() {
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().join("disk");
    fs::create_dir(&mount).unwrap();
    let (model, out) = (tiny(), mount.join("store"));
    let args = quantize(text(&model), text(&out));
    let refused = "\"$0\" \"$@\"; code=$?; ls -A \"$disk\"; exit $code";
    let Some(said) = on_a_small_disk(&mount, 2048, refused, &args) else {
        return;
    };
    let failed = |out: &Output, words: &[&str]| {
        let err = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(4), "{err}");
        assert_eq!(err.matches("error: ").count(), 1, "{err}");
        assert!(!err.contains("panicked"), "{err}");
        for word in words {
            assert!(err.contains(word), "expected `{word}` in:\n{err}");
        }
    };
    failed(
        &said,
        &["of free disk", "but only 2.00 MiB are free", "hint: "],
    );
    assert!(said.stdout.is_empty(), "something was written");

    // As much as the plan asks for, but not for the tokenizer: full at the very end.
    let plan = ok(&[&args[..], &["--dry-run", "--json"]].concat());
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let planned = plan["output_bytes"].as_u64().unwrap();
    let kib = (planned + planned / 20).div_ceil(1024) + 8;
    let full = "\"$0\" \"$@\"; code=$?; [ -e \"$disk/store/store.json\" ] && exit 98; exit $code";
    let said = on_a_small_disk(&mount, kib, full, &args).unwrap();
    failed(
        &said,
        &["store/", "No space left on device", "hint: free some room"],
    );
    let completed = "\"$0\" \"$@\" && exit 97\n\
                     mount -o remount,size=16m \"$disk\" && \"$0\" \"$@\" && \
                     cp -R \"$disk/store\" \"$disk/../copy\"";
    let said = on_a_small_disk(&mount, kib, completed, &args).unwrap();
    let err = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(0), "{err}");
    let whole = dir.path().join("whole");
    ok(&quantize(text(&model), text(&whole)));
    assert_same(&whole, &dir.path().join("copy"));
}
