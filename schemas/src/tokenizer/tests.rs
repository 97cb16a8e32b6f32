use std::fs;

use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::*;

/// A byte-level tokenizer without merges: ids 0..256 are the bytes in the order of
/// GPT-2's alphabet, 256 is `<|end|>`, 257 is `<|stop|>`.
fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    // GPT-2 maps printable bytes to themselves and the others to U+0100 upwards.
    let mut next = 0x100;
    let vocab: Map<String, Value> = (0..=255u8)
        .map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let c = if printable {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).unwrap()
            };
            (c.to_string(), Value::from(byte))
        })
        .collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": null,
        "added_tokens": [special(256, "<|end|>"), special(257, "<|stop|>")],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []}
    });
    write(&dir, "tokenizer.json", &tokenizer);
    dir
}

fn write(dir: &TempDir, file: &str, value: &Value) {
    fs::write(dir.path().join(file), value.to_string()).unwrap();
}

fn open(dir: &TempDir) -> Result<TokenizerFolder, Error> {
    TokenizerFolder::open(dir.path())
}

fn stream(tokenizer: &TokenizerFolder, ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn text_goes_there_and_back_and_saved_truncation_is_undone() {
    let dir = folder();
    let tokenizer = open(&dir).unwrap();
    let text = "longer than four: ä 🦀<|end|>";
    let ids = tokenizer.encode(text, true).unwrap();
    assert_eq!(ids.last(), Some(&256));
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert_eq!(
        tokenizer.decode(&ids, true).unwrap(),
        text.strip_suffix("<|end|>").unwrap()
    );
    assert_eq!(tokenizer.size(), 258);
    tokenizer.check_fits(258).unwrap();
    assert!(matches!(
        tokenizer.check_fits(257),
        Err(Error::TooManyTokens {
            tokens: 258,
            rows: 257,
            ..
        })
    ));
}

#[test]
fn a_character_is_given_out_with_its_last_byte() {
    let dir = folder();
    let tokenizer = open(&dir).unwrap();
    let pieces = stream(&tokenizer, &tokenizer.encode("a🦀é", false).unwrap());
    assert_eq!(pieces, ["a", "", "", "", "🦀", "", "é", ""]);
    // Cut within a character, between invalid bytes, and around a special token.
    assert_eq!(stream(&tokenizer, &[0xf0, 0x9f]), ["", "", "\u{FFFD}"]);
    assert_eq!(
        stream(&tokenizer, &[0xff, 0xff, u32::from(b'a')]),
        ["", "\u{FFFD}", "\u{FFFD}a", ""]
    );
    assert_eq!(
        stream(&tokenizer, &[u32::from(b'a'), 256, u32::from(b'b')]),
        ["a", "", "b", ""]
    );
}

proptest! {
    #[test]
    fn streamed_text_is_the_text_and_never_half_a_character(
        ids in prop::collection::vec(prop_oneof![0..256u32, Just(0xf0), Just(0x9f), 0x80..0xc0u32, 32..127u32, Just(256)], 0..60)
    ) {
        let dir = folder();
        let tokenizer = open(&dir).unwrap();
        let pieces = stream(&tokenizer, &ids);
        prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
    }

    #[test]
    fn streaming_valid_text_never_shows_a_replacement(text in "\\PC{0,20}") {
        let dir = folder();
        let tokenizer = open(&dir).unwrap();
        let pieces = stream(&tokenizer, &tokenizer.encode(&text, false).unwrap());
        if !text.contains('\u{FFFD}') {
            let shown = pieces.iter().any(|piece| piece.contains('\u{FFFD}'));
            prop_assert!(!shown);
        }
        prop_assert_eq!(pieces.concat(), text);
    }
}

#[test]
fn stop_ids_of_all_files_are_united() {
    let dir = folder();
    assert_eq!(open(&dir).unwrap().stop_ids(), [0u32; 0]);
    write(&dir, "config.json", &json!({"eos_token_id": 7}));
    write(
        &dir,
        "generation_config.json",
        &json!({"eos_token_id": [257, 7]}),
    );
    write(
        &dir,
        "tokenizer_config.json",
        &json!({"eos_token": {"content": "<|end|>"}}),
    );
    let tokenizer = open(&dir).unwrap();
    assert_eq!(tokenizer.stop_ids(), [7, 256, 257]);
    assert_eq!(
        tokenizer.files(),
        [
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json"
        ]
    );
    write(&dir, "tokenizer_config.json", &json!({"eos_token": "</s>"}));
    assert!(matches!(open(&dir), Err(Error::UnknownToken { token, .. }) if token == "</s>"));
    write(&dir, "tokenizer_config.json", &json!({"eos_token": null}));
    write(
        &dir,
        "generation_config.json",
        &json!({"eos_token_id": "7"}),
    );
    assert!(matches!(open(&dir), Err(Error::Json { .. })));
}

#[test]
fn the_end_of_a_turn_is_what_the_template_writes_after_an_answer() {
    let dir = folder();
    assert_eq!(open(&dir).unwrap().end_of_turn(), None);
    let turns = |end: &str| {
        let template = format!(
            "{{% for m in messages %}}<|end|>{{{{ m.role }}}}: {{{{ m.content }}}}{end}\n{{% endfor %}}"
        );
        write(
            &dir,
            "tokenizer_config.json",
            &json!({"chat_template": template}),
        );
        open(&dir).unwrap().end_of_turn()
    };
    assert_eq!(turns("<|stop|>"), Some(257));
    assert_eq!(turns("\n<|end|>"), Some(256));
    // Text that is no token of its own, and nothing at all.
    assert_eq!(turns("</s>"), None);
    assert_eq!(turns(""), None);
    let refusing = "{{ raise_exception('no answers') }}";
    write(
        &dir,
        "tokenizer_config.json",
        &json!({"chat_template": refusing}),
    );
    assert_eq!(open(&dir).unwrap().end_of_turn(), None);
}

#[test]
fn a_conversation_begins_once_where_template_and_tokenizer_both_begin() {
    let dir = folder();
    let path = dir.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|stop|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|stop|>": {"id": "<|stop|>", "ids": [257], "tokens": ["<|stop|>"]}}
    });
    write(&dir, "tokenizer.json", &tokenizer);
    write(
        &dir,
        "tokenizer_config.json",
        &json!({"bos_token": "<|stop|>",
            "chat_template": "{{ bos_token }}{{ messages[0].content }}"}),
    );
    let tokenizer = open(&dir).unwrap();
    let message = ChatMessage {
        role: "user".into(),
        content: "hi".into(),
    };
    let text = tokenizer
        .render_chat(&[message], true, &Map::new())
        .unwrap();
    let (h, i) = (u32::from(b'h'), u32::from(b'i'));
    assert_eq!(tokenizer.encode(&text, false).unwrap(), [257, h, i]);
    assert_eq!(tokenizer.encode("hi", true).unwrap(), [257, h, i]);
}

#[test]
fn the_template_is_found_wherever_it_is_kept() {
    let dir = folder();
    let messages = [ChatMessage {
        role: "user".into(),
        content: "hi".into(),
    }];
    let render = |dir: &TempDir| open(dir)?.render_chat(&messages, false, &Map::new());
    assert!(matches!(render(&dir), Err(Error::NoChatTemplate { .. })));
    let template = |word: &str| format!("{word}: {{{{ messages[0].content }}}}");
    write(
        &dir,
        "tokenizer_config.json",
        &json!({"chat_template": template("string")}),
    );
    assert_eq!(render(&dir).unwrap(), "string: hi");
    let named = json!([{"name": "tool_use", "template": ""},
        {"name": "default", "template": template("named")}]);
    write(
        &dir,
        "tokenizer_config.json",
        &json!({"chat_template": named}),
    );
    assert_eq!(render(&dir).unwrap(), "named: hi");
    fs::write(dir.path().join("chat_template.jinja"), template("file")).unwrap();
    assert_eq!(render(&dir).unwrap(), "file: hi");
    fs::write(dir.path().join("chat_template.jinja"), "{% if %}").unwrap();
    assert!(matches!(render(&dir), Err(Error::TemplateSyntax { .. })));
}

#[test]
fn a_broken_tokenizer_is_named() {
    let dir = folder();
    write(&dir, "tokenizer.json", &json!({"model": 1}));
    assert!(matches!(open(&dir), Err(Error::Load { .. })));
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert!(matches!(open(&dir), Err(Error::Io { .. })));
}
