//! Elementwise operations, products and decompression.

use super::GraphBuilder;
use crate::aimodel::ir::{Attr, Elem, TensorType, Type, TypeId, ValueId, enum_code};

/// Strides, dilations and groups of [`GraphBuilder::conv2d`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2d {
    /// Steps along H and W.
    pub stride: [u32; 2],
    /// Distance between kernel taps along H and W.
    pub dilation: [u32; 2],
    /// Channel groups.
    pub groups: u32,
}

impl Default for Conv2d {
    fn default() -> Self {
        Self {
            stride: [1, 1],
            dilation: [1, 1],
            groups: 1,
        }
    }
}

impl GraphBuilder<'_> {
    /// `exp tanh sin cos abs round sqrt rsqrt log erf`, or `not` of bools.
    pub fn unary(&mut self, name: &str, x: ValueId) -> ValueId {
        self.infer(&format!("primitive.{name}_v1"), &[x])
    }

    /// `add sub mul divide maximum minimum pow modulo floor_divide`,
    /// `equal not_equal greater` (to bool), `logical_and logical_or logical_xor` of bools
    /// or `bitwise_and bitwise_or bitwise_xor` of integers; two tensors of one shape and
    /// type.
    pub fn binary(&mut self, name: &str, x: ValueId, y: ValueId) -> ValueId {
        self.infer(&format!("primitive.{name}_v1"), &[x, y])
    }

    /// Converts the elements; `x` itself if they are of that type already.
    pub fn cast(&mut self, x: ValueId, elem: Elem) -> ValueId {
        let from = self.tensor_type(x);
        if from.elem == elem {
            return x;
        }
        let result = TensorType {
            elem,
            ..from.clone()
        };
        self.typed("primitive.cast_v1", &[x], result)
    }

    /// `condition ? x : y`, all of one shape.
    pub fn r#where(&mut self, condition: ValueId, x: ValueId, y: ValueId) -> ValueId {
        self.infer("primitive.where_v1", &[condition, x, y])
    }

    /// `x / 2 * (1 + erf(x / sqrt 2))`, or its tanh approximation.
    pub fn gelu(&mut self, x: ValueId, tanh: bool) -> ValueId {
        let approximate = self.module.add_attr(Attr::Enum {
            code: enum_code::APPROXIMATE,
            value: u64::from(tanh),
        });
        let props = vec![("approximate", approximate)];
        self.infer_with("primitive.gelu_v1", &[x], props, vec![])[0]
    }

    /// `[*batch, M, K] x [*batch, K, N]`.
    pub fn batch_matmul(&mut self, x: ValueId, y: ValueId) -> ValueId {
        self.infer("primitive.batch_matmul_v1", &[x, y])
    }

    /// Pointwise convolution of `[N, C, H, W]` by `[O, C, 1, 1]`: a matrix product
    /// over channels.
    pub fn conv1x1(&mut self, x: ValueId, weight: ValueId) -> ValueId {
        self.conv2d(x, weight, Conv2d::default())
    }

    /// Convolution of `[N, C, H, W]` by `[O, C / groups, kh, kw]` without padding.
    pub fn conv2d(&mut self, x: ValueId, weight: ValueId, options: Conv2d) -> ValueId {
        let operands = [
            x,
            weight,
            self.u32s(&options.stride),
            self.u32s(&options.dilation),
            self.u32_scalar(options.groups),
        ];
        self.infer("primitive.conv2d_v1", &operands)
    }

    /// Replaces indices by the entries of their look-up table.
    ///
    /// Indices `ui{bits} [a0, .., ak]` and tables `[b0, .., bk, 2^bits, v]`, where
    /// `bi` divides `ai` and position `p` along axis `i` uses table `p / (ai / bi)`.
    /// Entries are vectors of `v` elements laid along `axis`.
    pub fn lut_to_dense(&mut self, indices: ValueId, table: ValueId, axis: i16) -> ValueId {
        let axis = self.si16_scalar(axis);
        self.infer("primitive.lut_to_dense_v1", &[indices, table, axis])
    }

    /// `scale * (data - offset1) + offset2`, parameters per block of `data`.
    pub fn blockwise_shift_scale(
        &mut self,
        data: ValueId,
        scale: ValueId,
        offset1: ValueId,
        offset2: ValueId,
    ) -> ValueId {
        let operands = [data, scale, offset1, offset2];
        self.infer("primitive.blockwise_shift_scale_v2", &operands)
    }

    pub(super) fn scalar_type(&mut self, elem: Elem) -> TypeId {
        self.module
            .add_type(Type::Tensor(TensorType::new(elem, &[])))
    }
}
