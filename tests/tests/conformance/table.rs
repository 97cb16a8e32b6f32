//! How close our runtime must come to Apple's, operation by operation. The same
//! table makes `docs/operations.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// How results may differ. NaN equals NaN; zeros of either sign are equal.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    /// Equal.
    Exact,
    /// So many units in the last place of the element type.
    Ulps(u32),
    /// So many units in the last place, or an absolute error that each case derives
    /// from the size of its terms.
    Accumulated(u32),
}

/// One operation.
pub(crate) struct Entry {
    /// Names in the dialect, versions left out.
    pub(crate) name: &'static str,
    pub(crate) rule: Rule,
    /// Why no closer.
    pub(crate) why: &'static str,
}

const fn entry(name: &'static str, rule: Rule, why: &'static str) -> Entry {
    Entry { name, rule, why }
}

const MOVES: &str = "moves elements";
const ROUNDED: &str = "one correctly rounded operation";
const LIBRARY: &str = "two implementations of the f32 function";
const ORDER: &str = "sums in another order";

/// All operations the runtime executes.
pub(crate) const TABLE: &[Entry] = &[
    entry("add", Rule::Exact, ROUNDED),
    entry("sub", Rule::Exact, ROUNDED),
    entry("mul", Rule::Exact, ROUNDED),
    entry("divide", Rule::Exact, ROUNDED),
    entry("maximum", Rule::Exact, ROUNDED),
    entry("minimum", Rule::Exact, ROUNDED),
    entry("modulo", Rule::Exact, ROUNDED),
    entry(
        "floor_divide",
        Rule::Accumulated(1),
        "integers are equal; Apple's floats may be off by one next to an integer quotient",
    ),
    entry("pow", Rule::Ulps(1), LIBRARY),
    entry("equal", Rule::Exact, ROUNDED),
    entry("not_equal", Rule::Exact, ROUNDED),
    entry("greater", Rule::Exact, ROUNDED),
    entry("logical_and", Rule::Exact, ROUNDED),
    entry("logical_or", Rule::Exact, ROUNDED),
    entry("logical_xor", Rule::Exact, ROUNDED),
    entry("not", Rule::Exact, ROUNDED),
    entry("where", Rule::Exact, MOVES),
    entry("exp", Rule::Ulps(1), LIBRARY),
    entry("tanh", Rule::Ulps(1), LIBRARY),
    entry("sin", Rule::Ulps(1), LIBRARY),
    entry("cos", Rule::Ulps(1), LIBRARY),
    entry("abs", Rule::Exact, ROUNDED),
    entry("round", Rule::Exact, ROUNDED),
    entry("sqrt", Rule::Ulps(1), LIBRARY),
    entry("rsqrt", Rule::Ulps(1), LIBRARY),
    entry("log", Rule::Ulps(1), LIBRARY),
    entry("erf", Rule::Ulps(1), LIBRARY),
    entry("sigmoid", Rule::Ulps(1), LIBRARY),
    entry("silu", Rule::Ulps(1), LIBRARY),
    entry("relu", Rule::Exact, ROUNDED),
    entry(
        "gelu",
        Rule::Accumulated(2),
        "Apple rounds intermediate steps",
    ),
    entry("cast", Rule::Exact, ROUNDED),
    entry("reshape", Rule::Exact, MOVES),
    entry("expand_dims", Rule::Exact, MOVES),
    entry("shrink_dims", Rule::Exact, MOVES),
    entry("transpose", Rule::Exact, MOVES),
    entry("broadcast_to", Rule::Exact, MOVES),
    entry("broadcast_in_dims", Rule::Exact, MOVES),
    entry("concat", Rule::Exact, MOVES),
    entry("split", Rule::Exact, MOVES),
    entry("slice", Rule::Exact, MOVES),
    entry("slice_update", Rule::Exact, MOVES),
    entry("pad", Rule::Exact, MOVES),
    entry("tile", Rule::Exact, MOVES),
    entry("gather_nd", Rule::Exact, MOVES),
    entry("gather_along_axis", Rule::Exact, MOVES),
    entry("range", Rule::Exact, "of integers"),
    entry("scatter_nd", Rule::Exact, MOVES),
    entry(
        "scatter_along_axis",
        Rule::Exact,
        "moves elements, or combines two with one correctly rounded operation",
    ),
    entry("reverse", Rule::Exact, MOVES),
    entry("sort", Rule::Exact, MOVES),
    entry("argsort", Rule::Exact, "stable"),
    entry("bitwise_and", Rule::Exact, "of integers"),
    entry("bitwise_or", Rule::Exact, "of integers"),
    entry("bitwise_xor", Rule::Exact, "of integers"),
    entry("softmax", Rule::Ulps(2), ORDER),
    entry("argmax", Rule::Exact, "the first of equal elements"),
    entry("reduce_sum", Rule::Accumulated(1), ORDER),
    entry("reduce_mean", Rule::Accumulated(1), ORDER),
    entry(
        "reduce_product",
        Rule::Accumulated(1),
        "multiplies in another order",
    ),
    entry("reduce_max", Rule::Exact, MOVES),
    entry("reduce_min", Rule::Exact, MOVES),
    entry(
        "batch_matmul",
        Rule::Accumulated(1),
        "Apple rounds every partial sum to f16, we round once",
    ),
    entry("conv2d", Rule::Accumulated(1), ORDER),
    entry("lut_to_dense", Rule::Exact, MOVES),
    entry(
        "blockwise_shift_scale",
        Rule::Accumulated(1),
        "Apple rounds the product before it adds",
    ),
    entry(
        "dequantize",
        Rule::Accumulated(1),
        "Apple rounds the product before it adds",
    ),
];

/// The rule of an operation.
pub(crate) fn rule(name: &str) -> Rule {
    let found = TABLE.iter().find(|e| e.name == name);
    found
        .unwrap_or_else(|| panic!("`{name}` is not in the table"))
        .rule
}

/// `docs/operations.md`, given the number of cases of each operation.
pub(crate) fn page(cases: &BTreeMap<&str, usize>) -> String {
    let mut page = String::from(
        "# Operations\n\n\
         What the runtime executes, and how far a result may lie from that of Apple's CPU \
         runtime.\n`tests/tests/conformance` holds at least fifty random cases of each to it and \
         writes this page\n(`ANEMONE_BLESS=1`). Broadcasting forms have the rule of the plain \
         one.\nTensors have rank 1 to 5; values include zeros of both signs, infinities, NaN, the \
         largest and\nthe smallest numbers, where the operation defines what they give.\n\n\
         | operation | tolerance | cases | reason |\n|---|---|---:|---|\n",
    );
    for e in TABLE {
        let tolerance = match e.rule {
            Rule::Exact => "equal".to_owned(),
            Rule::Ulps(n) => format!("{n} ulp"),
            Rule::Accumulated(n) => format!("{n} ulp, or the error bound of its terms"),
        };
        let n = cases.get(e.name).copied().unwrap_or(0);
        let _ = writeln!(page, "| `{}` | {tolerance} | {n} | {} |", e.name, e.why);
    }
    page
}
