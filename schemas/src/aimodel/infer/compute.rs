//! Operations that compute across elements: products, reductions, decompression.

use super::{Ctx, Index, Rule, Stop, demand, extents, plain, wrong};
use crate::aimodel::ir::{Elem, TensorType};

impl Ctx<'_> {
    pub(super) fn compute(&self, name: &str) -> Option<Rule<TensorType>> {
        Some(match name {
            "primitive.range_v1" => self.range(),
            "primitive.batch_matmul_v1" => self.batch_matmul(false),
            "broadcasting_batch_matmul_v1" => self.batch_matmul(true),
            "primitive.conv2d_v1" => self.conv2d(),
            "primitive.lut_to_dense_v1" => self.lut_to_dense(),
            "primitive.blockwise_shift_scale_v2" => self.blockwise_shift_scale(),
            "softmax_v1" => self.softmax(),
            "reduce_sum_v1" | "reduce_mean_v1" | "reduce_max_v1" | "reduce_min_v1"
            | "reduce_product_v1" => self.reduce(),
            "argmax_v1" => self.argmax(),
            "dequantize_v2" => self.dequantize(),
            _ => return None,
        })
    }

    fn range(&self) -> Rule<TensorType> {
        self.arity(3)?;
        self.same_elem(0, 1)?;
        self.same_elem(0, 2)?;
        for i in 0..3 {
            let rank = self.tensor(i)?.shape.len();
            demand!(rank == 0, "operand {i} has rank {rank}, not 0");
        }
        let (start, stop, step) = (self.ints(0)?[0], self.ints(1)?[0], self.ints(2)?[0]);
        demand!(step > 0, "step {step}");
        let span = stop.checked_sub(start).ok_or(Stop::Unknown)?.max(0);
        let len = span / step + i64::from(span % step != 0);
        Ok(plain(self.tensor(0)?.elem, vec![len]))
    }

    /// `[*batch, M, K] x [*batch, K, N]`.
    fn batch_matmul(&self, broadcast: bool) -> Rule<TensorType> {
        self.arity(2)?;
        self.same_elem(0, 1)?;
        let (x, y) = (&self.tensor(0)?.shape, &self.tensor(1)?.shape);
        demand!(
            x.len() >= 2 && y.len() >= 2,
            "matrices of rank {} and {}",
            x.len(),
            y.len()
        );
        let (x_batch, x_matrix) = x.split_at(x.len() - 2);
        let (y_batch, y_matrix) = y.split_at(y.len() - 2);
        demand!(
            super::compatible(x_matrix[1], y_matrix[0]),
            "inner extents {} and {} differ",
            x_matrix[1],
            y_matrix[0]
        );
        let mut shape = if broadcast {
            super::broadcast_shapes(x_batch, y_batch)?
        } else {
            super::same_shapes(x_batch, y_batch)?
        };
        shape.extend([x_matrix[0], y_matrix[1]]);
        Ok(plain(self.tensor(0)?.elem, shape))
    }

    /// Input `[N, C, H, W]`, weight `[O, C / groups, kh, kw]`, no padding:
    /// `out = (in - dilation * (kernel - 1) - 1) / stride + 1`.
    fn conv2d(&self) -> Rule<TensorType> {
        self.arity(5)?;
        self.same_elem(0, 1)?;
        self.index_operand(2, Index::Unsigned, 1)?;
        self.index_operand(3, Index::Unsigned, 1)?;
        self.index_operand(4, Index::Unsigned, 0)?;
        let (x, w) = (self.dims(0)?, self.dims(1)?);
        demand!(
            x.len() == 4 && w.len() == 4,
            "input of rank {} and weight of rank {}, both must be 4",
            x.len(),
            w.len()
        );
        let (stride, dilation, groups) = (self.sizes(2)?, self.sizes(3)?, self.sizes(4)?[0]);
        demand!(
            stride.len() == 2 && dilation.len() == 2,
            "strides {stride:?} and dilations {dilation:?} must have two entries"
        );
        demand!(
            groups > 0 && w[0] % groups == 0 && w[1].checked_mul(groups) == Some(x[1]),
            "weight {w:?} in {groups} groups does not fit {} input channels",
            x[1]
        );
        let mut out = vec![x[0], w[0]];
        for d in 0..2 {
            let span = w[d + 2]
                .checked_sub(1)
                .and_then(|k| k.checked_mul(dilation[d]));
            match span {
                Some(span) if span < x[d + 2] && stride[d] > 0 => {
                    out.push((x[d + 2] - span - 1) / stride[d] + 1);
                }
                _ => wrong!(
                    "kernel {} with dilation {} and stride {} does not fit extent {}",
                    w[d + 2],
                    dilation[d],
                    stride[d],
                    x[d + 2]
                ),
            }
        }
        Ok(plain(self.tensor(0)?.elem, extents(&out)))
    }

    /// Indices `ui{bits} [a..]`, tables `[b.., 2^bits, v]` with each `b` dividing
    /// its `a`; the result has `v` times the extent along the axis.
    fn lut_to_dense(&self) -> Rule<TensorType> {
        self.arity(3)?;
        let axis = self.tensor(2)?;
        demand!(
            axis.elem == Elem::Si16 && axis.shape.is_empty(),
            "the axis must be a si16 of rank 0"
        );
        let indices = self.tensor(0)?;
        let bits = match indices.elem {
            Elem::Ui1 | Elem::Ui2 | Elem::Ui3 | Elem::Ui4 | Elem::Ui6 | Elem::Ui8 => {
                indices.elem.bits()
            }
            other => wrong!("indices of type {}", other.name()),
        };
        let (mut dims, lut) = (self.dims(0)?, self.dims(1)?);
        demand!(
            lut.len() == dims.len() + 2,
            "a table of rank {} for indices of rank {}, which must be 2 less",
            lut.len(),
            dims.len()
        );
        let (blocks, entry) = lut.split_at(dims.len());
        demand!(
            entry[0] == 1 << bits,
            "a table of {} entries for {bits}-bit indices",
            entry[0]
        );
        for (d, (&a, &b)) in dims.iter().zip(blocks).enumerate() {
            demand!(
                b > 0 && a % b == 0,
                "{b} tables along axis {d} do not divide extent {a}"
            );
        }
        let axis = self.axis(2, dims.len())?;
        match dims[axis].checked_mul(entry[1]) {
            Some(n) => dims[axis] = n,
            None => wrong!("the result is too large"),
        }
        Ok(plain(self.tensor(1)?.elem, extents(&dims)))
    }

    /// `scale * (data - offset1) + offset2`, one parameter per block.
    fn blockwise_shift_scale(&self) -> Rule<TensorType> {
        self.arity(4)?;
        let (data, blocks) = (self.dims(0)?, self.parameters()?);
        // A scalar applies to everything.
        let fits = blocks.is_empty()
            || blocks.len() == data.len()
                && data.iter().zip(&blocks).all(|(&a, &b)| b > 0 && a % b == 0);
        demand!(
            fits,
            "a scale of shape {blocks:?} does not divide {data:?} into blocks"
        );
        Ok(plain(self.tensor(3)?.elem, extents(&data)))
    }

    /// The one shape of operands 1 to 3: scale, offset of the data's type, offset of
    /// the result's type.
    fn parameters(&self) -> Rule<Vec<usize>> {
        self.same_elem(0, 2)?;
        let scale = self.dims(1)?;
        for i in [1, 3] {
            let elem = self.tensor(i)?.elem;
            demand!(
                elem.is_float(),
                "operand {i} is {}, not floating point",
                elem.name()
            );
        }
        for (i, what) in [(2, "first"), (3, "second")] {
            let offset = self.dims(i)?;
            demand!(
                offset == scale,
                "the {what} offset has shape {offset:?}, the scale {scale:?}, which must be one"
            );
        }
        Ok(scale)
    }

    fn softmax(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Signed, 0)?;
        let x = self.tensor(0)?;
        match self.axis(1, x.shape.len()) {
            Ok(_) | Err(Stop::Unknown) => Ok(x.clone()),
            Err(e) => Err(e),
        }
    }

    /// Reduced axes are kept with extent 1.
    fn reduce(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Signed, 1)?;
        let x = self.tensor(0)?;
        let mut shape = x.shape.clone();
        for axis in self.axes(1, shape.len())? {
            shape[axis] = 1;
        }
        Ok(plain(x.elem, shape))
    }

    fn argmax(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Signed, 0)?;
        let mut shape = self.tensor(0)?.shape.clone();
        let axis = self.axis(1, shape.len())?;
        shape[axis] = 1;
        Ok(plain(Elem::Ui32, shape))
    }

    /// Parameters of shape `[extent of the axis]`, or scalars; with those, all axes may
    /// be named.
    fn dequantize(&self) -> Rule<TensorType> {
        self.arity(5)?;
        self.index_elem(4, Index::Signed)?;
        let (x, scale) = (self.dims(0)?, self.parameters()?);
        let axes = self.axes(4, x.len())?;
        let each: usize = axes.iter().map(|&a| x[a]).product();
        let fits = scale.is_empty() || axes.len() == 1 && scale == [each];
        demand!(
            fits,
            "a scale of shape {scale:?} is not one per entry of axes {axes:?} of {x:?}"
        );
        Ok(plain(self.tensor(3)?.elem, extents(&x)))
    }
}
