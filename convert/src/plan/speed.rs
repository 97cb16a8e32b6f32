//! How fast this machine does the work of a conversion now, whatever else runs on it.

use std::time::Instant;

use anemone_calib::StatsBuilder;
use anemone_schemas::spec::Site;
use sha2::{Digest, Sha256};

use super::Work;
use crate::error::Error;
use crate::quantize::{Calibration, Matrix, Method, Quantizer, Settings};

/// Width of the matrices that are measured on, a quarter of a large model's.
const COLS: usize = 1024;
const ROWS: usize = 512;
/// Refinement takes much longer for each row.
const FEW_ROWS: usize = 64;

/// Units of [`Work`] in a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed(Work);

impl Speed {
    /// Measures for a second or two.
    pub(super) fn measure() -> Result<Self, Error> {
        // Any numbers do: neither routine is faster on some than on others.
        let values: Vec<f32> = (0..ROWS * COLS)
            .map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0 - 0.5)
            .collect();
        let mut builder = StatsBuilder::new(Site::AttnIn, COLS);
        let start = Instant::now();
        let mut products = 0.0;
        while start.elapsed().as_secs_f64() < 0.3 || products == 0.0 {
            builder.add(&values)?;
            // Of panels of 512 columns only those on and below the diagonal.
            products += (ROWS * COLS * COLS) as f64 * 0.75;
        }
        let products = products / start.elapsed().as_secs_f64();
        let stats = builder.finish()?;
        let calibration = Calibration {
            name: "calibration of the plan",
            cols: COLS,
            hessian: &stats.hessian,
            sumsq: &stats.sumsq,
            rows: stats.rows,
        };
        let matrix = Matrix {
            name: "calibration of the plan",
            rows: ROWS,
            cols: COLS,
            data: &values,
        };
        let quantizer = Quantizer::new(Settings::default(), 0)?;
        let timed = |method, matrix| -> Result<(f64, f64), Error> {
            let start = Instant::now();
            let prepared = quantizer.prepare(calibration, method)?;
            let ready = start.elapsed().as_secs_f64();
            quantizer.quantize(matrix, &prepared, None)?;
            Ok((ready, start.elapsed().as_secs_f64() - ready))
        };
        let (_, kmeans) = timed(Method::KMeans, matrix)?;
        let (factor, gptq) = timed(Method::Gptq, matrix)?;
        let few = Matrix {
            rows: FEW_ROWS,
            data: &values[..FEW_ROWS * COLS],
            ..matrix
        };
        let (_, refined) = timed(Method::TwoSided, few)?;
        let refined = refined - gptq * FEW_ROWS as f64 / ROWS as f64;
        let start = Instant::now();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut hash = Sha256::new();
        for _ in 0..8 {
            hash.update(&bytes);
        }
        std::hint::black_box(hash.finalize());
        let hashed = (bytes.len() * 8) as f64 / start.elapsed().as_secs_f64();
        let cols = COLS as f64;
        Ok(Self(Work {
            products,
            points: (ROWS * COLS) as f64 / kmeans,
            feedback: ROWS as f64 * cols * cols / (gptq - kmeans).max(gptq / 10.0),
            refinement: FEW_ROWS as f64 * cols * cols / refined.max(1e-6),
            factors: cols.powi(3) / factor,
            hashed,
        }))
    }

    pub(super) fn seconds(&self, work: &Work) -> f64 {
        let speed = &self.0;
        work.products / speed.products
            + work.points / speed.points
            + work.feedback / speed.feedback
            + work.refinement / speed.refinement
            + work.factors / speed.factors
            + work.hashed / speed.hashed
    }
}
