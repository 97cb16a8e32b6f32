//! Running the steps of a plan.

use half::f16;

use super::kind::{Kind, Place, Step, WeightsRef};
use super::workspace::Workspace;
use crate::kernels::{DenseValues, DenseWeights, LutWeights};
use crate::ops::fused::{Largest, Live};
use crate::ops::layout::Span;
use crate::ops::{
    cast, convolution, elementwise, fused, gather, layout, logic, matmul, quantized, rare, rows,
};
use crate::program::Shared;
use crate::view::View;

/// What the steps of one run share.
pub(super) struct Context<'a> {
    pub(super) shared: &'a Shared,
    pub(super) live: Option<(usize, usize)>,
    pub(super) states: Vec<Option<View>>,
    pub(super) work: Workspace,
    /// The slot whose value `work.activations` holds, and its channel axis.
    pub(super) packed: Option<(u32, bool)>,
    /// The slot whose value `work.mask` holds, and its rows.
    pub(super) masked: Option<(u32, usize)>,
}

impl Context<'_> {
    /// Runs a step on `slots`; what they do not hold is among `constants`.
    pub(super) fn step(
        &mut self,
        step: &Step,
        slots: &mut [Option<View>],
        constants: &[Option<View>],
    ) -> Result<(), String> {
        let mut args: Vec<View> = Vec::with_capacity(step.args.len());
        for arg in &step.args {
            let slot = &mut slots[arg.slot as usize];
            let value = if arg.last { slot.take() } else { slot.clone() };
            let value = value.or_else(|| constants[arg.slot as usize].clone());
            args.push(value.ok_or("an operand has no value")?);
        }
        let results = execute(self, step, args)?;
        for ((slot, shape), value) in step.results.iter().zip(&step.shapes).zip(results) {
            if value.shape != *shape {
                return Err(format!(
                    "result has shape {:?}, declared {shape:?}",
                    value.shape
                ));
            }
            if let Some(slot) = slot {
                slots[*slot as usize] = Some(value);
            }
        }
        Ok(())
    }

    /// The live rows of a step's first result, if not all are.
    fn live_rows(&self, step: &Step) -> Option<Live> {
        let axis = step.tokens?;
        match self.live {
            Some((width, live)) if step.shapes[0][axis] == width && live < width => {
                Some(Live { axis, count: live })
            }
            _ => None,
        }
    }

    fn live(&self, tokens: usize) -> usize {
        match self.live {
            Some((width, live)) if width == tokens => live.min(tokens),
            _ => tokens,
        }
    }
}

/// Runs one constant operation while planning.
pub(super) fn fold(shared: &Shared, kind: &Kind, args: Vec<View>) -> Result<Vec<View>, String> {
    let mut context = Context {
        shared,
        live: None,
        states: Vec::new(),
        work: Workspace::default(),
        packed: None,
        masked: None,
    };
    let step = Step {
        kind: kind.clone(),
        args: Vec::new(),
        results: Vec::new(),
        shapes: Vec::new(),
        tokens: None,
        place: Place::default(),
    };
    execute(&mut context, &step, args)
}

fn execute(cx: &mut Context<'_>, step: &Step, args: Vec<View>) -> Result<Vec<View>, String> {
    let slot = |i: usize| step.args.get(i).map(|a| a.slot);
    let live = cx.live_rows(step);
    let mut args = args.into_iter();
    let mut next = || args.next().ok_or("an operand is missing");
    let pool = &cx.shared.pool;
    let one = match &step.kind {
        Kind::RmsNorm(axis, norm) => {
            fused::rms_norm(pool, &mut cx.work, next()?, *axis, norm, live)
        }
        Kind::Rope(axis, scale) => {
            let x = next()?;
            fused::rope(&mut cx.work, x, [next()?, next()?], *axis, *scale, live)
        }
        Kind::SiluMul => fused::silu_mul(pool, &mut cx.work, next()?, next()?, live),
        Kind::Attention(heads) => {
            let [q, k, v, mask] = [next()?, next()?, next()?, next()?];
            let rows = live.map_or(heads.width, |l| l.count);
            let key = slot(3).map(|s| (s, rows));
            if key.is_none() || cx.masked != key {
                fused::fill_mask(&mut cx.work.mask, &mask, heads, rows);
                cx.masked = key;
            }
            let row = heads.heads * heads.depth;
            let out = cx.work.take(heads.width * row, rows * row);
            let queries = q.clone();
            let y = fused::attention(pool, &cx.work.mask, heads, [queries, k, v], rows, out);
            cx.work.give(q);
            y
        }
        Kind::Binary(elementwise::Binary::Add, shape) => {
            fused::add(pool, &mut cx.work, next()?, next()?, shape, live)
        }
        Kind::Unary(op) => elementwise::unary(*op, next()?),
        Kind::Binary(op, shape) => elementwise::binary(*op, next()?, next()?, shape),
        Kind::Compare(op, shape) => logic::compare(*op, next()?, next()?, shape),
        Kind::Not => logic::not(next()?),
        Kind::Select(shape) => logic::select(next()?, next()?, next()?, shape),
        Kind::Cast(elem) => cast::cast(next()?, *elem),
        Kind::Reshape(shape) => next()?.reshaped(shape),
        Kind::Transpose(perm) => next()?.transposed(perm),
        Kind::Broadcast(shape) => next()?.broadcast(shape),
        Kind::Concat(axis) => layout::concat(&args.collect::<Vec<_>>(), *axis),
        Kind::Split(axis, sizes) => {
            let x = next()?;
            let mut at = 0;
            return Ok(sizes
                .iter()
                .map(|&n| {
                    at += n;
                    x.clone().sliced(*axis, at - n, n, 1)
                })
                .collect());
        }
        Kind::Slice(spans) => layout::slice(next()?, spans),
        Kind::SliceRuntime => {
            let x = next()?;
            let spans = runtime_spans(&x.shape, [next()?, next()?, next()?])?;
            layout::slice(x, &spans)
        }
        Kind::SliceUpdate(spans) => layout::slice_update(next()?, spans, next()?),
        Kind::SliceUpdateRuntime => {
            let x = next()?;
            let spans = runtime_spans(&x.shape, [next()?, next()?, next()?])?;
            let update = next()?;
            let shape: Vec<usize> = spans.iter().map(|s| s.len).collect();
            if shape != update.shape {
                return Err(format!(
                    "the slice has shape {shape:?}, the update {:?}",
                    update.shape
                ));
            }
            layout::slice_update(x, &spans, update)
        }
        Kind::Pad(pads, mode) => layout::pad(&next()?, pads, *mode, &next()?),
        Kind::Tile(reps) => layout::tile(next()?, reps),
        Kind::GatherNd(shape) => gather::gather_nd(next()?, next()?, shape)?,
        Kind::GatherAlongAxis(axis) => gather::gather_along_axis(next()?, next()?, *axis)?,
        Kind::Range(len) => gather::range(&next()?, &next()?, *len),
        Kind::Reduce(op, axes) => {
            let x = next()?;
            match (op, &axes[..]) {
                (rows::Reduce::Max, &[axis]) => {
                    fused::largest(pool, &x, axis, Largest::Value, live)
                }
                _ => None,
            }
            .unwrap_or_else(|| rows::reduce(*op, x, axes))
        }
        Kind::Softmax(axis) => rows::softmax(next()?, *axis),
        Kind::Argmax(axis) => {
            let x = next()?;
            fused::largest(pool, &x, *axis, Largest::Index, live)
                .unwrap_or_else(|| rows::argmax(x, *axis))
        }
        Kind::BatchMatmul(batch) => matmul::batch_matmul(pool, next()?, next()?, batch),
        Kind::Conv2d(conv, shape) => convolution::conv2d(pool, next()?, next()?, conv, shape),
        Kind::WeightMatmul {
            weights,
            channels_first,
            shape,
        } => weight_matmul(cx, weights, *channels_first, shape, next()?, slot(0))?,
        Kind::LutToDense(axis, shape) => quantized::lut_to_dense(next()?, next()?, *axis, shape),
        Kind::ShiftScale => quantized::shift_scale(next()?, next()?, next()?, next()?),
        Kind::Dequantize(axis) => quantized::dequantize(next()?, next()?, next()?, next()?, *axis),
        Kind::Rare(op) => rare::rare(op, args.collect())?,
        Kind::ReadHandle { state, take } => {
            let cell = &mut cx.states[*state];
            let value = if *take { cell.take() } else { cell.clone() };
            value.ok_or("the state was moved out")?
        }
        Kind::WriteHandle(state) => {
            cx.states[*state] = Some(next()?);
            return Ok(Vec::new());
        }
    };
    Ok(vec![one])
}

fn weight_matmul(
    cx: &mut Context<'_>,
    weights: &WeightsRef,
    channels_first: bool,
    shape: &[usize],
    x: View,
    slot: Option<u32>,
) -> Result<View, String> {
    let x = if channels_first {
        x.transposed(&[0, 2, 3, 1])
    } else {
        x
    };
    let channels = *x.shape.last().ok_or("the operand has rank 0")?;
    let tokens = x.len().checked_div(channels).unwrap_or(0);
    let key = slot.map(|s| (s, channels_first));
    if key.is_none() || cx.packed != key {
        let live = cx.live(tokens);
        let flat = x.reshaped(&[tokens, channels]);
        matmul::pack(&flat, live, &mut cx.work.activations);
        cx.packed = key;
        cx.work.give(flat);
    } else {
        cx.work.give(x);
    }
    let w = cx.shared.weights(weights)?;
    let rows = w.rows();
    let live = cx.work.activations.tokens().min(tokens) * rows;
    let out = cx.work.take(tokens * rows, live);
    let y = matmul::weight_matmul(&cx.shared.pool, &w, &cx.work.activations, tokens, out);
    Ok(if channels_first {
        let [n, _, h, w] = shape[..] else {
            return Err("the result is not of rank 4".into());
        };
        y.reshaped(&[n, h, w, rows]).transposed(&[0, 3, 1, 2])
    } else {
        y.reshaped(shape)
    })
}

impl Shared {
    fn weights<'a>(&'a self, w: &'a WeightsRef) -> Result<matmul::Weights<'a>, String> {
        let bytes = |b| self.bytes(b).ok_or("the weights are not in memory");
        Ok(match *w {
            WeightsRef::Lut {
                rows,
                cols,
                bits,
                group_rows,
                tables,
                indices,
            } => {
                let w = LutWeights::new(
                    rows,
                    cols,
                    bits,
                    group_rows,
                    bytes(tables)?,
                    bytes(indices)?,
                );
                matmul::Weights::Lut(w.map_err(|e| e.to_string())?)
            }
            WeightsRef::Dense { rows, cols, values } => {
                let values: &[f16] = bytemuck::try_cast_slice(bytes(values)?)
                    .map_err(|e| format!("the weights are misaligned: {e}"))?;
                let w = DenseWeights::new(rows, cols, DenseValues::F16(values));
                matmul::Weights::Dense(w.map_err(|e| e.to_string())?)
            }
            WeightsRef::Int8 {
                rows,
                cols,
                values,
                ref scales,
            } => {
                let values = bytemuck::cast_slice(bytes(values)?);
                let w = DenseWeights::new(rows, cols, DenseValues::I8 { values, scales });
                matmul::Weights::Dense(w.map_err(|e| e.to_string())?)
            }
        })
    }

    /// Whether the weights can be read where they are.
    pub(super) fn check_weights(&self, w: &WeightsRef) -> Result<(), String> {
        self.weights(w).map(|_| ())
    }
}

/// Spans from start, end and stride tensors.
fn runtime_spans(dims: &[usize], bounds: [View; 3]) -> Result<Vec<Span>, String> {
    let [start, end, step] = bounds.map(|v| v.into_data().ints().unwrap_or_default());
    if [&start, &end, &step].iter().any(|v| v.len() != dims.len()) {
        return Err(format!("slice bounds do not have the rank {}", dims.len()));
    }
    (0..dims.len())
        .map(|a| {
            Span::new(dims[a], start[a], end[a], step[a])
                .ok_or_else(|| format!("axis {a} has a stride of 0"))
        })
        .collect()
}
