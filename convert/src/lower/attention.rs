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
//!
//! Above a context of 4096 that form's `[1, C, H, w]` scores get too tall, and one
//! softmax per key group over the last axis takes its place; `R = H / G` heads share
//! a group's keys:
//!
//! ```text
//! q_g [1,1,R*w,d]   k_g [1,1,d,C]   v_g [1,1,C,d]
//! s_g = q_g k_g / sqrt(d) + mask    [1,R,w,C]
//! o_g = softmax over C of s_g, v_g  [1,1,R*w,d]
//! ```
//!
//! Here the values are transposed once per layer, and queries and outputs, which are
//! small, once each.

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{AttrId, Elem, ValueId};

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

/// What the host gives a function besides hidden states.
#[derive(Clone, Copy)]
pub(super) struct Host {
    /// Rotary factors `[1, 1, w, d]`.
    pub(super) cos: ValueId,
    pub(super) sin: ValueId,
    /// Slot of row 0, `si32[1]`.
    pub(super) step: ValueId,
    /// Mask `[1, C, 1, w]`.
    pub(super) mask: ValueId,
    /// States of keys and values.
    pub(super) caches: [ValueId; 2],
}

/// A state, its current contents and the token that orders its next access.
struct Cache {
    handle: ValueId,
    current: ValueId,
    token: ValueId,
    constraints: Option<AttrId>,
}

impl Cache {
    fn open(g: &mut GraphBuilder<'_>, handle: ValueId, constraints: Option<AttrId>) -> Self {
        let token = g.token();
        let mut cache = Self {
            handle,
            current: handle,
            token,
            constraints,
        };
        cache.read(g);
        cache
    }

    fn read(&mut self, g: &mut GraphBuilder<'_>) {
        (self.current, self.token) = g.read_handle(self.handle, self.token);
        if self.constraints.is_some() {
            self.current = g.copy_discarding_constraints(self.current);
        }
    }

    /// Writes `rows` (`[1,1,K,1,w]`) of a layer at `start..end` and reads back.
    fn update(&mut self, g: &mut GraphBuilder<'_>, start: ValueId, end: ValueId, rows: ValueId) {
        let mut new = g.slice_update(self.current, start, end, rows);
        if let Some(constraints) = self.constraints {
            new = g.copy_with_constraints(new, constraints);
        }
        self.token = g.write_handle(self.handle, new, self.token);
        self.read(g);
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
    pub(super) fn open(g: &mut GraphBuilder<'_>, shape: &'a Shape<'a>, host: Host) -> Self {
        let Host {
            cos,
            sin,
            step,
            mask,
            caches: [key_handle, value_handle],
        } = host;
        let width = g.i32s(&[shape.width as i32]);
        let row = shape.forms.attention.is_row(shape.context);
        let constraints = shape.cache_constraints;
        Self {
            shape,
            cos: g.transpose(cos, &[0, 1, 3, 2]),
            sin: g.transpose(sin, &[0, 1, 3, 2]),
            mask: if row {
                g.transpose(mask, &[0, 2, 3, 1])
            } else {
                mask
            },
            step,
            step_end: g.binary("add", step, width),
            keys: Cache::open(g, key_handle, constraints),
            values: Cache::open(g, value_handle, constraints),
        }
    }

    /// The last tokens, in the order of the states.
    pub(super) fn close(self) -> [ValueId; 2] {
        [self.keys.token, self.values.token]
    }

    /// The first element of the keys plus that of the values, of rank 0: what a function
    /// returns that is called for its caches alone.
    pub(super) fn probe(&self, g: &mut GraphBuilder<'_>) -> ValueId {
        let [key, value] = [&self.keys, &self.values].map(|cache| {
            let one = g.slice(cache.current, &[0; 5], &[1; 5]);
            g.reshape(one, &[])
        });
        g.binary("add", key, value)
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
        let minus_one = scalar(g, x, -1.0);
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
        let (groups, d, c) = (spec.kv_heads, spec.head_dim, self.shape.context);
        self.write(g, layer, k, v);
        let scale = scalar(g, q, (d as f32).sqrt().recip());
        let q = g.broadcasting("mul", q, scale);
        let [keys, values] = [&self.keys, &self.values].map(|cache| {
            let one = cache.layer(g, layer, groups * d, c);
            g.reshape(one, &[1, groups, d, c])
        });
        if self.shape.forms.attention.is_row(c) {
            self.by_rows(g, q, keys, values)
        } else {
            self.by_channels(g, q, keys, values)
        }
    }

    /// One product per head, one softmax over the channel axis.
    fn by_channels(
        &self,
        g: &mut GraphBuilder<'_>,
        q: ValueId,
        keys: ValueId,
        values: ValueId,
    ) -> ValueId {
        let spec = self.shape.spec;
        let (c, w) = (self.shape.context, self.shape.width);
        let (heads, groups, d) = (spec.heads, spec.kv_heads, spec.head_dim);
        let keys = g.transpose(keys, &[0, 1, 3, 2]);
        let keys = g.split(keys, 1, &vec![1; groups]);
        let values = g.split(values, 1, &vec![1; groups]);
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

    /// One product and one softmax over the last axis per key group.
    fn by_rows(
        &self,
        g: &mut GraphBuilder<'_>,
        q: ValueId,
        keys: ValueId,
        values: ValueId,
    ) -> ValueId {
        let spec = self.shape.spec;
        let (c, w) = (self.shape.context, self.shape.width);
        let (heads, groups, d) = (spec.heads, spec.kv_heads, spec.head_dim);
        let shared = heads / groups;
        let each = vec![1; groups];
        let q = g.transpose(q, &[0, 1, 3, 2]);
        let q = g.reshape(q, &[1, groups, shared * w, d]);
        let queries = g.split(q, 1, &each);
        let keys = g.split(keys, 1, &each);
        let values = g.transpose(values, &[0, 1, 3, 2]);
        let values = g.split(values, 1, &each);
        let outputs: Vec<ValueId> = (0..groups)
            .map(|group| {
                let scores = g.batch_matmul(queries[group], keys[group]);
                let scores = g.reshape(scores, &[1, shared, w, c]);
                let scores = g.broadcasting("add", scores, self.mask);
                let weights = g.softmax(scores, 3);
                let weights = g.reshape(weights, &[1, 1, shared * w, c]);
                g.batch_matmul(weights, values[group])
            })
            .collect();
        let merged = g.concat(1, &outputs);
        let merged = g.reshape(merged, &[1, heads, w, d]);
        let merged = g.transpose(merged, &[0, 1, 3, 2]);
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

/// A constant of the element type of `like`.
fn scalar(g: &mut GraphBuilder<'_>, like: ValueId, value: f32) -> ValueId {
    match g.elem(like) {
        Elem::F16 => g.f16_scalar(value),
        elem => g.full(elem, &[], f64::from(value)),
    }
}
