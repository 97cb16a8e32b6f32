//! Reference tensors, and functions compared with them.

use anemone_schemas::aimodel::asset::{Metadata, write_asset};
use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Module, TensorType, ValueId};
use anemone_tests::oracle::{self, Call, Tensor};

/// A reference tensor.
#[derive(Clone)]
pub(crate) struct Nd {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f32>,
}

impl Nd {
    pub(crate) fn from_fn(shape: &[usize], mut f: impl FnMut(&[usize]) -> f32) -> Self {
        let count: usize = shape.iter().product();
        let mut index = vec![0; shape.len()];
        let mut data = Vec::with_capacity(count);
        for _ in 0..count {
            data.push(f(&index));
            for d in (0..shape.len()).rev() {
                index[d] += 1;
                if index[d] < shape[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Self {
            shape: shape.to_vec(),
            data,
        }
    }

    /// Reproducible numbers between -2 and 2, on a grid that f16 holds exactly.
    pub(crate) fn noise(shape: &[usize], seed: u32) -> Self {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        Self::from_fn(shape, |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 20) as f32 / 1024.0 - 2.0
        })
    }

    pub(crate) fn at(&self, index: &[usize]) -> f32 {
        let flat = index
            .iter()
            .zip(&self.shape)
            .fold(0, |flat, (&i, &d)| flat * d + i);
        self.data[flat]
    }

    pub(crate) fn map(&self, f: impl Fn(f32) -> f32) -> Self {
        Self {
            shape: self.shape.clone(),
            data: self.data.iter().map(|&v| f(v)).collect(),
        }
    }

    pub(crate) fn zip(&self, other: &Self, f: impl Fn(f32, f32) -> f32) -> Self {
        assert_eq!(self.shape, other.shape);
        let pairs = self.data.iter().zip(&other.data);
        Self {
            shape: self.shape.clone(),
            data: pairs.map(|(&a, &b)| f(a, b)).collect(),
        }
    }

    pub(crate) fn f16(&self) -> Tensor {
        Tensor::f16(&self.shape, &self.data)
    }

    pub(crate) fn f32(&self) -> Tensor {
        Tensor::f32(&self.shape, &self.data)
    }
}

/// Functions to build and what they must give.
#[derive(Default)]
pub(crate) struct Suite {
    module: Module,
    calls: Vec<Call>,
    expected: Vec<(Nd, f32)>,
}

impl Suite {
    /// Adds a function of `inputs` (bound by `a0`, `a1`, ..) whose result must be
    /// within `tolerance` of `expected`, absolute or relative.
    pub(crate) fn case(
        &mut self,
        name: &str,
        inputs: &[Tensor],
        build: impl FnOnce(&mut GraphBuilder) -> ValueId,
        expected: Nd,
        tolerance: f32,
    ) {
        let names: Vec<String> = (0..inputs.len()).map(|i| format!("a{i}")).collect();
        let types: Vec<(&str, Input)> = names
            .iter()
            .zip(inputs)
            .map(|(n, t)| {
                let ty = TensorType::new(t.dtype, &t.shape);
                (n.as_str(), Input::Tensor(ty))
            })
            .collect();
        let mut g = GraphBuilder::new(&mut self.module, name, &types);
        let y = build(&mut g);
        assert_eq!(g.shape(y), expected.shape, "{name}");
        g.finish(&[("y", y)], &[]);
        let mut call = Call::new(name);
        for (n, t) in names.iter().zip(inputs) {
            call = call.input(n, t.clone());
        }
        self.calls.push(call);
        self.expected.push((expected, tolerance));
    }

    /// Runs all functions in one process and compares.
    pub(crate) fn run(self) {
        let dir = tempfile::tempdir().unwrap();
        let asset = dir.path().join("ops.aimodel");
        write_asset(&asset, &self.module, &Metadata::default()).unwrap();
        let report = oracle::report(&asset, &self.calls).unwrap();
        assert_eq!(report.compatibility.as_deref(), Some("27.0"));
        let mut wrong = vec![];
        for ((call, outputs), (expected, tolerance)) in
            self.calls.iter().zip(&report.calls).zip(&self.expected)
        {
            let found = outputs.get("y");
            assert_eq!(found.shape, expected.shape, "{}", call.function);
            let values = found.to_f32();
            let off = values.iter().zip(&expected.data).position(|(&f, &e)| {
                (f - e).abs() > tolerance * (1.0 + e.abs()) || f.is_nan() != e.is_nan()
            });
            if let Some(i) = off {
                wrong.push(format!(
                    "{}: element {i} is {}, expected {}",
                    call.function, values[i], expected.data[i]
                ));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
