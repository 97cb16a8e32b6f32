//! Gradients against differences of the forward pass.

use anemone_schemas::spec::{Architecture, EMBEDDING, LM_HEAD, Norm, Rope, RopeKind};

use super::*;
use crate::Weights;

/// Random weights of a small model, one of whose tensors may be moved.
struct Toy {
    spec: ModelSpec,
    moved: Option<(String, Vec<f32>)>,
}

impl Weights for Toy {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error> {
        let stored = if name == LM_HEAD { EMBEDDING } else { name };
        let (_, shape) = self
            .spec
            .tensors()
            .into_iter()
            .find(|t| t.0 == stored)
            .unwrap();
        let seed: usize = stored.bytes().map(usize::from).sum();
        let scale = 2.0 / (shape[shape.len() - 1] as f32).sqrt();
        let mut data: Vec<f32> = random(seed, shape.iter().product())
            .into_iter()
            .map(|x| {
                if shape.len() == 1 {
                    1.0 + 0.3 * x
                } else {
                    x * scale
                }
            })
            .collect();
        if let Some((moved, by)) = &self.moved
            && moved == name
        {
            data.iter_mut().zip(by).for_each(|(x, d)| *x += d);
        }
        Ok((shape, data))
    }
}

fn random(seed: usize, n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (2.0 * uniform(seed as u64, i as u64) - 1.0) as f32)
        .collect()
}

fn toy(architecture: Architecture) -> Toy {
    let spec = ModelSpec {
        architecture,
        hidden: 12,
        layers: 2,
        heads: 6,
        kv_heads: 2,
        head_dim: 4,
        intermediate: 20,
        vocab: 17,
        max_position: 512,
        rms_eps: 1e-5,
        rope: Rope {
            theta: 10_000.0,
            kind: RopeKind::Default,
        },
        tie_word_embeddings: true,
        bos: None,
        eos: Vec::new(),
    };
    Toy { spec, moved: None }
}

/// Two windows, one longer than a block of queries.
fn windows() -> Vec<Vec<u32>> {
    [5, 300]
        .map(|n| (0..n).map(|i| (i * 7 + n) % 17).collect())
        .to_vec()
}

/// Σ c · logits with fixed random c, in f64.
fn loss(weights: &Toy) -> f64 {
    let teacher = Teacher::new(weights);
    let mut hidden = teacher.embed(&windows()).unwrap();
    for layer in 0..weights.spec.layers {
        teacher.block(layer, &mut hidden, None).unwrap();
    }
    let head = teacher.head().unwrap();
    let normed = teacher.final_norm(&hidden).unwrap();
    let mut sum = 0.0;
    for (window, rows) in normed.0.iter().enumerate() {
        let logits = teacher.logits(rows, &head).unwrap();
        let factors = random(100 + window, logits.len());
        sum += logits
            .iter()
            .zip(&factors)
            .map(|(x, c)| f64::from(x * c))
            .sum::<f64>();
    }
    sum
}

/// Gradient of every matrix and norm of the blocks and of the final norm, by name.
fn gradients(weights: &Toy) -> Vec<(String, Vec<f32>)> {
    let teacher = Teacher::new(weights);
    let mut hidden = teacher.embed(&windows()).unwrap();
    let mut inputs = Vec::new();
    for layer in 0..weights.spec.layers {
        inputs.push(hidden.clone());
        teacher.block(layer, &mut hidden, None).unwrap();
    }
    let head = teacher.head().unwrap();
    let mut set = |window: usize, first: usize, _: &[f32], logits: &mut [f32]| {
        let all = random(100 + window, windows()[window].len() * 17);
        logits.copy_from_slice(&all[first * 17..first * 17 + logits.len()]);
        Ok(())
    };
    let (mut gradient, norm) = teacher.head_backward(hidden, head, &mut set).unwrap();
    let mut found = vec![(FINAL_NORM.to_string(), norm)];
    for layer in (0..weights.spec.layers).rev() {
        let mut hook = |site: Site, x: &[f32], outputs: &[LinearGradient<'_>]| {
            for output in outputs {
                let [out, cols] = output.linear.shape(&weights.spec);
                assert_eq!(output.linear.site(), site);
                let sum = output.of_weight(x, out).unwrap();
                assert_eq!(sum.len(), out * cols);
                let name = output.linear.tensor(layer);
                // Both windows fit into one group, so every matrix is seen once.
                assert!(found.iter().all(|f: &(String, Vec<f32>)| f.0 != name));
                found.push((name, sum));
            }
        };
        let norms = teacher
            .backward(
                layer,
                &mut |window| Ok(inputs[layer].0[window].clone()),
                &mut gradient,
                Some(&mut hook),
            )
            .unwrap();
        found.push((Norm::Input.tensor(layer), norms.input));
        found.push((Norm::PostAttention.tensor(layer), norms.post_attention));
        let [q, k] = norms.heads;
        if weights.spec.architecture == Architecture::Qwen3 {
            found.push((Norm::Q.tensor(layer), q));
            found.push((Norm::K.tensor(layer), k));
        }
    }
    found
}

#[test]
fn gradients_are_the_slopes_of_the_forward_pass() {
    for architecture in [Architecture::Qwen3, Architecture::Llama] {
        let mut weights = toy(architecture);
        let found = gradients(&weights);
        assert_eq!(found.len(), 1 + 2 * (7 + architecture.norms().len()));
        for (name, gradient) in found {
            let direction = random(9, gradient.len());
            let along = gradient.iter().zip(&direction);
            let along: f64 = along.map(|(g, d)| f64::from(g * d)).sum();
            let mut at = |step: f32| {
                let by = direction.iter().map(|d| d * step).collect();
                weights.moved = Some((name.clone(), by));
                loss(&weights)
            };
            // Richardson's combination of two central differences.
            let mut slope = |step: f32| (at(step) - at(-step)) / f64::from(2.0 * step);
            let expected = (4.0 * slope(2e-3) - slope(4e-3)) / 3.0;
            let size: f64 = gradient
                .iter()
                .map(|g| f64::from(g * g))
                .sum::<f64>()
                .sqrt();
            assert!(
                (along - expected).abs() < 2e-3 * size.max(1.0),
                "{architecture:?} {name}: {along}, slope {expected}, size {size}"
            );
        }
    }
}

#[test]
fn drawn_gradients_average_to_the_difference_of_distributions() {
    let logits = [0.5f32, -1.0, 2.0, 0.0, 9.0];
    let mut sum = [0.0f64; 5];
    let draws = 4000;
    for first in 0..draws {
        let mut row = logits;
        sampled_loss(&mut row, 5, 4, 3, first);
        assert!(row.iter().sum::<f32>().abs() < 1e-6);
        sum.iter_mut()
            .zip(row)
            .for_each(|(s, x)| *s += f64::from(x));
    }
    for mean in sum.map(|s| s / draws as f64) {
        assert!(mean.abs() < 0.03, "{mean}");
    }
}
