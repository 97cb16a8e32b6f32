//! Other options for some matrices, written `REGEX=OPTIONS`: `lm_head=bits=6,method=gptq`.

use std::fmt;
use std::str::FromStr;

use anemone_schemas::lut::{BITS, VECTORS};
use anemone_schemas::spec::{EMBEDDING, FINAL_NORM, LM_HEAD, Linear, ModelSpec};
use regex::Regex;

use crate::error::Error;
use crate::quantize::Method;

/// Methods by the names that the command line has for them.
pub(crate) const METHODS: [(Method, &str); 4] = [
    (Method::KMeansUnweighted, "kmeans-unweighted"),
    (Method::KMeans, "kmeans"),
    (Method::Gptq, "gptq"),
    (Method::TwoSided, "two-sided"),
];

/// What a weight becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Bits {
    /// An index into a table, of so many bits per weight.
    Table(u8),
    /// An integer of eight bits, with a factor for each row.
    Int8,
    /// Nothing else than it is, in fp16.
    Fp16,
}

impl Bits {
    /// Bytes of a matrix; `table` says those of one with tables of so many bits.
    pub(super) fn bytes(
        self,
        [rows, cols]: [usize; 2],
        table: impl FnOnce(u8) -> Result<u64, Error>,
    ) -> Result<u64, Error> {
        match self {
            Self::Table(bits) => table(bits),
            Self::Int8 => Ok((rows * (cols + 2)) as u64),
            Self::Fp16 => Ok((rows * cols * 2) as u64),
        }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(bits) => write!(f, "{bits}"),
            Self::Int8 => f.write_str("int8"),
            Self::Fp16 => f.write_str("16"),
        }
    }
}

/// How a matrix is quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MatrixOptions {
    /// How codes and tables are chosen.
    pub(crate) method: Method,
    /// What its weights become.
    pub(crate) bits: Bits,
    /// Rows that an index stands for.
    pub(crate) vector: usize,
    /// See [`crate::quantize::Settings::damping`].
    pub(crate) damping: f64,
}

/// Options for the matrices whose name matches a pattern.
#[derive(Clone, Debug)]
pub struct Rule {
    pattern: Regex,
    bits: Option<Bits>,
    vector: Option<usize>,
    method: Option<Method>,
    damping: Option<f64>,
}

impl Rule {
    fn matches(&self, name: &str) -> bool {
        self.pattern.is_match(name)
    }

    /// The method it gives, if it gives one.
    pub(super) fn method(&self) -> Option<Method> {
        self.method
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // No name of a tensor holds `=`, so no pattern needs one.
        let (pattern, options) = text
            .split_once('=')
            .filter(|(pattern, _)| !pattern.is_empty())
            .ok_or("expected REGEX=OPTIONS, such as `lm_head=bits=6`")?;
        let mut rule = Self {
            pattern: Regex::new(pattern).map_err(|e| e.to_string())?,
            bits: None,
            vector: None,
            method: None,
            damping: None,
        };
        for option in options.split(',') {
            let (key, value) = option
                .split_once('=')
                .ok_or_else(|| format!("`{option}` is no OPTION=VALUE"))?;
            let wrong = |expected: &str| format!("`{key}` is `{value}`, expected {expected}");
            match key {
                "bits" => {
                    rule.bits = Some(match value {
                        "int8" => Bits::Int8,
                        "16" => Bits::Fp16,
                        _ => {
                            let bits = value.parse().ok().filter(|b| BITS.contains(b));
                            Bits::Table(bits.ok_or_else(|| wrong("1, 2, 3, 4, 6, 8, int8 or 16"))?)
                        }
                    });
                }
                "vector" => {
                    let vector = value.parse().ok().filter(|v| VECTORS.contains(v));
                    rule.vector = Some(vector.ok_or_else(|| wrong("1, 2 or 4"))?);
                }
                "method" => {
                    let found = METHODS.iter().find(|m| m.1 == value);
                    let names = METHODS.map(|m| m.1).join(", ");
                    rule.method = Some(found.ok_or_else(|| wrong(&format!("one of {names}")))?.0);
                }
                "damping" => {
                    let damping = value.parse().ok().filter(|d| *d > 0.0 && *d <= 1.0);
                    rule.damping = Some(damping.ok_or_else(|| wrong("above 0 and at most 1"))?);
                }
                _ => {
                    return Err(format!(
                        "`{key}` is no option of a matrix, expected `bits`, `vector`, `method` or `damping`"
                    ));
                }
            }
        }
        Ok(rule)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pattern)?;
        let mut separator = '=';
        let mut option = |key: &str, value: Option<String>| -> fmt::Result {
            if let Some(value) = value {
                write!(f, "{separator}{key}={value}")?;
                separator = ',';
            }
            Ok(())
        };
        option("bits", self.bits.map(|b| b.to_string()))?;
        option("vector", self.vector.map(|v| v.to_string()))?;
        let name = |method| {
            METHODS
                .iter()
                .find(|m| m.0 == method)
                .map(|m| m.1.to_string())
        };
        option("method", self.method.and_then(name))?;
        option("damping", self.damping.map(|d| d.to_string()))
    }
}

/// The options of a matrix: each from the last rule that matches and gives it.
pub(super) fn resolve(rules: &[Rule], default: MatrixOptions, name: &str) -> MatrixOptions {
    let fitting = rules.iter().filter(|rule| rule.matches(name));
    fitting.fold(default, |found, rule| MatrixOptions {
        method: rule.method.unwrap_or(found.method),
        bits: rule.bits.unwrap_or(found.bits),
        vector: rule.vector.unwrap_or(found.vector),
        damping: rule.damping.unwrap_or(found.damping),
    })
}

/// Refuses a rule that no matrix of the whole model matches. `layers` are the model's,
/// also where a trial has fewer.
///
/// # Errors
/// The rule, and the names it could have meant.
pub(super) fn check(rules: &[Rule], spec: &ModelSpec, layers: usize) -> Result<(), Error> {
    let matrices = |rule: &Rule| {
        let mut names = (0..layers).flat_map(|l| Linear::ALL.map(|linear| linear.tensor(l)));
        rule.matches(LM_HEAD) || names.any(|name| rule.matches(&name))
    };
    let Some(rule) = rules.iter().find(|rule| !matrices(rule)) else {
        return Ok(());
    };
    let norms = spec.architecture.norms().iter();
    let norms = (0..layers).flat_map(|l| norms.clone().map(move |n| n.tensor(l)));
    let mut others = [EMBEDDING, FINAL_NORM]
        .map(str::to_string)
        .into_iter()
        .chain(norms);
    let what = match others.find(|name| rule.matches(name)) {
        Some(name) => format!("only tensors that stay in fp16, such as `{name}`"),
        None => "no tensor".to_string(),
    };
    let kinds = Linear::ALL.map(|l| format!("`{}`", l.tensor(0).replace(".0.", ".N.")));
    Err(Error::usage(format!(
        "`{}` of `--set {rule}` matches {what} of the model",
        rule.pattern
    ))
    .hint(format!(
        "matrices are `{LM_HEAD}` and, for N from 0 to {}, {}",
        layers - 1,
        kinds.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: MatrixOptions = MatrixOptions {
        method: Method::TwoSided,
        bits: Bits::Table(4),
        vector: 1,
        damping: 0.05,
    };

    fn rules(texts: &[&str]) -> Vec<Rule> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn each_option_comes_from_the_last_rule_that_gives_it() {
        let rules = rules(&[
            "mlp=bits=3,method=kmeans",
            r"layers\.(0|11)\.=bits=6",
            "down_proj=damping=0.1",
        ]);
        let of = |name: &str| resolve(&rules, DEFAULT, name);
        assert_eq!(of("model.layers.1.self_attn.q_proj.weight"), DEFAULT);
        let expected = MatrixOptions {
            method: Method::KMeans,
            bits: Bits::Table(6),
            damping: 0.1,
            ..DEFAULT
        };
        assert_eq!(of("model.layers.11.mlp.down_proj.weight"), expected);
        assert_eq!(of("model.layers.1.mlp.up_proj.weight").bits, Bits::Table(3));
        assert_eq!(
            of("model.layers.10.self_attn.k_proj.weight").bits,
            Bits::Table(4)
        );
    }

    #[test]
    fn a_rule_reads_back_from_what_is_recorded_of_it() {
        for text in [
            "lm_head=bits=16",
            r"layers\.\d+\.mlp=method=kmeans-unweighted",
            "^model=bits=8,method=two-sided,damping=0.125",
            "k_proj=bits=int8",
            "v_proj=bits=2,vector=4,method=gptq",
        ] {
            let rule: Rule = text.parse().unwrap();
            assert_eq!(rule.to_string(), text);
        }
    }

    #[test]
    fn what_a_rule_cannot_mean_is_said() {
        for (text, part) in [
            ("lm_head", "expected REGEX=OPTIONS"),
            ("=bits=4", "expected REGEX=OPTIONS"),
            ("(=bits=4", "unclosed group"),
            ("lm_head=", "is no OPTION=VALUE"),
            ("lm_head=6", "`6` is no OPTION=VALUE"),
            (
                "lm_head=bits=5",
                "`bits` is `5`, expected 1, 2, 3, 4, 6, 8, int8 or 16",
            ),
            (
                "lm_head=method=awq",
                "expected one of kmeans-unweighted, kmeans",
            ),
            ("lm_head=vector=3", "`vector` is `3`, expected 1, 2 or 4"),
            ("lm_head=damping=0", "above 0 and at most 1"),
            ("lm_head=damping=NaN", "above 0 and at most 1"),
            ("lm_head=group=64", "`group` is no option of a matrix"),
        ] {
            let error = text.parse::<Rule>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
