//! Manifests written, read and refused.

use super::*;

fn sample() -> Manifest {
    Manifest {
        format: MANIFEST_VERSION,
        producer: "test".into(),
        model: ModelInfo {
            name: "m".into(),
            architecture: "Qwen3ForCausalLM".into(),
            hidden: 8,
            layers: 2,
            vocab: 16,
            tokenizer_vocab: 15,
            head_dim: 4,
            kv_channels: 4,
            tied_head: true,
            source_fingerprint: "00".into(),
            quantization: "lut4-g32".into(),
        },
        embedding: TableFile {
            path: "embedding.f16".into(),
            shape: [16, 8],
        },
        rope: RopeTable {
            inv_freq: vec![1.0, 0.1],
            attention_factor: 1.0,
        },
        mask_value: -40000.0,
        stop: vec![1],
        chunks: vec![Chunk {
            path: "chunk_0.aimodel".into(),
            layers: [0, 2],
            functions: vec![FunctionInfo {
                name: "extend_256_16".into(),
                context: 256,
                width: 16,
            }],
            taps: vec![],
            head: true,
        }],
        contexts: vec![256],
        widths: vec![16],
        offset_multiple: 4,
        drafter: None,
        files: BTreeMap::new(),
    }
}

#[test]
fn a_written_manifest_reads_back_equal() {
    let dir = tempfile::tempdir().unwrap();
    sample().write(dir.path()).unwrap();
    assert_eq!(Manifest::read(dir.path()).unwrap(), sample());
}

#[test]
fn wrong_manifests_are_refused_with_the_reason() {
    type Change = fn(&mut Manifest);
    let cases: [(Change, &str); 7] = [
        (|m| m.format = 9, "manifest version 9"),
        (|m| m.chunks[0].path = "../x".into(), "does not stay inside"),
        (|m| m.embedding.path = "/etc/passwd".into(), "does not stay"),
        (|m| m.chunks[0].layers = [0, 1], "chunks end at layer 1"),
        (|m| m.contexts = vec![512], "no function for context 512"),
        (|m| m.rope.inv_freq = vec![1.0], "1 rotary frequencies"),
        (|m| m.model.tokenizer_vocab = 17, "tokenizer of 17 ids"),
    ];
    for (change, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut m = sample();
        change(&mut m);
        m.write(dir.path()).unwrap();
        let message = Manifest::read(dir.path()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

/// A folder with a drafter that reads layer 0.
fn drafting() -> Manifest {
    let mut m = sample();
    m.chunks[0].taps = vec![0];
    m.drafter = Some(Drafter {
        path: "drafter.aimodel".into(),
        kind: DrafterKind::DSpark,
        taps: vec![0],
        block: 7,
        guesses: 7,
        mask_id: 15,
        confidences: true,
        contexts: vec![256],
        rows: 16,
        prefill_rows: 64,
        spare_slots: 64,
        layers: 1,
        kv_heads: 1,
        head_dim: 4,
        rope: m.rope.clone(),
        embedding: m.embedding.clone(),
        head: DrafterHead::Own,
        weights: "f16".into(),
        source_fingerprint: "00".into(),
    });
    m
}

#[test]
fn a_drafter_is_read_back_and_checked() {
    type Change = fn(&mut Drafter);
    let dir = tempfile::tempdir().unwrap();
    drafting().write(dir.path()).unwrap();
    assert_eq!(Manifest::read(dir.path()).unwrap(), drafting());
    let cases: [(Change, &str); 8] = [
        (|d| d.path = "../x".into(), "does not stay inside"),
        (|d| d.taps = vec![1], "not all of which"),
        (|d| d.mask_id = 16, "mask id 16"),
        (|d| d.guesses = 8, "8 guesses"),
        (|d| d.spare_slots = 16, "16 spare slots"),
        (|d| d.contexts = vec![512, 256], "`contexts`"),
        (|d| d.layers = 1 << 20, "`layers`"),
        (|d| d.rope.inv_freq.clear(), "0 rotary"),
    ];
    for (change, expected) in cases {
        let mut m = drafting();
        change(m.drafter.as_mut().unwrap());
        m.write(dir.path()).unwrap();
        let message = Manifest::read(dir.path()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}
