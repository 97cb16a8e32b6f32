//! MLIR's prefix varint.
//!
//! The number of trailing zero bits of the first byte says how many bytes follow:
//! `k` bytes in all hold `7 k` bits of the value, shifted left past a marker bit
//! and `k - 1` zeros, little-endian. A first byte of zero is followed by eight raw
//! bytes. Signed numbers are zig-zag folded first. So `5` is `0b`, `128` is
//! `02 02` and `-1` is `03`.

/// Appends `n`, in as few bytes as hold it.
pub(crate) fn put(out: &mut Vec<u8>, n: u64) {
    for len in 1..=8 {
        if n >> (7 * len) == 0 {
            let word = ((n << 1) | 1) << (len - 1);
            out.extend_from_slice(&word.to_le_bytes()[..len]);
            return;
        }
    }
    out.push(0);
    out.extend_from_slice(&n.to_le_bytes());
}

/// Appends a signed number.
pub(crate) fn put_signed(out: &mut Vec<u8>, n: i64) {
    put(out, ((n << 1) ^ (n >> 63)) as u64);
}

/// Appends a number below 2^63 with a flag in its lowest bit.
pub(crate) fn put_flagged(out: &mut Vec<u8>, n: u64, flag: bool) {
    put(out, (n << 1) | u64::from(flag));
}

/// Bytes a varint takes, told from its first byte.
pub(crate) fn len_of(first: u8) -> usize {
    first.trailing_zeros() as usize + 1
}

/// The number in `bytes`, which are exactly as long as [`len_of`] says.
pub(crate) fn get(bytes: &[u8]) -> u64 {
    let mut raw = [0u8; 8];
    if bytes[0] == 0 {
        raw.copy_from_slice(&bytes[1..]);
        return u64::from_le_bytes(raw);
    }
    raw[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(raw) >> bytes.len()
}

/// Undoes the zig-zag folding.
pub(crate) fn unfold(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(n: u64) -> Vec<u8> {
        let mut out = vec![];
        put(&mut out, n);
        out
    }

    fn signed(n: i64) -> Vec<u8> {
        let mut out = vec![];
        put_signed(&mut out, n);
        out
    }

    #[test]
    fn matches_bytes_apple_wrote() {
        assert_eq!(bytes(0), [0x01]);
        assert_eq!(bytes(1), [0x03]);
        assert_eq!(bytes(5), [0x0b]);
        assert_eq!(bytes(127), [0xff]);
        assert_eq!(bytes(128), [0x02, 0x02]);
        assert_eq!(bytes(512), [0x02, 0x08]);
        assert_eq!(bytes(4096), [0x02, 0x40]);
        assert_eq!(bytes(16384), [0x04, 0x00, 0x02]);
        assert_eq!(bytes(1 << 63), [0, 0, 0, 0, 0, 0, 0, 0, 0x80]);
        assert_eq!(signed(1), [0x05]);
        assert_eq!(signed(-1), [0x03]);
        assert_eq!(signed(4), [0x11]);
        assert_eq!(signed(64), [0x02, 0x02]);
        // The dynamic extent.
        assert_eq!(signed(i64::MIN), [&[0u8][..], &[0xff; 8]].concat());
    }

    proptest! {
        #[test]
        fn reads_back_what_it_wrote(n: u64, shift in 0u32..64, s: i64) {
            for n in [n, n >> shift, 1 << shift, (1 << shift) - 1] {
                let b = bytes(n);
                prop_assert_eq!(len_of(b[0]), b.len());
                prop_assert_eq!(get(&b), n);
            }
            prop_assert_eq!(unfold(get(&signed(s))), s);
        }
    }
}
