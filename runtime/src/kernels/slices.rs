//! Conversion of slices between f16 and f32.

#![expect(unsafe_code, reason = "vector intrinsics on slices of checked length")]

use half::f16;

/// Widens `src` into `dst`; exact.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn widen(src: &[f16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the features were just detected.
            return unsafe { x86::widen_512(src, dst) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            // SAFETY: the features were just detected.
            return unsafe { x86::widen_256(src, dst) };
        }
    }
    widen_scalar(src, dst);
}

/// Rounds `src` into `dst`, to nearest even.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn narrow(src: &[f32], dst: &mut [f16]) {
    assert_eq!(src.len(), dst.len());
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the features were just detected.
            return unsafe { x86::narrow_512(src, dst) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            // SAFETY: the features were just detected.
            return unsafe { x86::narrow_256(src, dst) };
        }
    }
    narrow_scalar(src, dst);
}

fn widen_scalar(src: &[f16], dst: &mut [f32]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = s.to_f32();
    }
}

fn narrow_scalar(src: &[f32], dst: &mut [f16]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = f16::from_f32(*s);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_storeu_ps, _mm256_storeu_si256, _mm512_cvtph_ps,
        _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_storeu_ps,
    };

    use half::f16;

    const NEAREST: i32 = 0;

    /// # Safety
    /// The processor has AVX-512F; the slices have equal lengths.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn widen_512(src: &[f16], dst: &mut [f32]) {
        let body = src.len() / 16 * 16;
        for i in (0..body).step_by(16) {
            // SAFETY: i + 16 <= len of both slices; unaligned accesses.
            unsafe {
                let h = _mm256_loadu_si256(src.as_ptr().add(i).cast());
                _mm512_storeu_ps(dst.as_mut_ptr().add(i), _mm512_cvtph_ps(h));
            }
        }
        super::widen_scalar(&src[body..], &mut dst[body..]);
    }

    /// # Safety
    /// The processor has AVX-512F; the slices have equal lengths.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn narrow_512(src: &[f32], dst: &mut [f16]) {
        let body = src.len() / 16 * 16;
        for i in (0..body).step_by(16) {
            // SAFETY: i + 16 <= len of both slices; unaligned accesses.
            unsafe {
                let h = _mm512_cvtps_ph::<NEAREST>(_mm512_loadu_ps(src.as_ptr().add(i)));
                _mm256_storeu_si256(dst.as_mut_ptr().add(i).cast(), h);
            }
        }
        super::narrow_scalar(&src[body..], &mut dst[body..]);
    }

    /// # Safety
    /// The processor has AVX2 and F16C; the slices have equal lengths.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn widen_256(src: &[f16], dst: &mut [f32]) {
        let body = src.len() / 8 * 8;
        for i in (0..body).step_by(8) {
            // SAFETY: i + 8 <= len of both slices; unaligned accesses.
            unsafe {
                let h = _mm_loadu_si128(src.as_ptr().add(i).cast());
                _mm256_storeu_ps(dst.as_mut_ptr().add(i), _mm256_cvtph_ps(h));
            }
        }
        super::widen_scalar(&src[body..], &mut dst[body..]);
    }

    /// # Safety
    /// The processor has AVX2 and F16C; the slices have equal lengths.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn narrow_256(src: &[f32], dst: &mut [f16]) {
        let body = src.len() / 8 * 8;
        for i in (0..body).step_by(8) {
            // SAFETY: i + 8 <= len of both slices; unaligned accesses.
            unsafe {
                let h = _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(src.as_ptr().add(i)));
                _mm_storeu_si128(dst.as_mut_ptr().add(i).cast(), h);
            }
        }
        super::narrow_scalar(&src[body..], &mut dst[body..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_and_narrows_as_the_scalar_code_does() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for skip in [0, 1, 7] {
            let src = &all[skip..];
            let (mut fast, mut slow) = (vec![0.0; src.len()], vec![0.0; src.len()]);
            widen(src, &mut fast);
            widen_scalar(src, &mut slow);
            for (f, s) in fast.iter().zip(&slow) {
                assert!(f.to_bits() == s.to_bits() || f.is_nan() && s.is_nan());
            }
            let between: Vec<f32> = slow.iter().map(|x| x * 1.000_488_3).collect();
            let (mut fast, mut slow) = (vec![f16::ZERO; src.len()], vec![f16::ZERO; src.len()]);
            narrow(&between, &mut fast);
            narrow_scalar(&between, &mut slow);
            for (f, s) in fast.iter().zip(&slow) {
                assert!(f.to_bits() == s.to_bits() || f.is_nan() && s.is_nan());
            }
        }
    }
}
