//! Every constant of the wire format: section numbers, type and attribute codes,
//! the properties of each operation, the feature version each one came with.

use super::ir::{Backing, Elem, enum_code};

/// First bytes of a file.
pub(crate) const MAGIC: [u8; 4] = *b"ML\xefR";
/// MLIR bytecode version.
pub(crate) const BYTECODE_VERSION: u64 = 6;
/// Version of the dialect's attribute and type encodings.
pub(crate) const ENCODING_VERSION: u64 = 2;
/// What Apple's writer calls itself.
pub(crate) const PRODUCER: &str = "MLIR22.0.0git";
/// The one dialect.
pub(crate) const DIALECT: &str = "aicode";
/// Alignment of the resource section and of every blob. Apple's loader reads the
/// file into a buffer that is 16-byte aligned and refuses anything wider.
pub(crate) const BLOB_ALIGNMENT: u64 = 16;
/// Filler before aligned data.
pub(crate) const PADDING: u8 = 0xcb;

/// Section numbers; [`section::ALIGNED`] is or-ed in where an alignment follows.
pub(crate) mod section {
    pub(crate) const STRING: u8 = 0;
    pub(crate) const DIALECT: u8 = 1;
    pub(crate) const ATTR_TYPE: u8 = 2;
    pub(crate) const ATTR_TYPE_OFFSET: u8 = 3;
    pub(crate) const IR: u8 = 4;
    pub(crate) const RESOURCE: u8 = 5;
    pub(crate) const RESOURCE_OFFSET: u8 = 6;
    pub(crate) const DIALECT_VERSION: u8 = 7;
    pub(crate) const PROPERTIES: u8 = 8;
    /// How many kinds there are.
    pub(crate) const KINDS: usize = 9;
    pub(crate) const ALIGNED: u8 = 0x80;

    pub(crate) fn name(id: u8) -> &'static str {
        match id {
            STRING => "string",
            DIALECT => "dialect",
            ATTR_TYPE => "attribute and type",
            ATTR_TYPE_OFFSET => "attribute and type offset",
            IR => "IR",
            RESOURCE => "resource",
            RESOURCE_OFFSET => "resource offset",
            DIALECT_VERSION => "dialect version",
            PROPERTIES => "properties",
            _ => "unknown",
        }
    }
}

/// Bits of the byte that says which parts of an operation follow.
pub(crate) mod op_mask {
    pub(crate) const ATTR_DICTIONARY: u8 = 0x01;
    pub(crate) const RESULTS: u8 = 0x02;
    pub(crate) const OPERANDS: u8 = 0x04;
    pub(crate) const SUCCESSORS: u8 = 0x08;
    pub(crate) const REGIONS: u8 = 0x10;
    pub(crate) const USE_LIST_ORDER: u8 = 0x20;
    pub(crate) const PROPERTIES: u8 = 0x40;
}

/// Codes of the types that are not bare elements ([`ELEMS`]).
pub(crate) mod type_code {
    pub(crate) const TENSOR: u64 = 2;
    pub(crate) const TENSOR_ENCODED: u64 = 3;
    pub(crate) const FUNCTION: u64 = 30;
    pub(crate) const HANDLE: u64 = 31;
    pub(crate) const TOKEN: u64 = 32;
    pub(crate) const PARAM_SYMBOL: u64 = 33;
    pub(crate) const PARAM_TYPE: u64 = 34;
    pub(crate) const UNRESOLVED: u64 = 41;
}

/// Codes of the element types.
pub(crate) const ELEMS: [(u64, Elem); 31] = [
    (4, Elem::Bool),
    (5, Elem::F64),
    (6, Elem::F32),
    (7, Elem::F16),
    (8, Elem::Bf16),
    (9, Elem::F8E5M2),
    (10, Elem::F8E4M3),
    (11, Elem::ComplexF64),
    (12, Elem::ComplexF32),
    (13, Elem::ComplexF16),
    (14, Elem::ComplexBf16),
    (15, Elem::ComplexF8E5M2),
    (16, Elem::ComplexF8E4M3),
    (17, Elem::Si64),
    (18, Elem::Si32),
    (19, Elem::Si16),
    (20, Elem::Si8),
    (21, Elem::Si4),
    (22, Elem::Si2),
    (23, Elem::Ui64),
    (24, Elem::Ui32),
    (25, Elem::Ui16),
    (26, Elem::Ui8),
    (27, Elem::Ui4),
    (28, Elem::Ui2),
    (29, Elem::Ui1),
    (36, Elem::Ui6),
    (37, Elem::Ui3),
    (38, Elem::Tf32),
    (46, Elem::F4E2M1),
    (47, Elem::F8E8M0),
];

/// Codes of the attributes that are not enumerations ([`ENUMS`]).
pub(crate) mod attr_code {
    pub(crate) const STRING: u64 = 1;
    pub(crate) const INTEGER: u64 = 2;
    pub(crate) const FLOAT: u64 = 3;
    pub(crate) const TYPE: u64 = 4;
    pub(crate) const ARRAY: u64 = 5;
    pub(crate) const DENSE: u64 = 6;
    pub(crate) const RESOURCE: u64 = 7;
    pub(crate) const OPAQUE: u64 = 9;
    pub(crate) const PARAM_DECL: u64 = 10;
    pub(crate) const HW_CONSTRAINTS: u64 = 12;
    pub(crate) const SYMBOL_REF: u64 = 14;
    pub(crate) const PARAM_CONSTANT: u64 = 16;
    pub(crate) const FILE: u64 = 30;
    pub(crate) const SOURCE_LOCATION: u64 = 31;
    pub(crate) const COMPILE_UNIT: u64 = 32;
    pub(crate) const METADATA_DATA: u64 = 33;
    pub(crate) const METADATA: u64 = 35;
    pub(crate) const SUBPROGRAM: u64 = 36;
    pub(crate) const LOCATION: u64 = 40;
    pub(crate) const DICTIONARY: u64 = 45;
    pub(crate) const UNIT: u64 = 46;
    pub(crate) const OPAQUE_LOCATION: u64 = 47;
}

/// Attributes that are one varint: code, name, cases.
pub(crate) const ENUMS: [(u32, &str, &[&str]); 7] = [
    (
        enum_code::PADDING_MODE,
        "padding_mode",
        &["circular", "constant", "reflect", "replicate", "symmetric"],
    ),
    (enum_code::APPROXIMATE, "approximate", &["none", "tanh"]),
    (
        enum_code::SCATTER_MODE,
        "scatter_mode",
        &["update", "add", "sub", "mul", "div", "max", "min"],
    ),
    (
        enum_code::SCAN_COMBINER,
        "scan_combiner",
        &["sum", "product", "min", "max"],
    ),
    (enum_code::FOURCC, "fourcc", &[]),
    (
        enum_code::COMPILATION,
        "compilation",
        &["full", "partial", "finalized"],
    ),
    (
        enum_code::INTERPOLATION_MODE,
        "interpolation_mode",
        &["linear", "nearest"],
    ),
];

/// Codes of the memory kinds of a hardware constraint.
pub(crate) const BACKINGS: [(u64, Backing, &str); 3] = [
    (1, Backing::IoSurface, "IOSurface"),
    (2, Backing::MtlBuffer, "MTLBuffer"),
    (3, Backing::Heap, "Heap"),
];

/// Operations with a structural meaning.
pub(crate) mod op {
    pub(crate) const ASSET: &str = "serialization.asset";
    pub(crate) const GRAPH: &str = "dataflow.graph_v1";
    pub(crate) const OUTPUT: &str = "dataflow.output_v1";
    pub(crate) const YIELD: &str = "dataflow.yield_v1";
    pub(crate) const INVOKE: &str = "dataflow.invoke_v1";
    pub(crate) const CREATE_TOKEN: &str = "dataflow.create_token_v1";
    pub(crate) const READ_HANDLE: &str = "dataflow.read_handle_v1";
    pub(crate) const WRITE_HANDLE: &str = "dataflow.write_handle_v1";
    pub(crate) const CONSTANT: &str = "primitive.constant_v1";
    pub(crate) const COPY_WITH_CONSTRAINTS: &str = "ax.copy_with_constraints_v1";
}

/// One attribute of an operation.
pub(crate) struct Prop {
    pub(crate) name: &'static str,
    pub(crate) optional: bool,
}

const fn required(name: &'static str) -> Prop {
    Prop {
        name,
        optional: false,
    }
}

const fn optional(name: &'static str) -> Prop {
    Prop {
        name,
        optional: true,
    }
}

/// The attributes of an operation in wire order, which is alphabetical; `None`
/// for one that has none, or is not known.
pub(crate) fn props(op: &str) -> Option<&'static [Prop]> {
    Some(match op {
        op::ASSET => const { &[optional("source"), optional("version")] },
        op::GRAPH => {
            const {
                &[
                    required("argAttrs"),
                    optional("compositeDecl"),
                    required("externalize"),
                    required("functionType"),
                    required("isPrivate"),
                    required("name"),
                    required("noInline"),
                    required("paramDecls"),
                    required("resAttrs"),
                ]
            }
        }
        op::INVOKE => {
            const {
                &[
                    required("arg_attrs"),
                    required("callee"),
                    required("res_attrs"),
                ]
            }
        }
        op::CONSTANT => const { &[required("value")] },
        "primitive.gelu_v1" => const { &[required("approximate")] },
        "primitive.pad_v1" => const { &[required("padding_mode")] },
        "primitive.scatter_along_axis_v1" => const { &[required("scatter_mode")] },
        "primitive.scan_v1" => const { &[required("combiner")] },
        _ => return None,
    })
}

/// First feature version, which every program has at least.
pub(crate) const OLDEST_FEATURES: u32 = 20_250_707;
/// Last feature version of OS 27.0.
pub(crate) const NEWEST_FEATURES: u32 = 20_260_409;

/// The feature version that introduced an operation, `None` if not known.
pub(crate) fn feature_version(op: &str) -> Option<u32> {
    let base = op.strip_prefix("primitive.").unwrap_or(op);
    Some(match base {
        op::ASSET | op::GRAPH | op::OUTPUT | op::YIELD | "constant_v1" | "add_v1" | "range_v1" => {
            OLDEST_FEATURES
        }
        "sub_v1" | "mul_v1" | "divide_v1" | "sqrt_v1" => 20_250_717,
        "cast_v1" | "gather_nd_v1" | "batch_matmul_v1" => 20_250_723,
        "transpose_v1" => 20_250_811,
        "abs_v1" => 20_250_814,
        "exp_v1" => 20_250_819,
        "broadcast_in_dims_v1" | "broadcast_to_v1" => 20_250_826,
        "broadcasting_add_v1"
        | "broadcasting_sub_v1"
        | "broadcasting_mul_v1"
        | "broadcasting_divide_v1" => 20_250_827,
        "concat_v1" => 20_250_903,
        "split_v1" => 20_250_904,
        "conv2d_v1" => 20_250_905,
        op::COPY_WITH_CONSTRAINTS | "ax.copy_discarding_constraints_v1" => 20_250_906,
        op::INVOKE => 20_250_909,
        "slice_v1" | "slice_update_v1" | op::CREATE_TOKEN | op::READ_HANDLE | op::WRITE_HANDLE => {
            20_250_922
        }
        "equal_v1" | "broadcasting_equal_v1" | "not_v1" => 20_250_923,
        "pad_v1" => 20_250_924,
        "reduce_sum_v1" | "reduce_v1" => 20_250_926,
        "maximum_v1" | "minimum_v1" | "pow_v1" | "modulo_v1" | "floor_divide_v1" | "rsqrt_v1"
        | "tanh_v1" | "erf_v1" | "log_v1" | "sin_v1" | "cos_v1" | "bitwise_and_v1"
        | "bitwise_or_v1" | "bitwise_xor_v1" => 20_250_928,
        "broadcasting_maximum_v1" | "broadcasting_minimum_v1" | "broadcasting_pow_v1" => 20_250_930,
        "round_v1" => 20_251_001,
        "lut_to_dense_v1" | "not_equal_v1" => 20_251_003,
        "greater_v1" | "logical_and_v1" | "logical_or_v1" | "logical_xor_v1" => 20_251_013,
        "where_v1" | "reduce_max_v1" | "reduce_min_v1" => 20_251_023,
        "broadcasting_where_v1" | "gelu_v1" => 20_251_024,
        "scatter_nd_v1" => 20_251_027,
        "gather_along_axis_v1" | "argmax_v1" | "reduce_index_v1" => 20_251_028,
        "scatter_along_axis_v1" => 20_251_030,
        "reverse_v1" | "sort_v1" | "argsort_v1" => 20_251_101,
        "broadcasting_greater_v1" => 20_251_105,
        "broadcasting_batch_matmul_v1" => 20_251_202,
        "broadcasting_not_equal_v1" => 20_260_112,
        "blockwise_shift_scale_v2" => 20_260_202,
        "reshape_v2" | "sigmoid_v1" | "silu_v1" | "relu_v1" | "softmax_v1" | "quantize_v2"
        | "dequantize_v2" => 20_260_204,
        "tile_v2" => 20_260_219,
        "reduce_mean_v1" | "reduce_product_v1" | "get_shape_v2" | "broadcast_shapes_v1" => {
            20_260_317
        }
        _ => return None,
    })
}
