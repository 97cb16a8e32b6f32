use std::fs;
use std::path::Path;

use half::f16;

use super::*;
use crate::lut::{LutMatrix, LutShape};

fn provenance() -> Provenance {
    Provenance {
        source_fingerprint: "f00d".into(),
        method: "gptq".into(),
        settings: serde_json::from_str(r#"{"bits": 4, "damping": 0.05}"#).unwrap(),
        calibration: Some("beef".into()),
        tool: "anemone 0.1.0".into(),
    }
}

fn matrix(seed: usize) -> LutMatrix {
    let shape = LutShape::new(64, 10, 4, 32).unwrap();
    let tables = (0..32)
        .map(|i| f16::from_f32((i % 16) as f32 + seed as f32).to_bits())
        .collect();
    let codes: Vec<u8> = (0..640).map(|i| (i * (seed + 3) % 16) as u8).collect();
    LutMatrix::from_codes(shape, tables, &codes).unwrap()
}

fn report() -> MatrixReport {
    MatrixReport {
        method: "gptq".into(),
        fallback: None,
        damping: Some(0.05),
        plain_error: 0.1,
        weighted_error: 1.0 / 3.0,
        dead_columns: 0,
    }
}

fn key(text: &str) -> Key {
    Key::of([text.as_bytes()])
}

/// The steps of a run; each is skipped if an earlier run finished it. Returns how
/// many had to be done, or stops after `limit` of them as a killed run would.
fn run(dir: &Path, limit: usize) -> Option<(usize, Store)> {
    let mut writer = StoreWriter::create_or_resume(dir, provenance()).unwrap();
    let mut done = 0;
    for i in 0..4 {
        let (name, key) = (format!("layer.{i}.weight"), key(&format!("m{i}")));
        if !writer.has_lut(&name, &key).unwrap() {
            if done == limit {
                return None;
            }
            writer.put_lut(&name, &key, &matrix(i), report()).unwrap();
            done += 1;
        }
    }
    if !writer.has_dense("norm.weight", &key("d")).unwrap() {
        if done == limit {
            return None;
        }
        let rows = [[1u8, 2, 3, 4], [5, 6, 7, 8]];
        writer
            .put_dense("norm.weight", &key("d"), DenseElem::F16, &[2, 2], |out| {
                rows.iter().try_for_each(|row| out.write_all(row))
            })
            .unwrap();
        done += 1;
    }
    writer.put_file("config.json", b"{}").unwrap();
    Some((done, writer.finish().unwrap()))
}

fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        if path.is_dir() {
            let inner = contents(&path).into_iter();
            all.extend(inner.map(|(n, bytes)| (format!("{name}/{n}"), bytes)));
        } else {
            all.push((name, fs::read(path).unwrap()));
        }
    }
    all.sort();
    all
}

#[test]
fn a_store_gives_back_what_was_put() {
    let dir = tempfile::tempdir().unwrap();
    let (done, store) = run(dir.path(), 99).unwrap();
    assert_eq!(done, 5);
    store.verify().unwrap();
    assert_eq!(store.manifest().provenance, provenance());
    for i in 0..4 {
        let name = format!("layer.{i}.weight");
        assert_eq!(store.load_lut(&name).unwrap(), matrix(i));
        let stored = store.lut(&name).unwrap();
        let bytes = fs::read(&stored.path).unwrap();
        let (offset, len) = stored.indices;
        assert_eq!(bytes[offset as usize..][..len as usize], matrix(i).indices);
        let (offset, len) = stored.tables;
        assert_eq!((offset, len), (64, 2 * 16 * 2));
    }
    let dense = store.dense("norm.weight").unwrap();
    assert_eq!((dense.offset, dense.len), (0, 8));
    assert_eq!(fs::read(dense.path).unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(fs::read(dir.path().join("config.json")).unwrap(), b"{}");
    let missing = store.load_lut("layer.9.weight").unwrap_err().to_string();
    assert!(
        missing.ends_with("has no matrix `layer.9.weight`"),
        "{missing}"
    );
}

#[test]
fn a_run_killed_anywhere_resumes_to_the_same_bytes() {
    let whole = tempfile::tempdir().unwrap();
    run(whole.path(), 99).unwrap();
    for limit in 0..5 {
        let dir = tempfile::tempdir().unwrap();
        assert!(run(dir.path(), limit).is_none());
        let refused = Store::open(dir.path()).unwrap_err();
        assert!(
            matches!(refused, StoreError::Incomplete { .. }),
            "{refused}"
        );
        // What a kill in the middle of a write and other settings leave behind.
        let folder = dir.path().join("matrices");
        fs::write(
            folder.join(format!("{}.lut.partial", key("m3").as_str())),
            b"x",
        )
        .unwrap();
        fs::write(folder.join(format!("{}.lut", key("other").as_str())), b"x").unwrap();
        let (done, _) = run(dir.path(), 99).unwrap();
        assert_eq!(done, 5 - limit);
        assert_eq!(contents(dir.path()), contents(whole.path()));
    }
    let (done, _) = run(whole.path(), 99).unwrap();
    assert_eq!(done, 0);
}

#[test]
fn a_damaged_matrix_is_made_again_on_resume() {
    let dir = tempfile::tempdir().unwrap();
    assert!(run(dir.path(), 2).is_none());
    let path = dir
        .path()
        .join(format!("matrices/{}.lut", key("m1").as_str()));
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let (done, store) = run(dir.path(), 99).unwrap();
    assert_eq!(done, 4);
    store.verify().unwrap();
}

#[test]
fn damage_is_refused_by_name() {
    let edit = |file: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path(), 99).unwrap();
        let path = dir.path().join(file);
        let mut bytes = fs::read(&path).unwrap();
        edit(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let opened = Store::open(dir.path());
        opened.and_then(|s| s.verify()).unwrap_err().to_string()
    };
    let lut = format!("matrices/{}.lut", key("m1").as_str());
    let dense = format!("dense/{}.bin", key("d").as_str());
    let replace = |from: &'static str, to: &'static str| {
        move |bytes: &mut Vec<u8>| {
            let text = String::from_utf8(bytes.clone()).unwrap();
            assert!(text.contains(from));
            *bytes = text.replacen(from, to, 1).into_bytes();
        }
    };
    for (file, change, expected) in [
        (
            lut.as_str(),
            &(|b: &mut Vec<u8>| b.truncate(100)) as &dyn Fn(&mut Vec<u8>),
            "is damaged: expected 448 bytes, found 100",
        ),
        (&lut, &|b| b[300] ^= 1, "is damaged: expected SHA-256"),
        (&lut, &|b| b[0] = 0, "no lookup-table matrix"),
        (&lut, &|b| b[8] = 9, "version 9"),
        (&dense, &|b| b[0] ^= 1, "is damaged: expected SHA-256"),
        (
            "config.json",
            &|b| b[0] = b'[',
            "is damaged: expected SHA-256",
        ),
        (
            MANIFEST,
            &|b| b.truncate(50),
            "store.json`: EOF while parsing",
        ),
        (
            MANIFEST,
            &replace("store/1", "store/2"),
            "found `anemone-store/2`",
        ),
        (
            MANIFEST,
            &replace("\"cols\": 10", "\"cols\": 11"),
            "a 64 x 11 matrix takes",
        ),
        (
            MANIFEST,
            &replace("layer.1.", "layer.0."),
            "names must be sorted and unique",
        ),
        (
            MANIFEST,
            &replace("config.json", "../passwd"),
            "can not name a file",
        ),
        (
            MANIFEST,
            &replace("\"key\": \"", "\"key\": \"../"),
            "is not a key",
        ),
    ] {
        let message = edit(file, change);
        assert!(
            message.contains(expected),
            "{message}\nexpected: {expected}"
        );
    }
}

#[test]
fn another_run_does_not_overwrite_a_complete_store() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), 99).unwrap();
    let mut other = provenance();
    other.settings.insert("bits".into(), 3.into());
    let refused = StoreWriter::create_or_resume(dir.path(), other).unwrap_err();
    assert!(
        matches!(refused, StoreError::OtherStore { .. }),
        "{refused}"
    );
    Store::open(dir.path()).unwrap().verify().unwrap();
}

#[test]
fn bad_input_leaves_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = StoreWriter::create_or_resume(dir.path(), provenance()).unwrap();
    let short = writer
        .put_dense("n", &key("d"), DenseElem::F16, &[3], |out| {
            out.write_all(&[0; 4])
        })
        .unwrap_err();
    assert!(
        short
            .to_string()
            .contains("does not take the recorded 4 bytes"),
        "{short}"
    );
    let mut bad = report();
    bad.weighted_error = f64::NAN;
    let nan = writer.put_lut("m", &key("m"), &matrix(0), bad).unwrap_err();
    assert!(nan.to_string().contains("its report holds NaN"), "{nan}");
    for name in ["a/b", "..", "", "store.json", "x.partial"] {
        assert!(writer.put_file(name, b"").is_err(), "{name}");
    }
    assert!(writer.has_lut("a b", &key("m")).is_err());
    assert!(!writer.has_lut("m", &key("m")).unwrap());
    assert!(!writer.has_dense("n", &key("d")).unwrap());
}
