//! Writing a program as MLIR bytecode.
//!
//! A file is a header and numbered sections. All of them but the resource section
//! are small and are made in memory; they need the blobs' sizes, not their bytes.
//! The resource section comes last, so the blobs are then copied through from
//! wherever they are, and memory does not grow with the weights. Nothing is
//! patched afterwards.
//!
//! The program is walked once in order. Strings, types, attributes, property
//! lists and operation names get their numbers when first met, children first, so
//! equal programs give equal bytes and what is not reached is not written.

mod sections;
mod tables;

use std::collections::HashSet;
use std::io::{self, Read, Write};

use self::tables::Tables;
use super::ids::{self, op_mask, section};
use super::ir::{Attr, Blob, BlobError, Module, OpId, RegionId, ValueId};
use super::varint::{put, put_flagged};

/// Why a program could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The output failed.
    #[error("cannot write the program: {0}")]
    Io(#[from] io::Error),
    /// A blob could not be read.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// Two blobs have one key.
    #[error("two blobs are called `{0}`")]
    DuplicateKey(String),
    /// An operand is not defined in the region that uses it.
    #[error("`{op}` uses value {value}, which its region does not define before")]
    Undefined {
        /// Operation.
        op: String,
        /// Value handle.
        value: u32,
    },
    /// Attributes do not fit the operation.
    #[error("`{op}` {problem}")]
    Props {
        /// Operation.
        op: String,
        /// What is wrong with them.
        problem: String,
    },
    /// A string has a zero byte, which ends strings in the file.
    #[error("the string {0:?} holds a zero byte")]
    ZeroByte(String),
}

/// Writes the program; see [`super::asset::write_asset`] for a whole folder.
///
/// The feature version is the highest of the operations used, or that of the
/// module if it is higher.
pub fn encode(m: &Module, out: &mut impl Write) -> Result<(), EncodeError> {
    let (head, blobs, layout) = prepare(m)?;
    out.write_all(&head)?;
    for (blob, entry) in blobs.iter().zip(&layout.entries) {
        out.write_all(&entry.header)?;
        copy_blob(blob, out)?;
    }
    Ok(())
}

/// Length of what [`encode`] would write, without reading a blob.
pub fn encoded_len(m: &Module) -> Result<u64, EncodeError> {
    let (head, _, layout) = prepare(m)?;
    Ok(head.len() as u64 + layout.len)
}

/// All that precedes the blobs, and the blobs in their order.
fn prepare(m: &Module) -> Result<(Vec<u8>, Vec<&Blob>, Layout), EncodeError> {
    let mut encoder = Encoder {
        m,
        tables: Tables::new(m),
        numbers: vec![None; m.value_count()],
    };
    let ir = encoder.program()?;
    let tables = encoder.tables;
    let blobs: Vec<&Blob> = tables.blobs().iter().map(|&b| m.blob(b)).collect();
    let mut keys = HashSet::new();
    for blob in &blobs {
        if !keys.insert(&blob.key) {
            return Err(EncodeError::DuplicateKey(blob.key.clone()));
        }
    }
    let layout = Layout::new(&blobs);
    let mut head = tables.into_header(&ir, &blobs, &layout)?;
    layout.section_header(&mut head);
    Ok((head, blobs, layout))
}

/// Appends a section.
fn put_section(out: &mut Vec<u8>, id: u8, payload: &[u8]) {
    out.push(id);
    put(out, payload.len() as u64);
    out.extend_from_slice(payload);
}

/// Where the blobs will lie in the resource section.
struct Layout {
    entries: Vec<Entry>,
    len: u64,
}

struct Entry {
    /// Alignment, length and padding.
    header: Vec<u8>,
    /// Bytes of header and blob.
    len: u64,
}

impl Layout {
    fn new(blobs: &[&Blob]) -> Self {
        let mut entries = Vec::with_capacity(blobs.len());
        let mut at = 0u64;
        for blob in blobs {
            let mut header = vec![];
            put(&mut header, ids::BLOB_ALIGNMENT);
            put(&mut header, blob.len());
            // The section itself is aligned, so offsets within it do.
            while !(at + header.len() as u64).is_multiple_of(ids::BLOB_ALIGNMENT) {
                header.push(ids::PADDING);
            }
            let len = header.len() as u64 + blob.len();
            entries.push(Entry { header, len });
            at += len;
        }
        Self { entries, len: at }
    }

    /// Starts the resource section at the end of `file`, which is all that precedes it.
    fn section_header(&self, file: &mut Vec<u8>) {
        if self.entries.is_empty() {
            put_section(file, section::RESOURCE, &[]);
            return;
        }
        file.push(section::RESOURCE | section::ALIGNED);
        put(file, self.len);
        put(file, ids::BLOB_ALIGNMENT);
        while !(file.len() as u64).is_multiple_of(ids::BLOB_ALIGNMENT) {
            file.push(ids::PADDING);
        }
    }
}

fn copy_blob(blob: &Blob, out: &mut impl Write) -> Result<(), EncodeError> {
    let unreadable = |source| blob.unreadable(source);
    if let Some(bytes) = blob.bytes() {
        out.write_all(bytes)?;
        return Ok(());
    }
    let mut from = blob.reader().map_err(unreadable)?;
    let mut left = blob.len();
    let mut buffer = vec![0; left.min(1 << 20) as usize];
    while left > 0 {
        let n = left.min(buffer.len() as u64) as usize;
        from.read_exact(&mut buffer[..n]).map_err(unreadable)?;
        out.write_all(&buffer[..n])?;
        left -= n as u64;
    }
    Ok(())
}

struct Encoder<'a> {
    m: &'a Module,
    tables: Tables<'a>,
    /// The number of every value already defined, and its region.
    numbers: Vec<Option<(RegionId, u64)>>,
}

/// An operation as it goes to the wire, apart from where it is kept in the module.
struct OpView<'a> {
    name: &'a str,
    props: Option<u64>,
    results: &'a [ValueId],
    operands: &'a [ValueId],
    loc: u64,
}

impl Encoder<'_> {
    /// The payload of the IR section: a block of the one asset operation.
    fn program(&mut self) -> Result<Vec<u8>, EncodeError> {
        let m = self.m;
        let loc = match m.loc.or_else(|| m.graphs.first().map(|&g| m.op(g).loc)) {
            Some(loc) => self.tables.attr(loc)?,
            None => self.tables.unknown_loc()?,
        };
        let version = self.tables.plain_attr(&Attr::Integer {
            bits: 32,
            unsigned: true,
            value: i64::from(feature_version(m)),
        })?;
        let mut props = vec![];
        match m.source {
            Some(source) => {
                let source = self.tables.attr(source)?;
                put_flagged(&mut props, source, true);
            }
            None => put(&mut props, 0),
        }
        put_flagged(&mut props, version, true);
        let asset = OpView {
            name: ids::op::ASSET,
            props: Some(self.tables.props(props)),
            results: &[],
            operands: &[],
            loc,
        };
        let mut out = vec![];
        put_flagged(&mut out, 1, false);
        self.op_head(&mut out, &asset, None, true)?;
        put_flagged(&mut out, 1, true);
        let mut graphs = vec![];
        put(&mut graphs, 1);
        put(&mut graphs, 0);
        put_flagged(&mut graphs, m.graphs.len() as u64, false);
        for &graph in &m.graphs {
            self.op(&mut graphs, graph, None)?;
        }
        put_section(&mut out, section::IR, &graphs);
        Ok(out)
    }

    fn op(
        &mut self,
        out: &mut Vec<u8>,
        id: OpId,
        region: Option<RegionId>,
    ) -> Result<(), EncodeError> {
        let op = self.m.op(id);
        let view = OpView {
            name: &op.name,
            loc: self.tables.attr(op.loc)?,
            props: self.tables.op_props(op)?,
            results: &op.results,
            operands: &op.operands,
        };
        self.op_head(out, &view, region, !op.regions.is_empty())?;
        if op.regions.is_empty() {
            return Ok(());
        }
        put_flagged(out, op.regions.len() as u64, true);
        let mut nested = vec![];
        for &region in &op.regions {
            self.region(&mut nested, region)?;
        }
        put_section(out, section::IR, &nested);
        Ok(())
    }

    /// Everything of an operation up to its regions.
    fn op_head(
        &mut self,
        out: &mut Vec<u8>,
        op: &OpView,
        region: Option<RegionId>,
        regions: bool,
    ) -> Result<(), EncodeError> {
        put(out, self.tables.op_name(op.name));
        let parts = [
            (op.props.is_some(), op_mask::PROPERTIES),
            (!op.results.is_empty(), op_mask::RESULTS),
            (!op.operands.is_empty(), op_mask::OPERANDS),
            (regions, op_mask::REGIONS),
        ];
        out.push(
            parts
                .iter()
                .filter(|p| p.0)
                .map(|p| p.1)
                .fold(0, |a, b| a | b),
        );
        put(out, op.loc);
        if let Some(props) = op.props {
            put(out, props);
        }
        if !op.results.is_empty() {
            put(out, op.results.len() as u64);
            for &r in op.results {
                put(out, self.tables.ty(self.m.value_type(r))?);
            }
        }
        if !op.operands.is_empty() {
            put(out, op.operands.len() as u64);
            for &v in op.operands {
                match self.numbers[v.index()] {
                    Some((defined_in, n)) if Some(defined_in) == region => put(out, n),
                    _ => {
                        return Err(EncodeError::Undefined {
                            op: op.name.to_owned(),
                            value: v.0,
                        });
                    }
                }
            }
        }
        Ok(())
    }

    /// A region of one block. Regions are isolated, so values are numbered from 0
    /// in each: the block's arguments, then the results in order.
    fn region(&mut self, out: &mut Vec<u8>, id: RegionId) -> Result<(), EncodeError> {
        let region = self.m.region(id);
        let results = region.ops.iter().map(|&op| self.m.op(op).results.len());
        let values = region.args.len() + results.sum::<usize>();
        put(out, 1);
        put(out, values as u64);
        put_flagged(out, region.ops.len() as u64, !region.args.is_empty());
        let mut next = 0;
        if !region.args.is_empty() {
            put(out, region.args.len() as u64);
            for (&arg, &loc) in region.args.iter().zip(&region.arg_locs) {
                put_flagged(out, self.tables.ty(self.m.value_type(arg))?, true);
                put(out, self.tables.attr(loc)?);
                self.numbers[arg.index()] = Some((id, next));
                next += 1;
            }
            out.push(0);
        }
        for &op in &region.ops {
            self.op(out, op, Some(id))?;
            for &result in &self.m.op(op).results {
                self.numbers[result.index()] = Some((id, next));
                next += 1;
            }
        }
        Ok(())
    }
}

/// The feature version a file of `m` declares: the smallest with every operation.
pub(crate) fn feature_version(m: &Module) -> u32 {
    let mut version = m.version.unwrap_or(ids::OLDEST_FEATURES);
    let mut names = HashSet::new();
    let mut open: Vec<OpId> = m.graphs.clone();
    while let Some(id) = open.pop() {
        let op = m.op(id);
        if names.insert(op.name.as_str()) {
            // An operation outside the table says nothing if the file it came
            // from declared a version, and may need the newest otherwise.
            let fallback = m.version.unwrap_or(ids::NEWEST_FEATURES);
            version = version.max(ids::feature_version(&op.name).unwrap_or(fallback));
        }
        for &region in &op.regions {
            open.extend_from_slice(&m.region(region).ops);
        }
    }
    version
}
