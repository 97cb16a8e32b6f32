use proptest::prelude::*;

use super::*;

fn ramp(groups: usize, bits: u8) -> Vec<u16> {
    (0..groups)
        .flat_map(|g| (0..1 << bits).map(move |k| (g * 1000 + k) as f32 / 64.0))
        .map(|v| f16::from_f32(v).to_bits())
        .collect()
}

#[test]
fn indices_are_a_bit_stream_with_the_least_significant_bit_first() {
    // Worked by hand from the layout of sub-byte resources.
    assert_eq!(pack(&[1, 0, 1, 1, 0, 0, 0, 1, 1], 1), [0b1000_1101, 1]);
    assert_eq!(pack(&[1, 2, 3, 0, 2], 2), [0b0011_1001, 0b10]);
    assert_eq!(
        pack(&[0b001, 0b010, 0b111, 0b100], 3),
        [0b1101_0001, 0b1001]
    );
    assert_eq!(pack(&[0x1, 0xf, 0x2], 4), [0xf1, 0x02]);
    assert_eq!(pack(&[0b11_1111, 0b00_0001], 6), [0b0111_1111, 0]);
    assert_eq!(pack(&[7, 255], 8), [7, 255]);
}

proptest! {
    #[test]
    fn unpacking_gives_back_what_was_packed(
        which in 0..BITS.len(), raw in prop::collection::vec(any::<u8>(), 0..99), skip in 0usize..9
    ) {
        let bits = BITS[which];
        let codes: Vec<u8> = raw.iter().map(|c| c & (u8::MAX >> (8 - bits))).collect();
        let packed = pack(&codes, bits);
        prop_assert_eq!(packed.len(), packed_len(codes.len(), bits));
        let skip = skip.min(codes.len());
        prop_assert_eq!(&unpack(&packed, bits, skip, codes.len() - skip), &codes[skip..]);
    }

    #[test]
    fn a_damaged_file_is_refused_and_never_panics(at in 0usize..200, byte: u8, cut in 0usize..200) {
        let shape = LutShape::new(5, 7, 3, 2).unwrap();
        let matrix = LutMatrix::from_codes(shape, ramp(3, 3), &[3; 35]).unwrap();
        let mut bytes = Vec::new();
        matrix.write_to(&mut bytes).unwrap();
        let at = at % bytes.len();
        bytes[at] = byte;
        // A changed index or table value can still be a matrix; a shape can not change.
        if let Ok(read) = LutMatrix::from_bytes(&bytes) {
            prop_assert_eq!(read.shape(), shape);
        }
        bytes.truncate(cut.min(bytes.len() - 1));
        prop_assert!(LutMatrix::from_bytes(&bytes).is_err());
    }
}

#[test]
fn every_width_and_a_short_last_group_survive_the_file() {
    for bits in BITS {
        let shape = LutShape::new(70, 9, bits, 32).unwrap();
        assert!(!shape.has_equal_groups());
        let codes: Vec<u8> = (0..630u32).map(|i| (i * 37 % (1 << bits)) as u8).collect();
        let matrix = LutMatrix::from_codes(shape, ramp(3, bits), &codes).unwrap();
        let mut bytes = Vec::new();
        matrix.write_to(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, shape.file_len());
        assert_eq!(shape.indices_offset() % 64, 0);
        let read = LutMatrix::from_bytes(&bytes).unwrap();
        assert_eq!(read, matrix);
        assert_eq!(read.codes(), codes);
        let dense = read.dequantize();
        for (i, &code) in codes.iter().enumerate() {
            let group = i / 9 / 32;
            let expected = f16::from_f32((group * 1000 + code as usize) as f32 / 64.0);
            assert_eq!(dense[i].to_bits(), expected.to_f32().to_bits());
        }
    }
}

#[test]
fn vectors_run_down_the_rows_and_survive_the_file() {
    let shape = LutShape::new(8, 3, 4, 4).unwrap().with_vector(2).unwrap();
    assert_eq!(
        (shape.index_rows(), shape.groups(), shape.values()),
        (4, 2, 32)
    );
    // Two bits per weight.
    assert_eq!(shape.indices_len() * 8, 2 * shape.rows * shape.cols);
    // Entry k of table g is the pair (100 g + k, -k).
    let pairs = (0..2).flat_map(|g| (0..16).flat_map(move |k| [100 * g + k, -k]));
    let tables: Vec<u16> = pairs.map(|v| f16::from_f32(v as f32).to_bits()).collect();
    let codes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
    let matrix = LutMatrix::from_codes(shape, tables.clone(), &codes).unwrap();
    let mut bytes = Vec::new();
    matrix.write_to(&mut bytes).unwrap();
    let read = LutMatrix::from_bytes(&bytes).unwrap();
    assert_eq!(read, matrix);
    assert_eq!(read.codes(), codes);
    #[rustfmt::skip]
    assert_eq!(read.dequantize(), [
        1.0, 2.0, 3.0,  -1.0, -2.0, -3.0,  4.0, 5.0, 6.0,  -4.0, -5.0, -6.0,
        107.0, 108.0, 109.0,  -7.0, -8.0, -9.0,  110.0, 111.0, 112.0,  -10.0, -11.0, -12.0,
    ]);

    // The first numbers may be equal, then the second ones decide.
    let mut descending = tables;
    descending[2..4].copy_from_slice(&[0, f16::NEG_ONE.to_bits()]);
    let error = LutMatrix::from_codes(shape, descending, &codes).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("entry 1 of table 0 is smaller"),
        "{error}"
    );
    for (rows, group, vector) in [(9, 4, 2), (8, 3, 2), (8, 4, 3), (8, 4, 0), (6, 4, 4)] {
        let shape = LutShape::new(rows, 3, 4, group).unwrap();
        let refused = shape.with_vector(vector).unwrap_err();
        assert!(matches!(refused, LutError::Vector { .. }));
    }
    bytes[56] = 3;
    assert!(LutMatrix::from_bytes(&bytes).is_err());
}

#[test]
fn wrong_parts_are_named() {
    let shape = LutShape::new(4, 4, 4, 2).unwrap();
    let error = |tables, codes: &[u8]| {
        LutMatrix::from_codes(shape, tables, codes)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        error(ramp(1, 4), &[0; 16]),
        "tables of a 4 x 4 matrix: expected 64 bytes, found 32"
    );
    assert_eq!(
        error(ramp(2, 4), &[16; 16]),
        "index 16 of weight 0 does not fit into 4 bits"
    );
    let mut descending = ramp(2, 4);
    descending.swap(17, 18);
    assert!(error(descending, &[0; 16]).starts_with("entry 2 of table 1 is smaller"));
    let mut infinite = ramp(2, 4);
    infinite[31] = f16::INFINITY.to_bits();
    assert!(error(infinite, &[0; 16]).starts_with("entry 15 of table 1 is inf"));
    assert!(matches!(
        LutShape::new(4, 4, 5, 2),
        Err(LutError::Bits { found: 5 })
    ));
    assert!(matches!(
        LutShape::new(usize::MAX, 4, 4, 2),
        Err(LutError::Shape { .. })
    ));
}
