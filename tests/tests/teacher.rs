//! The forward pass, tokenizer and rotary tables against transformers, on the model in
//! the repository.

use std::path::PathBuf;
use std::process::Command;

use anemone_calib::{AnswerLimits, Corpus, CorpusOptions, Error, Kl, StatsBuilder, Teacher};
use anemone_schemas::checkpoint::{Checkpoint, Head, read_spec};
use anemone_schemas::spec::Site;
use anemone_schemas::tokenizer::TokenizerFolder;
use anemone_tests::reference::{Reference, check_teacher, check_tokenizer, data};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn tiny() -> Checkpoint {
    Checkpoint::open(&data("tiny-qwen3")).unwrap()
}

fn tokenizer() -> TokenizerFolder {
    TokenizerFolder::open(&data("tiny-qwen3")).unwrap()
}

#[test]
fn logits_are_those_of_transformers() {
    let checkpoint = tiny();
    assert_eq!(checkpoint.head(), Head::Tied);
    check_teacher(&checkpoint, &data("tiny-qwen3"), "tiny-qwen3");
}

#[test]
fn ids_and_prompts_are_those_of_transformers() {
    check_tokenizer(&data("tiny-qwen3"), "tiny-qwen3");
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.stop_ids(), [4064, 4066]);
    assert_eq!(tokenizer.size(), 4090);
}

#[test]
fn rotary_tables_are_those_of_transformers() {
    let tables = Reference::open("rope");
    let text = std::fs::read(data("references/rope.json")).unwrap();
    let reference: Value = serde_json::from_slice(&text).unwrap();
    let head_dim = reference["head_dim"].as_u64().unwrap() as usize;
    let positions = tables.ints("positions");
    // Up to the last position that YaRN extends to.
    assert!(positions.contains(&32768) && positions.contains(&131_071));
    let configs = reference["configs"].as_object().unwrap();
    assert_eq!(configs.len(), 7);
    for (name, rope) in configs {
        let mut config = json!({
            "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": head_dim,
            "intermediate_size": 256, "vocab_size": 16, "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6
        });
        let config_map = config.as_object_mut().unwrap();
        config_map.extend(rope.as_object().unwrap().clone());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let rope = read_spec(dir.path()).unwrap().rope;

        let inv_freq = tables.floats(&format!("{name}.inv_freq"));
        for (i, (a, b)) in rope.inv_freq(head_dim).iter().zip(&inv_freq).enumerate() {
            let ulps = a.to_bits().abs_diff(b.to_bits());
            assert!(ulps <= 2, "{name}: frequency {i} is {a}, expected {b}");
        }
        let (cos, sin) = rope.cos_sin(head_dim, positions.iter().map(|&p| p as usize));
        let expected = ["cos", "sin"].map(|part| tables.floats(&format!("{name}.{part}")));
        for (found, expected) in [cos, sin].iter().zip(&expected) {
            assert_eq!(found.len(), expected.len());
            for (at, (a, b)) in found.iter().zip(expected).enumerate() {
                // Two units in the last place of the angle, and the rounding of cosine.
                let angle = positions[at / (head_dim / 2)] as f32 * inv_freq[at % (head_dim / 2)];
                let tolerance = 2.0 * angle * f32::EPSILON + 1e-6;
                assert!((a - b).abs() <= tolerance, "{name}: {at}: {a} {b}");
            }
        }
    }
}

fn corpus(tokens: usize, sequence: usize) -> Corpus {
    let files = [
        "text/calib_docs.txt",
        "text/calib_code.txt",
        "text/calib_chat.jsonl",
    ]
    .map(data);
    let options = CorpusOptions {
        tokens,
        sequence,
        seed: 7,
    };
    Corpus::load(&files, &tokenizer(), options).unwrap()
}

#[test]
fn a_corpus_takes_evenly_from_its_files_and_is_the_same_every_time() {
    let corpus = corpus(6000, 256);
    assert_eq!(corpus.tokens(), 6000);
    for (at, source) in corpus.sources().iter().enumerate() {
        assert!((1700..2300).contains(&source.tokens), "{source:?}");
        let of = corpus.origins().iter().zip(corpus.windows());
        let own = of.filter(|(origin, _)| **origin == at);
        assert_eq!(own.map(|(_, w)| w.len()).sum::<usize>(), source.tokens);
        assert!(source.available > source.tokens);
    }
    assert!(
        corpus
            .windows()
            .iter()
            .all(|w| (2..=256).contains(&w.len()))
    );
    assert_eq!(corpus.fingerprint(), self::corpus(6000, 256).fingerprint());
    assert_ne!(corpus.fingerprint(), self::corpus(6000, 255).fingerprint());
    // A file that runs out leaves its share to the others.
    let all = self::corpus(usize::MAX, 256);
    for source in all.sources() {
        assert_eq!(source.tokens, source.available);
    }
}

#[test]
fn text_that_gives_no_windows_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = CorpusOptions {
        tokens: 100,
        sequence: 16,
        seed: 0,
    };
    let load = |name: &str, text: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        Corpus::load(&[path], &tokenizer(), options)
    };
    assert!(matches!(
        load("a.txt", b" \n\t"),
        Err(Error::EmptyText { .. })
    ));
    assert!(matches!(
        load("a.jsonl", b"\n\n"),
        Err(Error::EmptyText { .. })
    ));
    assert!(matches!(load("a.txt", b"\xff"), Err(Error::Io { .. })));
    assert!(matches!(
        load("a.md", b"text"),
        Err(Error::UnknownText { .. })
    ));
    let bad = b"{\"messages\": []}\n{\"messages\": 3}\n";
    assert!(matches!(
        load("a.jsonl", bad),
        Err(Error::BadLine { line: 2, .. })
    ));
    assert_eq!(load("a.txt", b"A short text.").unwrap().windows().len(), 1);
    let none: [PathBuf; 0] = [];
    assert!(matches!(
        Corpus::load(&none, &tokenizer(), options),
        Err(Error::NoText)
    ));
}

/// Hash of statistics of every site, of hidden states and logits, and of divergences.
fn digest_of_everything() -> String {
    let checkpoint = tiny();
    let teacher = Teacher::new(&checkpoint);
    let windows = corpus(5000, 600);
    let mut hash = Sha256::new();
    let mut hidden = teacher.embed(windows.windows()).unwrap();
    for layer in 0..2 {
        let mut builders = [Site::AttnIn, Site::AttnOut, Site::MlpIn, Site::MlpMid]
            .map(|site| StatsBuilder::new(site, site.width(teacher.spec())));
        let mut hook = |site: Site, x: &[f32]| builders[site as usize].add(x).unwrap();
        teacher.block(layer, &mut hidden, Some(&mut hook)).unwrap();
        for builder in builders {
            let stats = builder.finish().unwrap();
            assert_eq!(stats.rows, 5000);
            for h in &stats.hessian {
                hash.update(h.to_bits().to_le_bytes());
            }
            for s in &stats.sumsq {
                hash.update(s.to_bits().to_le_bytes());
            }
        }
    }
    let head = teacher.head().unwrap();
    let normed = teacher.final_norm(&hidden).unwrap().0.concat();
    let logits = teacher.logits(&normed[..200 * 128], &head).unwrap();
    for x in &logits {
        hash.update(x.to_bits().to_le_bytes());
    }
    let mut kl = Kl::new();
    let (a, b) = logits.split_at(logits.len() / 2);
    kl.add_rows(a, b, 4096, 4090, &[Some(5); 100]).unwrap();
    hash.update(format!("{:?}", kl.summary().unwrap()));
    hash.finalize()
        .iter()
        .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"))
}

/// The number of threads is fixed when a process starts, so this test runs itself:
/// with the variable set it writes its result there.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    const OUT: &str = "ANEMONE_TEST_DIGEST";
    if let Some(path) = std::env::var_os(OUT) {
        std::fs::write(path, digest_of_everything()).unwrap();
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let digests = [1, 2, 3, 7].map(|threads| {
        let out = dir.path().join(threads.to_string());
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "results_do_not_depend_on_the_number_of_threads"])
            .env(OUT, &out)
            .env("RAYON_NUM_THREADS", threads.to_string())
            .output()
            .unwrap();
        assert!(status.status.success(), "{status:?}");
        std::fs::read_to_string(out).unwrap()
    });
    assert_eq!(digests[0].len(), 64);
    assert!(digests.iter().all(|d| *d == digests[0]), "{digests:?}");
}

#[test]
fn windows_do_not_see_each_other() {
    let checkpoint = tiny();
    let teacher = Teacher::new(&checkpoint);
    let windows = corpus(1500, 300).windows().to_vec();
    let run = |windows: &[Vec<u32>]| {
        let mut hidden = teacher.embed(windows).unwrap();
        teacher.block(0, &mut hidden, None).unwrap();
        hidden.0
    };
    let together = run(&windows);
    for (window, together) in windows.iter().zip(&together) {
        let alone = &run(std::slice::from_ref(window))[0];
        assert_eq!(alone.len(), together.len());
        for (a, b) in alone.iter().zip(together) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }
}

#[test]
fn windows_that_do_not_fit_the_model_are_refused() {
    let checkpoint = tiny();
    let teacher = Teacher::new(&checkpoint);
    let error = teacher.embed(&[vec![1], vec![2, 4096]]).unwrap_err();
    assert!(matches!(
        error,
        Error::IdOutOfRange {
            window: 1,
            position: 1,
            id: 4096,
            vocab: 4096
        }
    ));
    let error = teacher.embed(&[vec![0; 4097]]).unwrap_err();
    assert!(matches!(
        error,
        Error::WindowTooLong {
            window: 0,
            length: 4097,
            max: 4096
        }
    ));
}

#[test]
fn answers_are_what_whole_passes_choose() {
    let (checkpoint, tokenizer) = (tiny(), tokenizer());
    let teacher = Teacher::new(&checkpoint);
    let texts = ["The first", "def add(a, b):\n", "A"];
    let prompts: Vec<Vec<u32>> = texts
        .iter()
        .map(|text| tokenizer.encode(text, false).unwrap())
        .collect();
    let head = teacher.head().unwrap();
    let valid = tokenizer.size();
    let next = |ids: &[u32]| -> u32 {
        let mut hidden = teacher.embed(&[ids.to_vec()]).unwrap();
        for layer in 0..teacher.spec().layers {
            teacher.block(layer, &mut hidden, None).unwrap();
        }
        let normed = teacher.final_norm(&hidden).unwrap().0.concat();
        let last = &normed[normed.len() - teacher.spec().hidden..];
        let logits = teacher.logits(last, &head).unwrap();
        let best = (0..valid).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        best.unwrap() as u32
    };
    let whole: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let mut ids = prompt.clone();
            (0..24).for_each(|_| ids.push(next(&ids)));
            ids.split_off(prompt.len())
        })
        .collect();
    // One answer ends early; the others go on as before.
    let end = whole[0][5];
    let until = |ids: &[u32]| -> Vec<u32> {
        let length = ids.iter().position(|&id| id == end).map_or(24, |at| at + 1);
        ids[..length].to_vec()
    };
    let limits = AnswerLimits {
        tokens: 24,
        valid,
        ends: &[end],
    };
    let found = teacher.answers(&prompts, limits, || Ok::<(), Error>(()));
    let expected: Vec<Vec<u32>> = whole.iter().map(|ids| until(ids)).collect();
    assert_eq!(found.unwrap(), expected);
    assert!(expected[0].len() < 24);
    let none = teacher.answers(&[Vec::new()], limits, || Ok::<(), Error>(()));
    assert!(none.unwrap_err().to_string().contains("ids of a prompt"));
}
