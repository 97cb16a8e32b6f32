//! Equal constants.

use std::collections::HashMap;
use std::io::Read;

use sha2::{Digest, Sha256};

use super::{Savings, blob_of, constant_value, regions, replace_uses};
use crate::aimodel::ir::{Attr, AttrId, Blob, BlobError, BlobId, Module, OpId, TypeId, ValueId};

/// How much of a blob is compared before the rest is read at all.
const HEAD: u64 = 4096;

/// Gives constants of equal bytes one blob, and those of a region that are equal
/// in type too one value. The bypassed constants are left for
/// [`super::drop_dead`].
pub fn merge_constants(m: &mut Module) -> Result<Savings, BlobError> {
    let same = equal_blobs(m)?;
    let mut savings = Savings::default();
    for &blob in same.keys() {
        savings.blobs += 1;
        savings.blob_bytes += m.blob(blob).len();
    }
    for region in regions(m) {
        let mut first: HashMap<(AttrId, TypeId), ValueId> = HashMap::new();
        let mut to: HashMap<ValueId, ValueId> = HashMap::new();
        for id in m.region(region).ops.clone() {
            let Some(value) = constant_value(m.op(id)) else {
                continue;
            };
            let value = canonical(m, id, value, &same);
            let &[result] = &m.op(id).results[..] else {
                continue;
            };
            let key = (value, m.value_type(result));
            let kept = *first.entry(key).or_insert(result);
            if kept != result {
                to.insert(result, kept);
            }
        }
        savings.constants += to.len();
        replace_uses(m, region, &to);
    }
    Ok(savings)
}

/// Lets a constant refer to the blob that stands for its own.
fn canonical(m: &mut Module, op: OpId, value: AttrId, same: &HashMap<BlobId, BlobId>) -> AttrId {
    let Attr::Resource(blob) = m.attr(value) else {
        return value;
    };
    let Some(&kept) = same.get(blob) else {
        return value;
    };
    let kept = m.add_attr(Attr::Resource(kept));
    for prop in &mut m.op_mut(op).props {
        if prop.0 == "value" {
            prop.1 = kept;
        }
    }
    kept
}

/// The earlier blob with the same bytes, for every blob that has one. Only blobs
/// that constants refer to are looked at.
fn equal_blobs(m: &Module) -> Result<HashMap<BlobId, BlobId>, BlobError> {
    let mut used: Vec<BlobId> = vec![];
    for region in regions(m) {
        for &id in &m.region(region).ops {
            if let Some(value) = constant_value(m.op(id))
                && blob_of(m, value).is_some()
                && let Attr::Resource(blob) = m.attr(value)
            {
                used.push(*blob);
            }
        }
    }
    used.sort_unstable();
    used.dedup();
    // Told apart by length, then by the first bytes, then by all of them, so that
    // weights that differ are hardly read.
    let by_len = groups(vec![used], |b| Ok(m.blob(b).len().to_le_bytes().to_vec()))?;
    let by_head = groups(by_len, |b| digest(m.blob(b), HEAD))?;
    let by_bytes = groups(by_head, |b| {
        let blob = m.blob(b);
        digest(blob, blob.len())
    })?;
    let mut same = HashMap::new();
    for group in by_bytes {
        same.extend(group[1..].iter().map(|&b| (b, group[0])));
    }
    Ok(same)
}

/// Splits groups by a key, in order, and keeps those of two or more.
fn groups(
    from: Vec<Vec<BlobId>>,
    key: impl Fn(BlobId) -> Result<Vec<u8>, BlobError>,
) -> Result<Vec<Vec<BlobId>>, BlobError> {
    let mut all = vec![];
    for group in from {
        let mut parts: Vec<Vec<BlobId>> = vec![];
        let mut index: HashMap<Vec<u8>, usize> = HashMap::new();
        for blob in group {
            let part = *index.entry(key(blob)?).or_insert(parts.len());
            if part == parts.len() {
                parts.push(vec![]);
            }
            parts[part].push(blob);
        }
        all.extend(parts.into_iter().filter(|p| p.len() > 1));
    }
    Ok(all)
}

/// SHA-256 of the first bytes of a blob.
fn digest(blob: &Blob, len: u64) -> Result<Vec<u8>, BlobError> {
    let read = || {
        let mut from = blob.reader()?.take(len);
        let mut hash = Sha256::new();
        let mut buffer = vec![0; len.min(1 << 20) as usize];
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(hash.finalize().to_vec()),
                n => hash.update(&buffer[..n]),
            }
        }
    };
    read().map_err(|source| blob.unreadable(source))
}
