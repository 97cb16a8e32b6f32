//! Payloads of the sections that are tables.

use super::tables::put_all;
use super::{Layout, put_section};
use crate::aimodel::ids::{self, section};
use crate::aimodel::varint::{put, put_flagged};

/// The dialect with its encoding version, and one group of operation names.
pub(super) fn dialect_section(dialect: u64, names: &[u64]) -> Vec<u8> {
    let mut out = vec![];
    put(&mut out, 1);
    put_flagged(&mut out, dialect, true);
    let mut version = vec![];
    put(&mut version, ids::ENCODING_VERSION);
    put_section(&mut out, section::DIALECT_VERSION, &version);
    put_all(&mut out, &[names.len() as u64, 0, names.len() as u64]);
    for &name in names {
        put_flagged(&mut out, name, true);
    }
    out
}

/// Sizes of the attribute and type entries, in one group each of dialect 0; the
/// flag says that they are binary, not text.
pub(super) fn offsets(attrs: &[Vec<u8>], types: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![];
    put_all(&mut out, &[attrs.len() as u64, types.len() as u64]);
    for entries in [attrs, types] {
        if !entries.is_empty() {
            put_all(&mut out, &[0, entries.len() as u64]);
        }
        for entry in entries {
            put_flagged(&mut out, entry.len() as u64, true);
        }
    }
    out
}

/// No external resources, then one group of blobs of dialect 0.
pub(super) fn resource_offsets(keys: &[u64], layout: &Layout) -> Vec<u8> {
    const BLOB: u8 = 0;
    let mut out = vec![];
    put(&mut out, 0);
    if !keys.is_empty() {
        put_all(&mut out, &[0, keys.len() as u64]);
    }
    for (&key, entry) in keys.iter().zip(&layout.entries) {
        put_all(&mut out, &[key, entry.len]);
        out.push(BLOB);
    }
    out
}

/// Lengths last string first, then the strings first to last, each with its zero.
pub(super) fn string_section(strings: &[String]) -> Vec<u8> {
    let mut out = vec![];
    put(&mut out, strings.len() as u64);
    for s in strings.iter().rev() {
        put(&mut out, s.len() as u64 + 1);
    }
    for s in strings {
        out.extend_from_slice(s.as_bytes());
        out.push(0);
    }
    out
}

/// Property entries with their lengths.
pub(super) fn properties(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![];
    put(&mut out, entries.len() as u64);
    for entry in entries {
        put(&mut out, entry.len() as u64);
        out.extend_from_slice(entry);
    }
    out
}
