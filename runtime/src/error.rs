//! Errors of the executor.

use std::path::PathBuf;

use anemone_schemas::aimodel::asset::AssetError;
use anemone_schemas::aimodel::check::CheckError;
use anemone_schemas::aimodel::ir::Elem;
use thiserror::Error;

/// A tensor cannot be built.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorError {
    /// The number of elements does not fit the shape.
    #[error("a tensor of shape {shape:?} cannot hold {found} elements")]
    Count {
        /// The shape asked for.
        shape: Vec<usize>,
        /// Elements given.
        found: usize,
    },
    /// No storage for this element type.
    #[error("the runtime does not compute with element type `{}`", elem.name())]
    Elem {
        /// The element type.
        elem: Elem,
    },
}

/// A program cannot be opened or planned.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// The asset cannot be decoded.
    #[error("cannot open program `{}`", path.display())]
    Open {
        /// The asset folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<AssetError>,
    },
    /// The program breaks a rule of the format.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// There is no such public function.
    #[error("no function named `{name}`; the program has {}", list(available))]
    NoFunction {
        /// The name asked for.
        name: String,
        /// Public functions of the program.
        available: Vec<String>,
    },
    /// A function's interface is not usable.
    #[error("function `{function}`: {problem}")]
    Signature {
        /// The function.
        function: String,
        /// What is wrong.
        problem: String,
    },
    /// An operation cannot be executed.
    #[error("function `{function}`, operation {index} `{op}`: {problem}")]
    Op {
        /// The function (of the graph the operation is in).
        function: String,
        /// Position of the operation in that graph.
        index: usize,
        /// Operation name.
        op: String,
        /// What is wrong.
        problem: String,
    },
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none".into();
    }
    let quoted: Vec<String> = names.iter().map(|n| format!("`{n}`")).collect();
    quoted.join(", ")
}

/// A call of a function failed.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError {
    /// An input or state was not given.
    #[error("function `{function}`: missing {kind} `{name}`")]
    Missing {
        /// The function.
        function: String,
        /// `input` or `state`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An input or state is not declared by the function.
    #[error("function `{function}`: `{name}` is not a declared {kind}")]
    Unknown {
        /// The function.
        function: String,
        /// `input` or `state`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An input or state has the wrong type.
    #[error("function `{function}`: `{name}` is {found}, expected {expected}")]
    Type {
        /// The function.
        function: String,
        /// The input or state.
        name: String,
        /// Type given.
        found: String,
        /// Type declared.
        expected: String,
    },
    /// A value known only at run time is out of range.
    #[error("function `{function}`, operation {index} `{op}`: {problem}")]
    Op {
        /// The function (of the graph the operation is in).
        function: String,
        /// Position of the operation in that graph.
        index: usize,
        /// Operation name.
        op: String,
        /// What is wrong.
        problem: String,
    },
}
