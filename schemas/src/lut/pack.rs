//! Streams of numbers of a few bits each.

/// Bytes that `count` indices of `bits` bits take.
pub fn packed_len(count: usize, bits: u8) -> usize {
    (count * bits as usize).div_ceil(8)
}

/// Packs indices, each below 2^`bits`, into the bit stream of a Core AI resource.
pub fn pack(codes: &[u8], bits: u8) -> Vec<u8> {
    match bits {
        8 => codes.to_vec(),
        4 => codes
            .chunks(2)
            .map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4))
            .collect(),
        _ => {
            let mut out = vec![0; packed_len(codes.len(), bits)];
            for (i, &code) in codes.iter().enumerate() {
                let at = i * bits as usize;
                let straddling = u16::from(code) << (at % 8);
                out[at / 8] |= straddling as u8;
                if at % 8 + bits as usize > 8 {
                    out[at / 8 + 1] |= (straddling >> 8) as u8;
                }
            }
            out
        }
    }
}

/// The `count` indices from `start` on of a bit stream made by [`pack`].
///
/// # Panics
/// If the stream ends before that.
pub fn unpack(packed: &[u8], bits: u8, start: usize, count: usize) -> Vec<u8> {
    let mask = u16::MAX >> (16 - bits);
    (start..start + count)
        .map(|i| {
            let at = i * bits as usize;
            let low = u16::from(packed[at / 8]);
            let high = if at % 8 + bits as usize > 8 {
                u16::from(packed[at / 8 + 1])
            } else {
                0
            };
            ((low | high << 8) >> (at % 8) & mask) as u8
        })
        .collect()
}
