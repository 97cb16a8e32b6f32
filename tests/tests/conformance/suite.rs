//! Random functions, run by both runtimes.

use std::collections::BTreeMap;
use std::sync::Arc;

use anemone_runtime::kernels::Pool;
use anemone_runtime::{Data, Program, Tensor as Ours};
use anemone_schemas::aimodel::asset::{Metadata, write_asset};
use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Elem, Module, TensorType, ValueId};
use anemone_tests::oracle::{self, Call, Tensor};
use half::f16;

use crate::table::{Rule, rule};

/// Cases of one operation.
pub(crate) const CASES: usize = 50;

/// splitmix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// `min..=max`.
    pub(crate) fn within(&mut self, min: usize, max: usize) -> usize {
        min + self.below(max - min + 1)
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Extents of a tensor of rank 1 to 5.
    pub(crate) fn shape(&mut self) -> Vec<usize> {
        let rank = self.within(1, 5);
        (0..rank).map(|_| self.within(1, 6)).collect()
    }

    /// A number in `-scale..scale`.
    pub(crate) fn value(&mut self, scale: f32) -> f32 {
        ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    }

    pub(crate) fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(scale)).collect()
    }

    /// f16 values of all sizes, with a few that make trouble.
    pub(crate) fn halves(&mut self, shape: &[usize]) -> Tensor {
        const EDGES: [f32; 10] = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            65504.0,
            -65504.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            6e-8,
        ];
        let n = shape.iter().product();
        let scale = self.pick(&[0.01, 1.0, 8.0, 300.0]);
        let mut values = self.values(n, scale);
        for v in &mut values {
            if self.below(12) == 0 {
                *v = self.pick(&EDGES);
            }
        }
        Tensor::f16(shape, &values)
    }

    /// f16 values in `-scale..scale`.
    pub(crate) fn plain(&mut self, shape: &[usize], scale: f32) -> Tensor {
        let n = shape.iter().product();
        Tensor::f16(shape, &self.values(n, scale))
    }
}

struct Case {
    op: &'static str,
    function: String,
    inputs: Vec<Tensor>,
    /// Absolute error that the rule `Accumulated` grants.
    bound: f32,
}

/// Functions of one program.
#[derive(Default)]
pub(crate) struct Suite {
    module: Module,
    cases: Vec<Case>,
}

impl Suite {
    /// Adds a function of `inputs`.
    pub(crate) fn add(
        &mut self,
        op: &'static str,
        inputs: Vec<Tensor>,
        bound: f32,
        build: impl FnOnce(&mut GraphBuilder<'_>, &[ValueId]) -> Vec<ValueId>,
    ) {
        let function = format!("{op}_{}", self.cases.len());
        let names: Vec<String> = (0..inputs.len()).map(|i| format!("a{i}")).collect();
        let types: Vec<(&str, Input)> = names
            .iter()
            .zip(&inputs)
            .map(|(n, t)| {
                (
                    n.as_str(),
                    Input::Tensor(TensorType::new(t.dtype, &t.shape)),
                )
            })
            .collect();
        let mut g = GraphBuilder::new(&mut self.module, &function, &types);
        let args: Vec<ValueId> = (0..inputs.len()).map(|i| g.arg(i)).collect();
        let results = build(&mut g, &args);
        let names: Vec<String> = (0..results.len()).map(|i| format!("y{i}")).collect();
        let outputs: Vec<(&str, ValueId)> = names.iter().map(String::as_str).zip(results).collect();
        g.finish(&outputs, &[]);
        self.cases.push(Case {
            op,
            function,
            inputs,
            bound,
        });
    }

    /// The operation of every case.
    pub(crate) fn operations(&self) -> impl Iterator<Item = &'static str> {
        self.cases.iter().map(|c| c.op)
    }

    /// Runs all functions in both runtimes and compares.
    pub(crate) fn run(self) {
        let dir = tempfile::tempdir().expect("a scratch folder");
        let asset = dir.path().join("suite.aimodel");
        write_asset(&asset, &self.module, &Metadata::default()).expect("a program that is right");
        let calls: Vec<Call> = self
            .cases
            .iter()
            .map(|c| {
                let call = Call::new(&c.function);
                let named = c.inputs.iter().enumerate();
                named.fold(call, |call, (i, t)| call.input(&format!("a{i}"), t.clone()))
            })
            .collect();
        let theirs = oracle::run(&asset, &calls).expect("Apple's runtime");
        let program = Program::open_with(&asset, Arc::new(Pool::new(2))).expect("our runtime");
        let mut failures: BTreeMap<&str, (usize, String)> = BTreeMap::new();
        for (case, theirs) in self.cases.iter().zip(&theirs) {
            let plan = program.plan(&case.function).expect("a plan");
            let inputs: Vec<(String, Ours)> = case
                .inputs
                .iter()
                .enumerate()
                .map(|(i, t)| (format!("a{i}"), to_ours(t)))
                .collect();
            let inputs: Vec<(&str, &Ours)> = inputs.iter().map(|(n, t)| (n.as_str(), t)).collect();
            let outputs = plan.run(&inputs, &mut []).expect("a run");
            for (name, ours) in &outputs {
                if let Err(e) = compare(case, ours, theirs.get(name)) {
                    let entry = failures.entry(case.op).or_default();
                    entry.0 += 1;
                    if entry.1.is_empty() {
                        let shapes: Vec<_> = case.inputs.iter().map(|t| &t.shape).collect();
                        entry.1 = format!("{} of {shapes:?}: {e}", case.function);
                    }
                }
            }
        }
        let lines: Vec<String> = failures
            .iter()
            .map(|(op, (n, first))| format!("{op}: {n} differ, first {first}"))
            .collect();
        assert!(lines.is_empty(), "\n{}", lines.join("\n"));
    }
}

fn to_ours(t: &Tensor) -> Ours {
    fn each<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|&b| f(b)).collect()
    }
    let data: Data = match t.dtype {
        Elem::F16 => each(&t.bytes, f16::from_le_bytes).into(),
        Elem::F32 => each(&t.bytes, f32::from_le_bytes).into(),
        Elem::Si32 => each(&t.bytes, i32::from_le_bytes).into(),
        Elem::Si8 => each(&t.bytes, i8::from_le_bytes).into(),
        Elem::Ui8 => t.bytes.clone().into(),
        Elem::Bool => each(&t.bytes, |[b]| b != 0).into(),
        other => panic!("no input of {}", other.name()),
    };
    Ours::new(&t.shape, data).expect("the product of the shape")
}

fn wide(data: &Data) -> Vec<f32> {
    match data {
        Data::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
        Data::F32(v) => v.clone(),
        Data::I32(v) => v.iter().map(|&x| x as f32).collect(),
        Data::U32(v) => v.iter().map(|&x| x as f32).collect(),
        Data::I8(v) => v.iter().map(|&x| f32::from(x)).collect(),
        Data::U8(v) => v.iter().map(|&x| f32::from(x)).collect(),
        Data::Bool(v) => v.iter().map(|&x| f32::from(u8::from(x))).collect(),
        other => panic!("no comparison of {other:?}"),
    }
}

fn compare(case: &Case, ours: &Ours, theirs: &Tensor) -> Result<(), String> {
    if ours.shape() != theirs.shape || ours.elem() != theirs.dtype {
        return Err(format!(
            "{:?} {:?}, expected {:?} {:?}",
            ours.elem(),
            ours.shape(),
            theirs.dtype,
            theirs.shape
        ));
    }
    let (a, b) = (wide(ours.data()), theirs.to_f32());
    for (i, (&a, &b)) in a.iter().zip(&b).enumerate() {
        let near = |ulps: u32| a.is_nan() && b.is_nan() || distance(a, b, theirs.dtype) <= ulps;
        let good = match rule(case.op) {
            Rule::Exact => near(0),
            Rule::Ulps(n) => near(n),
            Rule::Accumulated(n) => near(n) || (a - b).abs() <= case.bound,
        };
        if !good {
            return Err(format!("element {i} is {a:e}, Apple's {b:e}"));
        }
    }
    Ok(())
}

/// Units in the last place between two numbers.
fn distance(a: f32, b: f32, elem: Elem) -> u32 {
    if a.is_nan() || b.is_nan() {
        return u32::MAX;
    }
    // Sign and magnitude to an order: both zeros are 0.
    let order = |negative: bool, magnitude: i64| if negative { -magnitude } else { magnitude };
    let key = |x: f32| {
        if elem == Elem::F16 {
            let bits = f16::from_f32(x).to_bits();
            order(bits & 0x8000 != 0, i64::from(bits & 0x7fff))
        } else {
            let bits = x.to_bits();
            order(bits >> 31 != 0, i64::from(bits & 0x7fff_ffff))
        }
    };
    u32::try_from((key(a) - key(b)).unsigned_abs()).unwrap_or(u32::MAX)
}
