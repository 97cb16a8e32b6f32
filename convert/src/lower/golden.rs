//! Parts of the graph at the dimensions of Qwen3-8B and 14B, held to plain formulas in
//! f64. Our runtime computes the graph.

use std::sync::Arc;

use anemone_runtime::kernels::Pool;
use anemone_runtime::{Data, Program, Tensor};
use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Elem, Module, TensorType, ValueId};
use anemone_schemas::spec::{Architecture, ModelSpec, Rope, RopeKind};
use half::f16;

use super::layer::{NormWeights, rms_norm};
use super::{ArgmaxForm, AttentionForm, Forms, MASK_VALUE, Shape, attention, forms, head};

const WIDTH: usize = 16;

fn qwen3_8b() -> ModelSpec {
    ModelSpec {
        architecture: Architecture::Qwen3,
        hidden: 4096,
        layers: 36,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 12_288,
        vocab: 151_936,
        max_position: 40_960,
        rms_eps: 1e-6,
        rope: Rope {
            theta: 1e6,
            kind: RopeKind::Default,
        },
        tie_word_embeddings: false,
        bos: None,
        eos: vec![],
    }
}

/// Uniform in (-1, 1), from a counter.
fn uniform(seed: u64, i: usize) -> f32 {
    let mut z =
        (seed.wrapping_mul(0xd134_2543_de82_ef95) ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn noise(seed: u64, n: usize) -> Vec<f32> {
    (0..n).map(|i| uniform(seed, i)).collect()
}

/// A function `main` of tensors and states; gives its first output.
fn run(
    inputs: &[(&str, Input, Tensor)],
    build: impl FnOnce(&mut GraphBuilder<'_>) -> (ValueId, Vec<ValueId>),
) -> Tensor {
    let mut module = Module::default();
    let types: Vec<(&str, Input)> = inputs.iter().map(|(n, i, _)| (*n, i.clone())).collect();
    let mut g = GraphBuilder::new(&mut module, "main", &types);
    let (y, tokens) = build(&mut g);
    g.finish(&[("y", y)], &tokens);
    let program = Program::from_module(module, Arc::new(Pool::new(1))).unwrap();
    let is_state = |i: &Input| matches!(i, Input::State(_));
    let tensors: Vec<(&str, &Tensor)> = inputs
        .iter()
        .filter(|(_, i, _)| !is_state(i))
        .map(|(n, _, t)| (*n, t))
        .collect();
    let mut states: Vec<(&str, Tensor)> = inputs
        .iter()
        .filter(|(_, i, _)| is_state(i))
        .map(|(n, _, t)| (*n, t.clone()))
        .collect();
    let mut states: Vec<(&str, &mut Tensor)> = states.iter_mut().map(|(n, t)| (*n, t)).collect();
    let plan = program.plan("main").unwrap();
    plan.run(&tensors, &mut states).unwrap().remove(0).1
}

fn f32s<'a>(name: &'a str, shape: &[usize], values: Vec<f32>) -> (&'a str, Input, Tensor) {
    let ty = TensorType::new(Elem::F32, shape);
    (name, Input::Tensor(ty), Tensor::new(shape, values).unwrap())
}

fn f16s<'a>(name: &'a str, shape: &[usize], values: &[f32]) -> (&'a str, Input, Tensor) {
    let ty = TensorType::new(Elem::F16, shape);
    let values: Vec<f16> = values.iter().map(|&v| f16::from_f32(v)).collect();
    (name, Input::Tensor(ty), Tensor::new(shape, values).unwrap())
}

/// Attention of one layer over a cache of which the first `step` slots are filled:
/// rotated queries and keys in, `[H * d, w]` out.
struct Attention {
    context: usize,
    step: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Attention {
    fn new(context: usize, step: usize) -> Self {
        let spec = qwen3_8b();
        let channels = spec.kv_heads * spec.head_dim;
        let mut q = noise(1, spec.heads * spec.head_dim * WIDTH);
        // Some queries that look at one key only.
        q.iter_mut().step_by(97).for_each(|v| *v *= 40.0);
        Self {
            context,
            step,
            q,
            k: noise(2, channels * WIDTH),
            v: noise(3, channels * WIDTH),
            keys: noise(4, channels * context),
            values: noise(5, channels * context),
        }
    }

    fn sees(&self, slot: usize, row: usize) -> bool {
        slot <= self.step + row
    }

    fn run(&self, form: AttentionForm) -> Vec<f32> {
        let spec = qwen3_8b();
        let (c, w, d) = (self.context, WIDTH, spec.head_dim);
        let (heads, groups) = (spec.heads, spec.kv_heads);
        let mask = (0..c * w).map(|i| {
            if self.sees(i / w, i % w) {
                0.0
            } else {
                MASK_VALUE
            }
        });
        let cache = [1, 1, groups * d, 1, c];
        let state = |name, values: &[f32]| {
            let ty = TensorType::new(Elem::F32, &cache);
            let tensor = Tensor::new(&cache, values.to_vec()).unwrap();
            (name, Input::State(ty), tensor)
        };
        let step = Tensor::new(&[1], vec![self.step as i32]).unwrap();
        let inputs = [
            f32s("q", &[1, heads, d, w], self.q.clone()),
            f32s("cos", &[1, 1, w, d], vec![1.0; w * d]),
            f32s("sin", &[1, 1, w, d], vec![0.0; w * d]),
            (
                "step",
                Input::Tensor(TensorType::new(Elem::Si32, &[1])),
                step,
            ),
            f32s("mask", &[1, c, 1, w], mask.collect()),
            state("keys", &self.keys),
            state("values", &self.values),
            f32s("k", &[1, groups, d, w], self.k.clone()),
            f32s("v", &[1, groups * d, 1, w], self.v.clone()),
        ];
        let forms = Forms {
            attention: form,
            ..Forms::default()
        };
        let shape = Shape {
            spec: &spec,
            forms: &forms,
            context: c,
            width: w,
            cache_constraints: None,
        };
        let y = run(&inputs, |g| {
            let host = attention::Host {
                cos: g.arg(1),
                sin: g.arg(2),
                step: g.arg(3),
                mask: g.arg(4),
                caches: [g.arg(5), g.arg(6)],
            };
            let mut context = attention::Context::open(g, &shape, host);
            let qkv = [g.arg(0), g.arg(7), g.arg(8)];
            let y = context.attend(g, 0, qkv);
            (y, context.close().to_vec())
        });
        match y.data() {
            Data::F32(v) => v.clone(),
            other => panic!("the result is {:?}", other.elem()),
        }
    }

    /// `softmax(q k / sqrt(d)) v` of each head and row, one after the other.
    fn plain(&self) -> Vec<f32> {
        let spec = qwen3_8b();
        let (c, w, d) = (self.context, WIDTH, spec.head_dim);
        let own = |new: &[f32], old: &[f32], channel: usize, slot: usize| {
            f64::from(if (self.step..self.step + w).contains(&slot) {
                new[channel * w + slot - self.step]
            } else {
                old[channel * c + slot]
            })
        };
        let mut out = vec![0.0; spec.heads * d * w];
        for head in 0..spec.heads {
            let first = head * spec.kv_heads / spec.heads * d;
            for row in 0..w {
                let slots: Vec<usize> = (0..c).filter(|&s| self.sees(s, row)).collect();
                let score = |&slot: &usize| -> f64 {
                    let products = (0..d).map(|i| {
                        let q = f64::from(self.q[(head * d + i) * w + row]);
                        q * own(&self.k, &self.keys, first + i, slot)
                    });
                    products.sum::<f64>() / (d as f64).sqrt()
                };
                let scores: Vec<f64> = slots.iter().map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..d {
                    let mixed: f64 = (slots.iter().zip(&weights))
                        .map(|(&s, p)| p * own(&self.v, &self.values, first + i, s))
                        .sum();
                    out[(head * d + i) * w + row] = (mixed / sum) as f32;
                }
            }
        }
        out
    }
}

#[test]
fn both_forms_of_attention_are_the_formula_in_f32() {
    for (context, step) in [(256, 0), (1024, 900)] {
        let call = Attention::new(context, step);
        let expected = call.plain();
        let [channel, row] = [AttentionForm::Channel, AttentionForm::Row].map(|f| call.run(f));
        for (name, found) in [("channel", &channel), ("row", &row)] {
            let worst = found
                .iter()
                .zip(&expected)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(worst <= 1e-5, "{name} at {context}: off by {worst}");
        }
    }
}

#[test]
fn prescaled_norms_are_the_formula_at_real_widths_and_with_spikes() {
    for (width, spike, shift) in [
        (4096, 0.0, 0),
        (4096, 0.0, 4),
        (4096, 9000.0, 6),
        (5120, 60_000.0, 8),
        (128, 300.0, 1),
    ] {
        let mut x: Vec<f32> = noise(6, width * WIDTH).iter().map(|v| 30.0 * v).collect();
        if spike > 0.0 {
            for row in 0..WIDTH {
                x[(row * 31 % width) * WIDTH + row] = spike;
            }
        }
        let weight: Vec<f32> = noise(7, width).iter().map(|v| 1.0 + 0.5 * v).collect();
        let norm = NormWeights {
            weight: weight.clone(),
            shift,
        };
        let input = f16s("x", &[1, width, 1, WIDTH], &x);
        let y = run(&[input], |g| {
            let x = g.arg(0);
            (rms_norm(g, x, 1, &norm, 1e-6), vec![])
        });
        let found = y.as_f16().unwrap();
        let half = |v: f32| f64::from(f16::from_f32(v).to_f32());
        for row in 0..WIDTH {
            let column = |i: usize| half(x[i * WIDTH + row]);
            let mean = (0..width).map(|i| column(i).powi(2)).sum::<f64>() / width as f64;
            for i in 0..width {
                let expected = column(i) / (mean + 1e-6).sqrt() * half(weight[i]);
                let found = f64::from(found[i * WIDTH + row].to_f32());
                // Five roundings to f16, the smallest numbers losing bits to the scaling.
                let bound = 4e-3 * expected.abs() + 2e-4;
                assert!(
                    (found - expected).abs() <= bound,
                    "{width} wide, spike {spike}: {found} in place of {expected}"
                );
            }
        }
    }
}

/// Scores of the whole vocabulary of Qwen3, many of them equal.
#[test]
fn sliced_choices_are_the_first_best_of_the_whole_vocabulary() {
    let (vocab, valid) = (151_936, 151_669);
    let mut scores = noise(8, vocab * WIDTH);
    // So coarse that the best score appears often, in several slices.
    for v in &mut scores {
        *v = (*v * 40.0).round() / 4.0;
    }
    // A winner that only pads the vocabulary, one at the very end, one at a slice's edge.
    scores[(vocab - 1) * WIDTH] = 100.0;
    scores[(valid - 1) * WIDTH + 1] = 50.0;
    scores[15_200 * WIDTH + 2] = 50.0;
    scores[15_199 * WIDTH + 3] = 50.0;
    let expected: Vec<u32> = (0..WIDTH)
        .map(|row| {
            let mut best = 0;
            for v in 1..valid {
                if scores[v * WIDTH + row] > scores[best * WIDTH + row] {
                    best = v;
                }
            }
            best as u32
        })
        .collect();
    assert_eq!(expected[1..4], [151_668, 15_200, 15_199]);
    let input = f16s("scores", &[1, vocab, 1, WIDTH], &scores);
    for argmax in [ArgmaxForm::SlicedF16, ArgmaxForm::SlicedF32] {
        let choice = Forms {
            argmax,
            valid_vocab: Some(valid),
            ..Forms::default()
        };
        let y = run(std::slice::from_ref(&input), |g| {
            let sizes: Vec<usize> = forms::slices(vocab, 32)
                .iter()
                .map(ExactSizeIterator::len)
                .collect();
            let scores = g.arg(0);
            let parts = g.split(scores, 1, &sizes);
            (head::choose(g, &choice, &parts), vec![])
        });
        assert_eq!(*y.data(), Data::U32(expected.clone()), "{argmax:?}");
    }
}
