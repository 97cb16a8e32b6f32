//! `conv2d`: valid, NCHW, any kernel, stride, dilation and groups.

use crate::kernels::{self, Operand, Pool, Product};
use crate::ops::{Float, each_float};
use crate::tensor::Data;
use crate::view::View;

/// Attributes of a convolution, (height, width) each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conv {
    pub(crate) stride: (usize, usize),
    pub(crate) dilation: (usize, usize),
    pub(crate) groups: usize,
}

impl Conv {
    /// Whether it is a matrix product over the channels.
    pub(crate) fn is_pointwise(&self, kernel: &[usize]) -> bool {
        self.stride == (1, 1) && self.groups == 1 && kernel[2..] == [1, 1]
    }
}

/// The convolution as a product with unrolled patches:
/// `out[o][p] = sum over (c, i, j) of w[o][c][i][j] * x[c][p_h s_h + i d_h][p_w s_w + j d_w]`,
/// accumulated in f32 in the order of (c, i, j) and rounded once.
pub(crate) fn conv2d(pool: &Pool, x: View, w: View, conv: &Conv, shape: &[usize]) -> View {
    let (x, w) = (x.contiguous(), w.contiguous());
    let [n, channels, height, width] = x.shape[..] else {
        unreachable!("the planner admits rank 4")
    };
    let [outputs, per_group, kh, kw] = w.shape[..] else {
        unreachable!("the planner admits rank 4")
    };
    let (oh, ow) = (shape[2], shape[3]);
    let (taps, places) = (per_group * kh * kw, oh * ow);
    let rows = outputs / conv.groups;
    let src = wide(&x);
    let weights = wide(&w);
    let mut patches = vec![0.0f32; taps * places];
    let mut out = vec![0.0f32; n * outputs * places];
    for image in 0..n {
        for group in 0..conv.groups {
            for (tap, patch) in patches.chunks_exact_mut(places.max(1)).enumerate() {
                let (c, i, j) = (tap / (kh * kw), tap / kw % kh, tap % kw);
                let channel = (image * channels + group * per_group + c) * height * width;
                for (p, v) in patch.iter_mut().enumerate() {
                    let y = p / ow * conv.stride.0 + i * conv.dilation.0;
                    let z = p % ow * conv.stride.1 + j * conv.dilation.1;
                    *v = src[channel + y * width + z];
                }
            }
            let at = (image * outputs + group * rows) * places;
            let product = Product {
                a: Operand {
                    data: &weights[group * rows * taps..],
                    row: taps,
                    col: 1,
                },
                b: Operand {
                    data: &patches,
                    row: places,
                    col: 1,
                },
                out: &mut out[at..at + rows * places],
            };
            kernels::batch(pool, rows, taps, places, vec![product]);
        }
    }
    let data = each_float!(&*x.data, v => like(v, &out), else => unreachable!("the planner admits floats"));
    View::dense(shape, data)
}

fn wide(v: &View) -> Vec<f32> {
    let n = v.len();
    let mut out = vec![0.0; n];
    each_float!(&*v.data, src => Float::load(&src[v.offset..v.offset + n], &mut out), else => {});
    out
}

fn like<T: Float>(_: &[T], values: &[f32]) -> Data
where
    Vec<T>: Into<Data>,
{
    let mut out = vec![T::default(); values.len()];
    T::store(values, &mut out);
    out.into()
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "sums are defined to the bit")]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn any_kernel_stride_dilation_and_group_equal_the_definition() {
        let pool = Pool::new(1);
        let make = |shape: &[usize], k: usize| {
            let n: usize = shape.iter().product();
            let v = (0..n).map(|i| f16::from_f32(((i * k) % 17) as f32 / 8.0 - 1.0));
            View::dense(shape, Data::F16(v.collect()))
        };
        for (kh, kw, s, d, g) in [
            (1, 1, 1, 1, 1),
            (3, 2, 1, 1, 1),
            (2, 3, 2, 1, 2),
            (3, 3, 1, 2, 4),
            (1, 1, 2, 1, 2),
        ] {
            let conv = Conv {
                stride: (s, 1),
                dilation: (1, d),
                groups: g,
            };
            let (x, w) = (make(&[2, 4, 7, 8], 5), make(&[8, 4 / g, kh, kw], 3));
            let (oh, ow) = ((7 - kh) / s + 1, 8 - (kw - 1) * d);
            let y = conv2d(&pool, x.clone(), w.clone(), &conv, &[2, 8, oh, ow]);
            let (sx, sw) = (wide(&x), wide(&w));
            let got = wide(&y);
            for i in 0..got.len() {
                let (b, o, p, q) = (i / (8 * oh * ow), i / (oh * ow) % 8, i / ow % oh, i % ow);
                let mut sum = 0.0f64;
                for c in 0..4 / g {
                    for u in 0..kh {
                        for v in 0..kw {
                            let channel = o / (8 / g) * (4 / g) + c;
                            let at = ((b * 4 + channel) * 7 + p * s + u) * 8 + q + v * d;
                            sum += f64::from(sx[at])
                                * f64::from(sw[((o * (4 / g) + c) * kh + u) * kw + v]);
                        }
                    }
                }
                assert_eq!(got[i], f16::from_f64(sum).to_f32());
            }
        }
    }
}
