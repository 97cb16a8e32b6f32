//! Rotary position embedding: frequencies and tables as `transformers` computes
//! them (`modeling_rope_utils.py`), because the weights were trained with those.
//!
//! Head dimension `i` of the first half is rotated together with dimension
//! `i + head_dim/2` by the angle `position * inv_freq[i]`; the plain frequencies
//! are `theta^(-2i/head_dim)` (RoFormer, arXiv:2104.09864). The scaled kinds change
//! the frequencies, and YaRN also multiplies cosine and sine by a factor.
//!
//! All arithmetic on tensors is in f32 and in the order of the original. It matters:
//! at position 32768 one unit in the last place of a frequency near 1 moves its angle
//! by 0.002.

use std::f64::consts::TAU;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Rotary embedding of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// How frequencies are scaled for long contexts.
    pub kind: RopeKind,
}

/// The scaling methods we compute; any other is refused when the config is read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
#[non_exhaustive]
pub enum RopeKind {
    /// No scaling.
    Default,
    /// Every frequency divided by `factor` (position interpolation, arXiv:2306.15595).
    Linear {
        /// Context extension factor.
        factor: f64,
    },
    /// NTK-by-parts interpolation (YaRN, arXiv:2309.00071, section 3.2).
    Yarn {
        /// Context extension factor.
        factor: f64,
        /// Context length before the extension.
        original_max_position: usize,
        /// Rotations above which a dimension is not interpolated.
        beta_fast: f64,
        /// Rotations below which a dimension is fully interpolated.
        beta_slow: f64,
        /// Multiplies cosine and sine.
        attention_factor: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
    },
    /// Llama 3.1's scaling by wavelength.
    Llama3 {
        /// Context extension factor.
        factor: f64,
        /// Wavelengths longer than `original_max_position / low_freq_factor` are scaled fully.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_max_position / high_freq_factor` are not scaled.
        high_freq_factor: f64,
        /// Context length before the extension.
        original_max_position: usize,
    },
}

impl Rope {
    /// Angle per position of each of the `head_dim / 2` rotated pairs, in radians.
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        let pos_freqs: Vec<f32> = (0..head_dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / head_dim as f32;
                self.theta.powf(f64::from(exponent)) as f32
            })
            .collect();
        let plain = pos_freqs.iter().map(|f| 1.0 / f);
        match self.kind {
            RopeKind::Default => plain.collect(),
            RopeKind::Linear { factor } => plain.map(|f| f / factor as f32).collect(),
            RopeKind::Yarn {
                factor,
                original_max_position,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let betas = [beta_fast, beta_slow];
                let original = original_max_position as f64;
                let [low, high] = self.yarn_ramp(head_dim, betas, original, truncate);
                pos_freqs
                    .iter()
                    .enumerate()
                    .map(|(i, &freq)| {
                        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        let keep = 1.0 - ramp;
                        let interpolated = 1.0 / (factor as f32 * freq);
                        interpolated * (1.0 - keep) + (1.0 / freq) * keep
                    })
                    .collect()
            }
            RopeKind::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => {
                let factor = factor as f32;
                let original = original_max_position as f64;
                let longest = (original / low_freq_factor) as f32;
                let shortest = (original / high_freq_factor) as f32;
                let span = (high_freq_factor - low_freq_factor) as f32;
                plain
                    .map(|freq| {
                        // torch divides a scalar by a tensor as reciprocal * scalar.
                        let wavelength = (1.0 / freq) * TAU as f32;
                        if wavelength > longest {
                            freq / factor
                        } else if wavelength < shortest {
                            freq
                        } else {
                            let turns = (1.0 / wavelength) * original as f32;
                            let smooth = (turns - low_freq_factor as f32) / span;
                            (1.0 - smooth) * freq / factor + smooth * freq
                        }
                    })
                    .collect()
            }
        }
    }

    /// First and last dimension of YaRN's ramp: the dimensions that turn
    /// `beta_fast` and `beta_slow` times within the original context.
    fn yarn_ramp(
        &self,
        head_dim: usize,
        betas: [f64; 2],
        original: f64,
        truncate: bool,
    ) -> [f64; 2] {
        let dim = head_dim as f64;
        let [mut low, mut high] = betas
            .map(|rotations| dim * (original / (rotations * TAU)).ln() / (2.0 * self.theta.ln()));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if high - low == 0.0 {
            // An empty ramp would divide by zero.
            high += 0.001;
        }
        [low, high]
    }

    /// Factor on cosine and sine; 1 except for YaRN.
    pub fn attention_factor(&self) -> f32 {
        match self.kind {
            RopeKind::Yarn {
                attention_factor, ..
            } => attention_factor as f32,
            _ => 1.0,
        }
    }

    /// Cosines and sines of `positions`, each `[positions, head_dim / 2]`, the
    /// attention factor included. The second half of a head uses the same values.
    pub fn cos_sin(
        &self,
        head_dim: usize,
        positions: impl IntoIterator<Item = usize>,
    ) -> (Vec<f32>, Vec<f32>) {
        let inv_freq = self.inv_freq(head_dim);
        let factor = self.attention_factor();
        positions
            .into_iter()
            .flat_map(|position| inv_freq.iter().map(move |f| position as f32 * f))
            .map(|angle| (angle.cos() * factor, angle.sin() * factor))
            .unzip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(kind: RopeKind) -> Rope {
        Rope { theta: 1e6, kind }
    }

    #[test]
    fn plain_frequencies_are_powers_of_theta() {
        let f = rope(RopeKind::Default).inv_freq(8);
        for (i, f) in f.iter().enumerate() {
            let exact = 1e6f64.powf(-(i as f64) / 4.0);
            assert!((f64::from(*f) / exact - 1.0).abs() < 2e-7);
        }
    }

    #[test]
    fn linear_scaling_stretches_positions() {
        let linear = rope(RopeKind::Linear { factor: 4.0 });
        let (stretched, _) = linear.cos_sin(64, [400]);
        let (plain, _) = rope(RopeKind::Default).cos_sin(64, [100]);
        for (a, b) in stretched.iter().zip(&plain) {
            assert!((a - b).abs() < 1e-4);
        }
    }

    #[test]
    fn yarn_keeps_fast_dimensions_and_scales_slow_ones() {
        let yarn = rope(RopeKind::Yarn {
            factor: 4.0,
            original_max_position: 32768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.25,
            truncate: true,
        });
        let (scaled, plain) = (yarn.inv_freq(128), rope(RopeKind::Default).inv_freq(128));
        assert_eq!(scaled[0].to_bits(), plain[0].to_bits());
        assert!((scaled[63] * 4.0 / plain[63] - 1.0).abs() < 1e-6);
        let (cos, _) = yarn.cos_sin(128, [0]);
        assert!(cos.iter().all(|c| c.to_bits() == 1.25f32.to_bits()));
    }
}
