//! Composite operations: one name for what several primitives do.
//!
//! A composite carries a region that says it in primitives. Apple's loader goes
//! by the name and does not look inside; other readers may inline the region.

use super::GraphBuilder;
use crate::aimodel::ir::{Elem, TensorType, Type, TypeId, ValueId};

impl GraphBuilder<'_> {
    /// The elementwise operations of [`Self::binary`] except the logical ones,
    /// with numpy broadcasting.
    pub fn broadcasting(&mut self, name: &str, x: ValueId, y: ValueId) -> ValueId {
        self.composite(&format!("broadcasting_{name}_v1"), &[x, y], |b, a| {
            let shape = b.common_shape(a);
            let (x, y) = (b.spread(a[0], &shape), b.spread(a[1], &shape));
            b.binary(name, x, y)
        })
    }

    /// `condition ? x : y` with numpy broadcasting.
    pub fn broadcasting_where(&mut self, condition: ValueId, x: ValueId, y: ValueId) -> ValueId {
        self.composite("broadcasting_where_v1", &[condition, x, y], |b, a| {
            let shape = b.common_shape(a);
            let [c, x, y] = [a[0], a[1], a[2]].map(|v| b.spread(v, &shape));
            b.r#where(c, x, y)
        })
    }

    /// [`Self::batch_matmul`] with the batch axes broadcast.
    pub fn broadcasting_batch_matmul(&mut self, x: ValueId, y: ValueId) -> ValueId {
        self.composite("broadcasting_batch_matmul_v1", &[x, y], |b, a| {
            let split = |b: &Self, v| {
                let mut batch = b.shape(v);
                let matrix = batch.split_off(batch.len() - 2);
                (batch, matrix)
            };
            let ((x_batch, x_matrix), (y_batch, y_matrix)) = (split(b, a[0]), split(b, a[1]));
            let batch = broadcast(&x_batch, &y_batch);
            let x = b.spread(a[0], &[&batch[..], &x_matrix].concat());
            let y = b.spread(a[1], &[&batch[..], &y_matrix].concat());
            b.batch_matmul(x, y)
        })
    }

    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(&mut self, x: ValueId) -> ValueId {
        self.composite("sigmoid_v1", &[x], |b, a| b.logistic(a[0]))
    }

    /// `x / (1 + exp(-x))`.
    pub fn silu(&mut self, x: ValueId) -> ValueId {
        self.composite("silu_v1", &[x], |b, a| {
            let s = b.logistic(a[0]);
            b.binary("mul", a[0], s)
        })
    }

    /// `max(x, 0)`.
    pub fn relu(&mut self, x: ValueId) -> ValueId {
        self.composite("relu_v1", &[x], |b, a| {
            let zero = b.full_like(a[0], 0.0);
            b.binary("maximum", a[0], zero)
        })
    }

    /// `exp(x - max) / sum(exp(x - max))` along an axis.
    pub fn softmax(&mut self, x: ValueId, axis: usize) -> ValueId {
        let operands = [x, self.i32_scalar(axis as i32)];
        self.composite("softmax_v1", &operands, |b, a| {
            let top = b.reduce_max(a[0], &[axis]);
            let shifted = b.broadcasting("sub", a[0], top);
            let e = b.unary("exp", shifted);
            let sum = b.reduce_sum(e, &[axis]);
            b.broadcasting("divide", e, sum)
        })
    }

    /// Sum over axes, kept with extent 1; 16-bit floats are summed in f32.
    pub fn reduce_sum(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        self.reduce("sum", x, axes, "add", 0.0)
    }

    /// Product over axes, kept with extent 1.
    pub fn reduce_product(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        self.reduce("product", x, axes, "mul", 1.0)
    }

    /// Maximum over axes, kept with extent 1.
    pub fn reduce_max(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        self.reduce("max", x, axes, "maximum", f64::NEG_INFINITY)
    }

    /// Minimum over axes, kept with extent 1.
    pub fn reduce_min(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        self.reduce("min", x, axes, "minimum", f64::INFINITY)
    }

    /// Mean over axes, kept with extent 1; 16-bit floats are summed in f32.
    pub fn reduce_mean(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        let operands = [x, self.axes(axes)];
        self.composite("reduce_mean_v1", &operands, |b, a| {
            let shape = b.shape(a[0]);
            let count: usize = axes.iter().map(|&d| shape[d]).product();
            let elem = b.elem(a[0]);
            let wide = b.cast(a[0], accumulator(elem));
            let sum = b.reduce_sum(wide, axes);
            let count = b.full_like(sum, count as f64);
            let mean = b.binary("divide", sum, count);
            b.cast(mean, elem)
        })
    }

    /// Index (`ui32`) of the first largest element along an axis, kept with extent 1.
    pub fn argmax(&mut self, x: ValueId, axis: usize) -> ValueId {
        let operands = [x, self.i32_scalar(axis as i32)];
        self.composite("argmax_v1", &operands, |b, a| {
            let elem = b.elem(a[0]);
            let mut shape = b.shape(a[0]);
            shape[axis] = 1;
            let scalar = b.scalar_type(elem);
            let take_new = b.region(&[scalar, scalar], |b, c| {
                vec![b.binary("greater", c[1], c[0])]
            });
            let init = b.full(elem, &[], f64::NEG_INFINITY);
            let first = b.u32_scalar(0);
            let ty = Type::Tensor(TensorType::new(Elem::Ui32, &shape));
            let ty = b.module.add_type(ty);
            b.push(
                "primitive.reduce_index_v1",
                &[a[0], a[1], init, first],
                &[ty],
                vec![],
                vec![take_new],
            )[0]
        })
    }

    /// `x` sorted along an axis; see [`Self::argsort`].
    pub fn sort(&mut self, x: ValueId, axis: usize, descending: bool) -> ValueId {
        let operands = self.sort_operands(x, axis, [descending, true]);
        self.composite("sort_v1", &operands, |b, a| {
            let order = b.infer("primitive.argsort_v1", a);
            let result = b.tensor_type(a[0]).clone();
            b.typed(
                "primitive.gather_along_axis_v1",
                &[a[0], order, a[1]],
                result,
            )
        })
    }

    /// Repeats `x` along every axis.
    pub fn tile(&mut self, x: ValueId, reps: &[usize]) -> ValueId {
        let operands = [x, self.sizes(reps)];
        self.composite("tile_v2", &operands, |b, a| {
            let shape = b.shape(a[0]);
            let (mut apart, mut repeated, mut joined) = (vec![], vec![], vec![]);
            for (&d, &r) in shape.iter().zip(reps) {
                apart.extend([1, d]);
                repeated.extend([r, d]);
                joined.push(d * r);
            }
            let apart = b.reshape(a[0], &apart);
            let repeated = b.broadcast_to(apart, &repeated);
            b.reshape(repeated, &joined)
        })
    }

    /// `scale * (x - offset1) + offset2`, one parameter per entry of an axis.
    pub fn dequantize(
        &mut self,
        x: ValueId,
        scale: ValueId,
        offset1: ValueId,
        offset2: ValueId,
        axis: usize,
    ) -> ValueId {
        let operands = [x, scale, offset1, offset2, self.i32_scalar(axis as i32)];
        self.composite("dequantize_v2", &operands, |b, a| {
            let mut blocks = vec![1; b.shape(a[0]).len()];
            let [scale, offset1, offset2] = [a[1], a[2], a[3]].map(|p| {
                blocks[axis] = b.shape(p).first().copied().unwrap_or(1);
                b.reshape(p, &blocks)
            });
            b.blockwise_shift_scale(a[0], scale, offset1, offset2)
        })
    }

    // ---- parts of decompositions

    /// Appends a composite whose decomposition is what `fill` builds from block
    /// arguments of the operands' types.
    fn composite(
        &mut self,
        name: &str,
        operands: &[ValueId],
        fill: impl FnOnce(&mut Self, &[ValueId]) -> ValueId,
    ) -> ValueId {
        for &operand in operands {
            assert!(!self.is_dynamic(operand), "`{name}` of a dynamic shape");
        }
        let types: Vec<TypeId> = operands
            .iter()
            .map(|&v| self.module.value_type(v))
            .collect();
        // Typed before the decomposition is built, so that a mistake is reported
        // in terms of the composite.
        let at = self.body().ops.len();
        let result = self.infer(name, operands);
        let op = self.body().ops[at];
        let region = self.region(&types, |b, args| vec![fill(b, args)]);
        self.module.op_mut(op).regions.push(region);
        result
    }

    fn reduce(
        &mut self,
        name: &str,
        x: ValueId,
        axes: &[usize],
        combine: &str,
        init: f64,
    ) -> ValueId {
        let operands = [x, self.axes(axes)];
        self.composite(&format!("reduce_{name}_v1"), &operands, |b, a| {
            let elem = b.elem(a[0]);
            let acc = match combine {
                "add" | "mul" => accumulator(elem),
                _ => elem,
            };
            let types = [b.scalar_type(acc), b.scalar_type(elem)];
            let step = b.region(&types, |b, c| {
                let x = b.cast(c[1], acc);
                vec![b.binary(combine, c[0], x)]
            });
            let mut shape = b.shape(a[0]);
            for &d in axes {
                shape[d] = 1;
            }
            let init = b.full(acc, &[], init);
            let ty = b
                .module
                .add_type(Type::Tensor(TensorType::new(elem, &shape)));
            b.push(
                "primitive.reduce_v1",
                &[a[0], a[1], init],
                &[ty],
                vec![],
                vec![step],
            )[0]
        })
    }

    fn logistic(&mut self, x: ValueId) -> ValueId {
        let (zero, one) = (self.full_like(x, 0.0), self.full_like(x, 1.0));
        let minus = self.binary("sub", zero, x);
        let e = self.unary("exp", minus);
        let denominator = self.binary("add", one, e);
        self.binary("divide", one, denominator)
    }

    fn full_like(&mut self, x: ValueId, value: f64) -> ValueId {
        let (elem, shape) = (self.elem(x), self.shape(x));
        self.full(elem, &shape, value)
    }

    /// The shape all of `values` broadcast to.
    fn common_shape(&self, values: &[ValueId]) -> Vec<usize> {
        values
            .iter()
            .fold(vec![], |shape, &v| broadcast(&shape, &self.shape(v)))
    }

    /// `x` broadcast to a shape, or `x` itself if it has it.
    fn spread(&mut self, x: ValueId, shape: &[usize]) -> ValueId {
        if self.shape(x) == shape {
            return x;
        }
        self.broadcast_to(x, shape)
    }
}

/// numpy's common shape of two shapes known to broadcast.
fn broadcast(x: &[usize], y: &[usize]) -> Vec<usize> {
    let rank = x.len().max(y.len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |j| s[j]);
    (0..rank)
        .map(|i| match (at(x, i), at(y, i)) {
            (1, b) => b,
            (a, _) => a,
        })
        .collect()
}

/// What an element type is summed in.
fn accumulator(elem: Elem) -> Elem {
    match elem {
        Elem::F16 | Elem::Bf16 => Elem::F32,
        other => other,
    }
}
