//! Attention over the cache, with tokens on the width axis throughout.
//!
//! Per layer, for head `h` of key group `g` (`[..]` are shapes, `C` the context):
//!
//! ```text
//! q_h [1,1,d,w]   k_g [1,1,d,C]   v_g [1,1,d,C]          d = head width
//! s_h = transpose(k_g) q_h / sqrt(d)                     [1,1,C,w]
//! p   = softmax over channels of concat_h(s_h) + mask    [1,C,H,w]
//! o_h = v_g p_h                                          [1,1,d,w]
//! ```
//!
//! The scores have the keys on the channel axis, the form of Apple's own export
//! (a softmax over a spatial axis keeps the engine from splitting the work). Apple
//! gets there by transposing every head's queries, scores and values; with
//! `[d, w]` queries and `[d, C]` caches only the keys are transposed, once per
//! layer, and the outputs concatenate to `[1, H*d, 1, w]` as they are.

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::ValueId;

use super::Shape;

/// What the layers of one function share: rotary factors, mask, slots and caches.
pub(super) struct Context<'a> {
    shape: &'a Shape<'a>,
    cos: ValueId,
    sin: ValueId,
    mask: ValueId,
    step: ValueId,
    step_end: ValueId,
    keys: Cache,
    values: Cache,
}

/// A state, its current contents and the token that orders its next access.
struct Cache {
    handle: ValueId,
    current: ValueId,
    token: ValueId,
}

impl Cache {
    fn open(g: &mut GraphBuilder<'_>, handle: ValueId) -> Self {
        let token = g.token();
        let (current, token) = g.read_handle(handle, token);
        Self {
            handle,
            current,
            token,
        }
    }

    /// Writes `rows` (`[1,1,K,1,w]`) of a layer at `start..end` and reads back.
    fn update(&mut self, g: &mut GraphBuilder<'_>, start: ValueId, end: ValueId, rows: ValueId) {
        let new = g.slice_update(self.current, start, end, rows);
        let token = g.write_handle(self.handle, new, self.token);
        (self.current, self.token) = g.read_handle(self.handle, token);
    }

    /// The cache of one layer as `[1, K, 1, C]`.
    fn layer(&self, g: &mut GraphBuilder<'_>, layer: usize, channels: usize, c: usize) -> ValueId {
        let l = layer as i32;
        let (ch, c32) = (channels as i32, c as i32);
        let one = g.slice(self.current, &[l, 0, 0, 0, 0], &[l + 1, 1, ch, 1, c32]);
        g.reshape(one, &[1, channels, 1, c])
    }
}

impl<'a> Context<'a> {
    /// Reads the caches and prepares what all layers use.
    pub(super) fn open(g: &mut GraphBuilder<'_>, shape: &'a Shape<'a>) -> Self {
        let (cos, sin, step, mask) = (g.arg(1), g.arg(2), g.arg(3), g.arg(4));
        let (key_handle, value_handle) = (g.arg(5), g.arg(6));
        let width = g.i32s(&[shape.width as i32]);
        Self {
            shape,
            cos: g.transpose(cos, &[0, 1, 3, 2]),
            sin: g.transpose(sin, &[0, 1, 3, 2]),
            mask,
            step,
            step_end: g.binary("add", step, width),
            keys: Cache::open(g, key_handle),
            values: Cache::open(g, value_handle),
        }
    }

    /// The last tokens, in the order of the states.
    pub(super) fn close(self) -> [ValueId; 2] {
        [self.keys.token, self.values.token]
    }

    /// The function's shape.
    pub(super) fn shape(&self) -> &Shape<'a> {
        self.shape
    }

    /// Rotates `x` `[1, heads, d, w]` by each row's position: the half-split form,
    /// `x * cos + concat(-x2, x1) * sin`.
    pub(super) fn rotate(&self, g: &mut GraphBuilder<'_>, x: ValueId, heads: usize) -> ValueId {
        let (d, w) = (self.shape.spec.head_dim as i32, self.shape.width as i32);
        let h = heads as i32;
        let first = g.slice(x, &[0, 0, 0, 0], &[1, h, d / 2, w]);
        let second = g.slice(x, &[0, 0, d / 2, 0], &[1, h, d, w]);
        let minus_one = g.f16_scalar(-1.0);
        let negated = g.broadcasting("mul", second, minus_one);
        let turned = g.concat(2, &[negated, first]);
        let straight = g.broadcasting("mul", x, self.cos);
        let turned = g.broadcasting("mul", turned, self.sin);
        g.binary("add", straight, turned)
    }

    /// Attention of one layer: `q` `[1, H, d, w]` and `k` `[1, G, d, w]` rotated,
    /// `v` `[1, K, 1, w]`; writes `k` and `v` into the caches and returns
    /// `[1, H*d, 1, w]`.
    pub(super) fn attend(
        &mut self,
        g: &mut GraphBuilder<'_>,
        layer: usize,
        [q, k, v]: [ValueId; 3],
    ) -> ValueId {
        let spec = self.shape.spec;
        let (c, w) = (self.shape.context, self.shape.width);
        let (heads, groups, d) = (spec.heads, spec.kv_heads, spec.head_dim);
        let channels = groups * d;
        self.write(g, layer, k, v);
        let keys = self.keys.layer(g, layer, channels, c);
        let keys = g.reshape(keys, &[1, groups, d, c]);
        let keys = g.transpose(keys, &[0, 1, 3, 2]);
        let keys = g.split(keys, 1, &vec![1; groups]);
        let values = self.values.layer(g, layer, channels, c);
        let values = g.reshape(values, &[1, groups, d, c]);
        let values = g.split(values, 1, &vec![1; groups]);

        let scale = g.f16_scalar((d as f32).sqrt().recip());
        let q = g.broadcasting("mul", q, scale);
        let queries = g.split(q, 1, &vec![1; heads]);
        let scores: Vec<ValueId> = queries
            .iter()
            .enumerate()
            .map(|(h, &query)| {
                let s = g.batch_matmul(keys[h * groups / heads], query);
                g.reshape(s, &[1, c, 1, w])
            })
            .collect();
        let scores = g.concat(2, &scores);
        let scores = g.broadcasting("add", scores, self.mask);
        let weights = g.softmax(scores, 1);
        let weights = g.split(weights, 2, &vec![1; heads]);
        let outputs: Vec<ValueId> = weights
            .iter()
            .enumerate()
            .map(|(h, &p)| {
                let p = g.reshape(p, &[1, 1, c, w]);
                g.batch_matmul(values[h * groups / heads], p)
            })
            .collect();
        let merged = g.concat(1, &outputs);
        g.reshape(merged, &[1, heads * d, 1, w])
    }

    /// Puts this call's keys and values into slots `in_step..in_step + w`.
    fn write(&mut self, g: &mut GraphBuilder<'_>, layer: usize, k: ValueId, v: ValueId) {
        let spec = self.shape.spec;
        let (channels, w) = (spec.kv_heads * spec.head_dim, self.shape.width);
        let l = layer as i32;
        let front = g.i32s(&[l, 0, 0, 0]);
        let start = g.concat(0, &[front, self.step]);
        let back = g.i32s(&[l + 1, 1, channels as i32, 1]);
        let end = g.concat(0, &[back, self.step_end]);
        let k = g.reshape(k, &[1, 1, channels, 1, w]);
        let v = g.reshape(v, &[1, 1, channels, 1, w]);
        self.keys.update(g, start, end, k);
        self.values.update(g, start, end, v);
    }
}
