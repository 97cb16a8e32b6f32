//! A store made of another: some of its tensors replaced, all else copied.

use std::fs;

use anemone_schemas::lut::LutMatrix;
use anemone_schemas::mapped::MappedFile;
use anemone_schemas::spec::LM_HEAD;
use anemone_schemas::store::{
    DenseElem, Key, LutRecord, MatrixReport, Provenance, Store, StoreWriter,
};
use half::f16;

use crate::error::Error;

/// What replaces the tensors of a store, where anything does.
pub(super) trait Replace {
    /// A matrix and what is reported of it.
    fn matrix(&self, old: &LutRecord) -> Result<Option<(LutMatrix, MatrixReport)>, Error>;

    /// The values of a dense tensor.
    fn dense(&self, name: &str) -> Option<&[f32]>;
}

/// Writes the new store. `tag` says in the keys of its tensors who made them. An output layer that
/// `store` lacks comes from `head`.
pub(super) fn rewrite(
    store: &Store,
    head: Option<&Store>,
    mut writer: StoreWriter,
    provenance: &Provenance,
    tag: &str,
    new: &dyn Replace,
) -> Result<(), Error> {
    let seed = serde_json::to_string(provenance).map_err(|e| Error::unexpected(&e))?;
    let key = |name: &str| Key::of([tag.as_bytes(), seed.as_bytes(), name.as_bytes()]);
    let own = store.manifest().matrices.iter().map(|m| (store, m));
    let lacks = store.lut(LM_HEAD).is_err() && store.dense(LM_HEAD).is_err();
    let others = head.filter(|_| lacks).into_iter().flat_map(|head| {
        let matrices = head.manifest().matrices.iter();
        matrices
            .filter(|m| m.name == LM_HEAD)
            .map(move |m| (head, m))
    });
    for (from, record) in own.chain(others) {
        let name = &record.name;
        let (lut, report) = match new.matrix(record)? {
            Some(new) => new,
            None => (from.load_lut(name)?, record.report.clone()),
        };
        writer.put_lut(name, &key(name), &lut, report)?;
    }
    for record in &store.manifest().dense {
        let name = &record.name;
        let shape = &record.shape;
        let Some(values) = new.dense(name) else {
            let stored = store.dense(name)?;
            let bytes = MappedFile::open(&stored.path).map_err(|e| Error::io(&stored.path, &e))?;
            writer.put_dense(name, &key(name), stored.elem, shape, |out| {
                out.write_all(&bytes)
            })?;
            continue;
        };
        writer.put_dense(name, &key(name), DenseElem::F16, shape, |out| {
            for part in values.chunks(1 << 16) {
                let bytes = part.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes());
                out.write_all(&bytes.collect::<Vec<u8>>())?;
            }
            Ok(())
        })?;
    }
    for file in &store.manifest().files {
        let path = store.dir().join(&file.name);
        let bytes = fs::read(&path).map_err(|e| Error::io(&path, &e))?;
        writer.put_file(&file.name, &bytes)?;
    }
    writer.finish()?;
    Ok(())
}
