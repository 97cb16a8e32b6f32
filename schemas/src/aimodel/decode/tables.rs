//! Sections, strings, names, offsets and blobs.

use std::collections::HashSet;

use super::cursor::Cursor;
use super::{Problem, Result, malformed};
use crate::aimodel::ids::{self, section};
use crate::aimodel::ir::{Blob, BlobData, BlobId, Module};

/// The sections, with everything but attributes, types and operations read.
pub(super) struct Tables<'a> {
    strings: Vec<&'a str>,
    pub(super) op_names: Vec<&'a str>,
    pub(super) attrs: Vec<Cursor<'a>>,
    pub(super) types: Vec<Cursor<'a>>,
    pub(super) props: Vec<Cursor<'a>>,
    pub(super) ir: Cursor<'a>,
    resources: Cursor<'a>,
    resource_offsets: Cursor<'a>,
}

impl<'a> Tables<'a> {
    pub(super) fn read(mut file: Cursor<'a>) -> Result<Self> {
        let mut sections: [Option<Cursor<'a>>; section::KINDS] = [const { None }; section::KINDS];
        while file.left() > 0 {
            let s = file.section()?;
            match sections.get_mut(s.id as usize) {
                Some(slot @ None) if s.id != section::DIALECT_VERSION => *slot = Some(s.payload),
                _ => {
                    return Err(super::DecodeError {
                        offset: s.offset as u64,
                        problem: Problem::Section(s.id),
                    });
                }
            }
        }
        let mut section = |id: u8| {
            let missing = Problem::MissingSection(section::name(id));
            sections[id as usize]
                .take()
                .ok_or_else(|| file.error(missing))
        };
        let strings = strings(section(section::STRING)?)?;
        let op_names = op_names(section(section::DIALECT)?, &strings)?;
        let (attrs, types) = offsets(
            section(section::ATTR_TYPE_OFFSET)?,
            section(section::ATTR_TYPE)?,
        )?;
        Ok(Self {
            op_names,
            attrs,
            types,
            props: properties(section(section::PROPERTIES)?)?,
            ir: section(section::IR)?,
            resources: section(section::RESOURCE)?,
            resource_offsets: section(section::RESOURCE_OFFSET)?,
            strings,
        })
    }

    /// Reads the number of a string.
    pub(super) fn string(&self, c: &mut Cursor) -> Result<&'a str> {
        Ok(self.strings[c.index("string", self.strings.len())?])
    }

    /// Adds the blobs to the module, in order. Entries lie one after another, so
    /// they cannot overlap once each is as long as it should be.
    pub(super) fn read_blobs(
        &self,
        m: &mut Module,
        blob: impl Fn(usize, usize) -> BlobData,
    ) -> Result<Vec<BlobId>> {
        const BLOB: u8 = 0;
        let (mut index, mut data) = (self.resource_offsets.clone(), self.resources.clone());
        let at = index.offset();
        if index.number()? != 0 {
            return Err(malformed(at, "external resources are not supported"));
        }
        let mut keys = HashSet::new();
        let mut blobs = vec![];
        while index.left() > 0 {
            only_dialect(&mut index)?;
            for _ in 0..index.count()? {
                let at = index.clone();
                let key = self.string(&mut index)?;
                if !keys.insert(key) {
                    return Err(at.error(Problem::DuplicateKey(key.to_owned())));
                }
                let len = index.number()?;
                let kind = index.byte()?;
                if kind != BLOB {
                    return Err(malformed(
                        index.offset() - 1,
                        format!("resource `{key}` is of kind {kind}, not a blob"),
                    ));
                }
                let len = data.count_of(len)?;
                let mut entry = data.window(len)?;
                let alignment = entry.number()?;
                let len = entry.number()?;
                entry.align(alignment)?;
                let (offset, len) = (entry.offset(), entry.count_of(len)?);
                entry.take(len)?;
                entry.end("blob")?;
                blobs.push(m.add_blob(Blob {
                    key: key.to_owned(),
                    data: blob(offset, len),
                }));
            }
        }
        data.end("resource section")?;
        Ok(blobs)
    }
}

/// Lengths last string first, then the strings first to last, each with its zero.
fn strings(mut c: Cursor<'_>) -> Result<Vec<&str>> {
    let count = c.count()?;
    let mut lens = Vec::with_capacity(count);
    for _ in 0..count {
        lens.push(c.len()?);
    }
    let mut strings = Vec::with_capacity(count);
    for len in lens.into_iter().rev() {
        let at = c.offset();
        let bytes = c.take(len)?;
        let Some((0, text)) = bytes.split_last() else {
            return Err(malformed(at, "a string does not end in a zero"));
        };
        match std::str::from_utf8(text) {
            Ok(text) => strings.push(text),
            Err(e) => {
                return Err(super::DecodeError {
                    offset: (at + e.valid_up_to()) as u64,
                    problem: Problem::Utf8,
                });
            }
        }
    }
    c.end("string section")?;
    Ok(strings)
}

/// The one dialect with its version, then groups of operation names.
fn op_names<'a>(mut c: Cursor, strings: &[&'a str]) -> Result<Vec<&'a str>> {
    let at = c.offset();
    let dialects = c.number()?;
    if dialects != 1 {
        return Err(malformed(
            at,
            format!("{dialects} dialects, expected `{}` only", ids::DIALECT),
        ));
    }
    let at = c.clone();
    let (name, versioned) = c.flagged()?;
    let name = strings[at.checked_index(name, "string", strings.len())?];
    if name != ids::DIALECT || !versioned {
        return Err(malformed(
            at.offset(),
            format!(
                "dialect `{name}`, expected `{}` with a version",
                ids::DIALECT
            ),
        ));
    }
    let version = c.section()?;
    if version.id != section::DIALECT_VERSION {
        return Err(super::DecodeError {
            offset: version.offset as u64,
            problem: Problem::Section(version.id),
        });
    }
    let mut payload = version.payload;
    payload.version("dialect encoding", ids::ENCODING_VERSION)?;
    payload.end("dialect version section")?;

    let count = c.count()?;
    let mut names = Vec::with_capacity(count);
    while c.left() > 0 {
        only_dialect(&mut c)?;
        for _ in 0..c.count()? {
            let at = c.clone();
            let (name, _registered) = c.flagged()?;
            names.push(strings[at.checked_index(name, "string", strings.len())?]);
        }
    }
    if names.len() != count {
        return Err(malformed(
            c.offset(),
            format!("{} operation names, {count} announced", names.len()),
        ));
    }
    Ok(names)
}

/// The dialect of a group, of which there is one.
fn only_dialect(c: &mut Cursor) -> Result<()> {
    c.index("dialect", 1).map(|_| ())
}

/// Sizes of the attributes and types, and their windows in the data section.
fn offsets<'a>(mut c: Cursor, mut data: Cursor<'a>) -> Result<(Vec<Cursor<'a>>, Vec<Cursor<'a>>)> {
    let (attr_count, type_count) = (c.count()?, c.count()?);
    let mut tables = [vec![], vec![]];
    for (table, count) in tables.iter_mut().zip([attr_count, type_count]) {
        while table.len() < count {
            only_dialect(&mut c)?;
            for _ in 0..c.count()? {
                let at = c.clone();
                let (len, binary) = c.flagged()?;
                if !binary {
                    return Err(malformed(
                        at.offset(),
                        "an attribute or type is stored as text",
                    ));
                }
                table.push(data.window(data.count_of(len)?)?);
            }
        }
        if table.len() > count {
            return Err(malformed(
                c.offset(),
                format!("{} attributes or types, {count} announced", table.len()),
            ));
        }
    }
    c.end("attribute and type offset section")?;
    data.end("attribute and type section")?;
    let [attrs, types] = tables;
    Ok((attrs, types))
}

fn properties(mut c: Cursor<'_>) -> Result<Vec<Cursor<'_>>> {
    let count = c.count()?;
    let mut entries = Vec::with_capacity(count);
    for _ in 0..count {
        let len = c.len()?;
        entries.push(c.window(len)?);
    }
    c.end("properties section")?;
    Ok(entries)
}
