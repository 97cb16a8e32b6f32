//! A program as text, in the manner of MLIR's generic form.
//!
//! ```text
//! module {version = 20260204} {
//!   graph @main(%0 "x": tensor<1x8xf16>) -> ("y": tensor<1x8xf16>) {
//!     %1 = silu_v1 %0 : tensor<1x8xf16>
//!     dataflow.output_v1 %1
//!   }
//! }
//! ```
//!
//! Values are numbered anew in every region. Locations are left out. The text of
//! equal programs is equal; it is for reading and not read back.

mod attr;

use std::collections::HashMap;
use std::fmt::Write;

use self::attr::Spelling;
use super::encode::feature_version;
use super::ids;
use super::ir::{Attr, Blob, Elem, Graph, Module, OpId, RegionId, TensorType, Type, ValueId};

/// What to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Show the decompositions of composite operations.
    pub decompositions: bool,
    /// Longest constant whose elements are shown.
    pub max_elements: usize,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            decompositions: false,
            max_elements: 16,
        }
    }
}

/// The whole program.
pub fn to_text(m: &Module, options: &TextOptions) -> String {
    let mut printer = Printer {
        m,
        options,
        out: String::new(),
        numbers: HashMap::new(),
    };
    printer.module();
    printer.out
}

/// The dialect's spelling of a type, as `tensor<1x8xf16>`.
pub fn type_name(m: &Module, ty: &Type) -> String {
    let mut s = Spelling::new(m);
    s.ty(ty);
    s.finish()
}

struct Printer<'a> {
    m: &'a Module,
    options: &'a TextOptions,
    out: String,
    /// Number of a value in its region.
    numbers: HashMap<ValueId, usize>,
}

impl Printer<'_> {
    fn line(&mut self, indent: usize, text: &str) {
        let _ = writeln!(self.out, "{:1$}{text}", "", 2 * indent);
    }

    fn module(&mut self) {
        let version = feature_version(self.m);
        self.line(0, &format!("module {{version = {version}}} {{"));
        for &id in &self.m.graphs {
            match Graph::of(self.m, id) {
                Some(graph) => self.graph(&graph),
                None => self.op(1, id),
            }
        }
        let mut blobs: Vec<&Blob> = self.m.blobs().iter().collect();
        blobs.sort_by_key(|b| &b.key);
        for blob in blobs {
            let text = format!("blob {:?} of {} bytes", blob.key, blob.len());
            self.line(1, &text);
        }
        self.line(0, "}");
    }

    fn graph(&mut self, g: &Graph) {
        let mut head = String::from(if g.private { "private graph" } else { "graph" });
        let _ = write!(head, " @{}(", g.name);
        let region = self.m.region(g.region);
        self.number(&region.args, 0);
        for (i, &(name, value)) in g.inputs.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            let _ = write!(head, "{separator}%{i}");
            if let Some(name) = name {
                let _ = write!(head, " {name:?}");
            }
            let _ = write!(head, ": {}", self.type_of(value));
        }
        head.push_str(") -> (");
        for (i, &(name, value)) in g.outputs.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            head.push_str(separator);
            if let Some(name) = name {
                let _ = write!(head, "{name:?}: ");
            }
            head.push_str(&self.type_of(value));
        }
        head.push(')');
        if let Some(declared) = self.m.op(g.op).prop("compositeDecl") {
            let mut s = Spelling::new(self.m);
            s.attr(declared);
            let _ = write!(head, " composite {}", s.finish());
        }
        head.push_str(" {");
        self.line(1, &head);
        self.block(2, g.region);
        self.line(1, "}");
    }

    fn block(&mut self, indent: usize, id: RegionId) {
        let region = self.m.region(id);
        let mut next = region.args.len();
        self.number(&region.args, 0);
        for &op in &region.ops {
            let results = &self.m.op(op).results;
            self.number(results, next);
            next += results.len();
            self.op(indent, op);
        }
    }

    fn op(&mut self, indent: usize, id: OpId) {
        let op = self.m.op(id);
        let mut text = self.list(&op.results);
        if !op.results.is_empty() {
            text.push_str(" = ");
        }
        text.push_str(&op.name);
        if !op.operands.is_empty() {
            text.push(' ');
            text.push_str(&self.list(&op.operands));
        }
        if op.name == ids::op::CONSTANT
            && let Some(elements) = self.elements(id)
        {
            let _ = write!(text, " {elements}");
        } else {
            for (i, &(name, attr)) in op.props.iter().enumerate() {
                let mut s = Spelling::new(self.m);
                s.attr(attr);
                let separator = if i == 0 { " {" } else { ", " };
                let _ = write!(text, "{separator}{name} = {}", s.finish());
            }
            if !op.props.is_empty() {
                text.push('}');
            }
        }
        for (i, &r) in op.results.iter().enumerate() {
            let separator = if i == 0 { " : " } else { ", " };
            text.push_str(separator);
            text.push_str(&self.type_of(r));
        }
        let composite = !op.name.contains('.');
        if op.regions.is_empty() || composite && !self.options.decompositions {
            self.line(indent, &text);
            return;
        }
        text.push_str(" {");
        self.line(indent, &text);
        for &region in &op.regions {
            let args = &self.m.region(region).args;
            self.number(args, 0);
            let head: Vec<String> = args
                .iter()
                .enumerate()
                .map(|(i, &a)| format!("%{i}: {}", self.type_of(a)))
                .collect();
            self.line(indent, &format!("^({}):", head.join(", ")));
            self.block(indent + 1, region);
        }
        self.line(indent, "}");
    }

    fn number(&mut self, values: &[ValueId], from: usize) {
        for (i, &v) in values.iter().enumerate() {
            self.numbers.insert(v, from + i);
        }
    }

    fn list(&self, values: &[ValueId]) -> String {
        let names: Vec<String> = values
            .iter()
            .map(|v| match self.numbers.get(v) {
                Some(n) => format!("%{n}"),
                None => "%?".to_owned(),
            })
            .collect();
        names.join(", ")
    }

    fn type_of(&self, v: ValueId) -> String {
        type_name(self.m, self.m.ty(self.m.value_type(v)))
    }

    /// The elements of a constant, or where they are.
    fn elements(&self, id: OpId) -> Option<String> {
        let op = self.m.op(id);
        let ty = self.m.tensor_type(*op.results.first()?)?;
        Some(match self.m.attr(op.prop("value")?) {
            Attr::Dense { splat, bytes } => {
                let count = if *splat { 1 } else { ty.count()? };
                let shown = elements(ty, bytes, count, self.options.max_elements)
                    .unwrap_or_else(|| format!("{} bytes", bytes.len()));
                if *splat || ty.shape.is_empty() {
                    format!("dense<{shown}>")
                } else {
                    format!("dense<[{shown}]>")
                }
            }
            Attr::Resource(blob) => format!("resource<{:?}>", self.m.blob(*blob).key),
            _ => return None,
        })
    }
}

/// The elements as numbers, if there are few and their type is a plain one.
fn elements(ty: &TensorType, bytes: &[u8], count: usize, max: usize) -> Option<String> {
    use half::{bf16, f16};
    fn each<const N: usize>(bytes: &[u8], show: impl Fn([u8; N]) -> String) -> String {
        let (chunks, _) = bytes.as_chunks::<N>();
        let shown: Vec<String> = chunks.iter().map(|&c| show(c)).collect();
        shown.join(", ")
    }
    let width = ty.elem.bits() / 8;
    if count > max || width == 0 || bytes.len() != count * width {
        return None;
    }
    Some(match ty.elem {
        Elem::Bool => each(bytes, |[b]| (b != 0).to_string()),
        Elem::F64 => each(bytes, |b| format!("{:?}", f64::from_le_bytes(b))),
        Elem::F32 => each(bytes, |b| format!("{:?}", f32::from_le_bytes(b))),
        Elem::F16 => each(bytes, |b| format!("{:?}", f16::from_le_bytes(b).to_f32())),
        Elem::Bf16 => each(bytes, |b| format!("{:?}", bf16::from_le_bytes(b).to_f32())),
        Elem::Si64 => each(bytes, |b| i64::from_le_bytes(b).to_string()),
        Elem::Si32 => each(bytes, |b| i32::from_le_bytes(b).to_string()),
        Elem::Si16 => each(bytes, |b| i16::from_le_bytes(b).to_string()),
        Elem::Si8 => each(bytes, |b| i8::from_le_bytes(b).to_string()),
        Elem::Ui64 => each(bytes, |b| u64::from_le_bytes(b).to_string()),
        Elem::Ui32 => each(bytes, |b| u32::from_le_bytes(b).to_string()),
        Elem::Ui16 => each(bytes, |b| u16::from_le_bytes(b).to_string()),
        Elem::Ui8 => each(bytes, |b| u8::from_le_bytes(b).to_string()),
        _ => return None,
    })
}
