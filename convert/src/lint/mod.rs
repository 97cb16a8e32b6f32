//! Placement lint: what can be said, from a program alone, about whether the Neural
//! Engine will run it.
//!
//! A program that breaks a rule of the engine does not fail: it runs on the GPU or
//! the CPU, ten times slower, without a word. So every rule that shows in a program
//! is checked here, and [`RULES`] says which are checked elsewhere. Decompositions
//! inside composite operations are not looked at; the loader does not either.

mod contract;
mod function;
mod layout;
mod operations;
mod rules;
mod types;
mod weights;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anemone_schemas::aimodel::ir::{Attr, Module, Op};
use serde::Serialize;

pub use self::layout::Moves;
pub use self::rules::{Checked, RULES, Rule, Severity};

use self::function::{Function, base};

/// One rule broken in one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule's identifier.
    pub rule: &'static str,
    /// Its weight here: that of the rule, or of its exception.
    pub severity: Severity,
    /// Function, empty if the whole program is meant.
    pub function: String,
    /// Index of the operation in the function's body.
    pub op: Option<usize>,
    /// Its name, or that of an input or output.
    pub name: String,
    /// What is there.
    pub message: String,
    /// The rule.
    pub reason: &'static str,
    /// Who says so.
    pub source: &'static str,
}

/// What a program is linted for.
#[derive(Clone, Debug, Default)]
pub struct LintOptions {
    /// Rules left out, by identifier.
    pub allow: Vec<String>,
}

/// All findings, in the order of functions, rules and operations.
pub fn lint(m: &Module, options: &LintOptions) -> Vec<Finding> {
    let mut out = Findings::default();
    let reached = reached(m);
    let mut finite = types::Finite::default();
    let functions: Vec<Function<'_>> = m
        .graphs()
        .into_iter()
        .map(|g| Function::new(m, g))
        .collect();
    for f in &functions {
        out.function = f.graph.name.to_owned();
        if !reached.contains(f.graph.name) {
            types::unreached(f, &mut out);
            continue;
        }
        types::check(f, &mut finite, &mut out);
        layout::check(f, &mut out);
        operations::check(f, &mut out);
        weights::check(f, &mut out);
    }
    out.function = String::new();
    let entries: Vec<&Function<'_>> = functions
        .iter()
        .filter(|f| !f.graph.private && f.composite.is_none())
        .collect();
    contract::check(m, &entries, &mut out);
    let mut found = out.list;
    found.retain(|f| !options.allow.iter().any(|id| id == f.rule));
    found
}

/// Transposes and reshapes of every function that callers see.
pub fn moves(m: &Module) -> BTreeMap<String, Moves> {
    m.graphs()
        .into_iter()
        .filter(|g| !g.private)
        .map(|g| Function::new(m, g))
        .filter(|f| f.composite.is_none())
        .map(|f| (f.graph.name.to_owned(), layout::count(&f)))
        .collect()
}

/// The finding that an asset is a symlink, which a program cannot show.
pub fn symlinked(asset: &Path) -> Finding {
    let mut out = Findings::default();
    let message = format!("`{}` is a symlink or holds one", asset.display());
    out.about("K14", "asset", message);
    out.list.remove(0)
}

/// Findings while they are made.
#[derive(Default)]
struct Findings {
    list: Vec<Finding>,
    function: String,
}

impl Findings {
    fn add(&mut self, id: &'static str, (index, op): (usize, &Op), message: String) {
        self.push(id, rules::find(id).severity, Some(index), base(op), message);
    }

    /// A finding of another severity than the rule's: a documented exception.
    fn except(
        &mut self,
        id: &'static str,
        severity: Severity,
        (index, op): (usize, &Op),
        message: String,
    ) {
        self.push(id, severity, Some(index), base(op), message);
    }

    /// A finding about an input, an output or the program.
    fn about(&mut self, id: &'static str, name: &str, message: String) {
        self.push(id, rules::find(id).severity, None, name, message);
    }

    fn push(
        &mut self,
        id: &'static str,
        severity: Severity,
        op: Option<usize>,
        name: &str,
        message: String,
    ) {
        let rule = rules::find(id);
        self.list.push(Finding {
            rule: id,
            severity,
            function: self.function.clone(),
            op,
            name: name.to_owned(),
            message,
            reason: rule.text,
            source: rule.source,
        });
    }
}

/// Names of the graphs that some caller can get to: public ones, and what they
/// invoke. The bodies Apple's exporter leaves behind after specializing composites
/// are public but not called.
fn reached(m: &Module) -> HashSet<&str> {
    let graphs = m.graphs();
    let mut reached = HashSet::new();
    let mut next: Vec<&str> = graphs
        .iter()
        .filter(|g| !g.private && m.op(g.op).prop("compositeDecl").is_none())
        .map(|g| g.name)
        .collect();
    while let Some(name) = next.pop() {
        if !reached.insert(name) {
            continue;
        }
        let Some(graph) = graphs.iter().find(|g| g.name == name) else {
            continue;
        };
        for &op in &m.region(graph.region).ops {
            next.extend(callee(m, m.op(op)));
        }
    }
    reached
}

/// The graph an operation invokes.
fn callee<'a>(m: &'a Module, op: &'a Op) -> Option<&'a str> {
    if base(op) != "invoke" {
        return None;
    }
    let Attr::ParamConstant { value, .. } = m.attr(op.prop("callee")?) else {
        return None;
    };
    match m.attr(*value) {
        Attr::SymbolRef(path) => path.last().map(String::as_str),
        _ => None,
    }
}
