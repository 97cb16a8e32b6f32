//! Damaged assets: each is refused, with the file and the byte at fault.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{annotated_file, bytes_of};
use crate::aimodel::asset::{AssetError, Metadata, open_asset, write_asset};
use crate::aimodel::build::GraphBuilder;
use crate::aimodel::decode::{DecodeError, Problem, decode_bytes};
use crate::aimodel::ids;
use crate::aimodel::ir::{Blob, BlobData, Elem, Module, TensorType};

/// An asset of these program bytes with the right digest.
fn asset(program: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.aimodel");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("main.mlirb"), program).unwrap();
    fs::write(path.join("main.hash"), Sha256::digest(program)).unwrap();
    fs::write(path.join("metadata.json"), r#"{"assetVersion": "2.0"}"#).unwrap();
    (dir, path)
}

/// Opens an asset of `program`, which must be refused at byte `offset` of its file.
fn refused(program: &[u8], offset: usize) -> Problem {
    let (_dir, path) = asset(program);
    let error = open_asset(&path).expect_err("the program is damaged");
    let file = path.join("main.mlirb");
    let said = error.to_string();
    let expected = format!("`{}`: at byte {offset}: ", file.display());
    assert!(said.starts_with(&expected), "{said}");
    let AssetError::Decode { source, .. } = error else {
        panic!("{said}");
    };
    let DecodeError { problem, .. } = source;
    problem
}

/// Where `what` first lies in `bytes`.
fn find(bytes: &[u8], what: &[u8]) -> usize {
    (bytes.windows(what.len()))
        .position(|w| w == what)
        .expect("the bytes hold it")
}

/// A program with two blobs of 40 bytes, and where their bytes begin. Each starts an
/// entry of alignment, length and padding up to a multiple of 16.
fn two_blobs() -> (Vec<u8>, [usize; 2]) {
    let mut m = Module::default();
    let blobs = [("aa", 0xa1), ("ab", 0xb2)].map(|(key, fill)| {
        m.add_blob(Blob {
            key: key.into(),
            data: BlobData::Bytes(vec![fill; 40]),
        })
    });
    let mut g = GraphBuilder::new(&mut m, "f", &[]);
    let w = blobs.map(|b| g.constant_blob(TensorType::new(Elem::Si8, &[40]), b));
    g.finish(&[("v", w[0]), ("w", w[1])], &[]);
    let bytes = bytes_of(&m);
    decode_bytes(&bytes).unwrap();
    let at = [0xa1, 0xb2].map(|fill| find(&bytes, &[fill; 40]));
    // Alignment 16, length 40, padding.
    for at in at {
        assert_eq!(at % 16, 0);
        let header = find(&bytes[at - 16..at], &[0x21, 0x51, ids::PADDING]);
        assert!(
            bytes[at - 16 + header + 2..at]
                .iter()
                .all(|&b| b == ids::PADDING)
        );
    }
    (bytes, at)
}

#[test]
fn a_wrong_hash_is_refused() {
    let (_dir, path) = asset(&annotated_file());
    open_asset(&path).unwrap();
    let hash = path.join("main.hash");
    let good = fs::read(&hash).unwrap();
    let mut last = good.clone();
    last[31] ^= 1;
    let long = [&good[..], &vec![0; 1 << 16]].concat();
    for (wrong, offset) in [
        (last, 31),
        (good[..20].to_vec(), 20),
        (vec![], 0),
        (long, 32),
    ] {
        fs::write(&hash, wrong).unwrap();
        let error = open_asset(&path).unwrap_err();
        assert!(matches!(error, AssetError::Digest { .. }), "{error}");
        let said = error.to_string();
        let expected = format!("`{}`: at byte {offset}: ", hash.display());
        assert!(said.starts_with(&expected), "{said}");
        let program = path.join("main.mlirb");
        assert!(said.contains(&format!("`{}`", program.display())), "{said}");
    }
}

#[test]
fn a_metadata_file_of_any_size_is_not_read() {
    let (_dir, path) = asset(&annotated_file());
    let metadata = path.join("metadata.json");
    let file = fs::File::create(&metadata).unwrap();
    file.set_len(1 << 40).unwrap();
    let said = open_asset(&path).unwrap_err().to_string();
    assert!(said.contains("longer than 65536 bytes"), "{said}");
}

#[test]
fn a_missing_file_is_named() {
    for name in ["main.mlirb", "main.hash", "metadata.json"] {
        let (_dir, path) = asset(&annotated_file());
        fs::remove_file(path.join(name)).unwrap();
        let said = open_asset(&path).unwrap_err().to_string();
        let file = path.join(name);
        assert!(said.contains(&format!("`{}`", file.display())), "{said}");
    }
}

#[test]
fn a_wrong_bytecode_version_is_refused() {
    let mut bytes = annotated_file();
    bytes[4] = 0x0f;
    let expected = Problem::Version {
        what: "bytecode",
        found: 7,
        expected: 6,
    };
    assert_eq!(refused(&bytes, 4), expected);
}

#[test]
fn a_wrong_dialect_version_is_refused() {
    let mut bytes = annotated_file();
    bytes[25] = 0x07;
    let expected = Problem::Version {
        what: "dialect encoding",
        found: 3,
        expected: 2,
    };
    assert_eq!(refused(&bytes, 25), expected);
}

#[test]
fn a_wrong_asset_version_is_refused() {
    let (_dir, path) = asset(&annotated_file());
    let metadata = path.join("metadata.json");
    fs::write(&metadata, r#"{"assetVersion": "3.0"}"#).unwrap();
    let said = open_asset(&path).unwrap_err().to_string();
    assert!(
        said.contains(&format!("`{}`", metadata.display())),
        "{said}"
    );
    assert!(said.contains("\"3.0\""), "{said}");
}

#[test]
fn a_truncated_program_is_refused() {
    // The last section is two bytes, of which the length goes; before it are the
    // properties, of which a byte of fourteen goes then.
    let bytes = annotated_file();
    for (cut, offset, needed, left) in [(1, 331, 1, 0), (3, 315, 14, 13)] {
        let problem = refused(&bytes[..bytes.len() - cut], offset);
        assert_eq!(problem, Problem::Truncated { needed, left });
    }
}

#[test]
fn bytes_after_the_last_section_are_refused() {
    let mut bytes = annotated_file();
    let end = bytes.len();
    bytes.extend_from_slice(&[0x09, 0x01]);
    assert_eq!(refused(&bytes, end), Problem::Section(9));
}

#[test]
fn bytes_after_the_end_of_an_attribute_are_refused() {
    // A unit attribute of two bytes: the entry after it loses its first.
    let bytes = annotated_file();
    let sizes = find(&bytes, &[0x27, 0x25, 0x11]);
    let mut longer = bytes.clone();
    // `27 25`: sizes of the first two attributes with their flag.
    longer[sizes] = 0x2b;
    longer[sizes + 1] = 0x21;
    let problem = decode_bytes(&longer).unwrap_err();
    assert!(problem.offset > 0, "{problem}");
    refused(&longer, problem.offset as usize);
}

#[test]
fn two_blobs_with_one_key_are_refused() {
    let (mut bytes, _) = two_blobs();
    let at = find(&bytes, b"ab\0");
    bytes[at + 1] = b'a';
    let offset = decode_bytes(&bytes).unwrap_err().offset as usize;
    assert_eq!(refused(&bytes, offset), Problem::DuplicateKey("aa".into()));
    // The key of the second entry: after the first, of key, size and kind.
    assert_eq!(bytes[offset - 1], 0, "the kind of the first entry");
}

#[test]
fn a_misaligned_blob_is_refused() {
    let (good, at) = two_blobs();
    // Alignment 8 asks for less padding than there is, so the blob would begin in it.
    let mut bytes = good.clone();
    let header = at[0] - 16 + find(&good[at[0] - 16..at[0]], &[0x21, 0x51, ids::PADDING]);
    bytes[header] = 0x11;
    let data = header + 2;
    let begins = data.next_multiple_of(8);
    let expected = Problem::Trailing {
        what: "blob",
        left: (at[0] - begins) as u64,
    };
    assert_eq!(refused(&bytes, begins + 40), expected);
    // An alignment that is no power of two, and one no loader grants.
    for (alignment, size) in [(0x07, 3), (0x41, 32)] {
        let mut bytes = good.clone();
        bytes[header] = alignment;
        let problem = refused(&bytes, data);
        let said = problem.to_string();
        assert!(said.contains(&format!("alignment {size} ")), "{said}");
    }
    // Padding that is something else.
    let mut bytes = good;
    bytes[at[0] - 1] = 0;
    let said = refused(&bytes, at[0] - 1).to_string();
    assert!(said.contains("padding"), "{said}");
}

#[test]
fn overlapping_blobs_are_refused() {
    let (good, at) = two_blobs();
    // A length that reaches into the next entry: blobs lie within their entries, one
    // after another, so there is nothing to overlap.
    let mut bytes = good.clone();
    let header = at[0] - 16 + find(&good[at[0] - 16..at[0]], &[0x21, 0x51, ids::PADDING]);
    bytes[header + 1] = 0x53;
    let expected = Problem::Truncated {
        needed: 41,
        left: 40,
    };
    assert_eq!(refused(&bytes, at[0]), expected);
    // Or one shorter, which would leave a byte between them.
    bytes[header + 1] = 0x4f;
    let expected = Problem::Trailing {
        what: "blob",
        left: 1,
    };
    assert_eq!(refused(&bytes, at[0] + 39), expected);
}

#[test]
fn an_attribute_that_contains_itself_is_refused() {
    // Array #7 = [#6] becomes [#7].
    let mut bytes = annotated_file();
    let at = find(&bytes, &[0x0b, 0x03, 0x0d]);
    bytes[at + 2] = 0x0f;
    assert_eq!(refused(&bytes, at), Problem::Cycle("an attribute"));
}

#[test]
fn attributes_that_contain_one_another_are_refused() {
    // Array #7 = [#6] becomes [#8], which is [#7].
    let mut bytes = annotated_file();
    let at = find(&bytes, &[0x0b, 0x03, 0x0d]);
    bytes[at + 2] = 0x11;
    let next = at + 3;
    assert_eq!(bytes[next..next + 3], [0x0b, 0x03, 0x0f]);
    assert_eq!(refused(&bytes, next), Problem::Cycle("an attribute"));
}

#[test]
fn what_is_written_is_not_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path: &Path = &dir.path().join("a.aimodel");
    let m = decode_bytes(&two_blobs().0).unwrap();
    write_asset(path, &m, &Metadata::default()).unwrap();
    open_asset(path).unwrap();
}
