//! Vectors of `f32` as wide as the CPU supports, and code that is compiled once for each width.
//!
//! Every operation here is exact or rounds once, so the width affects the speed and never the result: each caller fixes
//! the order of the operations on one element.

/// The widths that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// Only instructions that every CPU of the architecture has.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Width {
    /// All widths that this CPU supports, narrowest first.
    pub(crate) fn all() -> impl DoubleEndedIterator<Item = Self> {
        let portable = [Self::Portable].into_iter();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2 && is_x86_feature_detected!("avx512f");
            portable.chain(avx2.then_some(Self::Avx2)).chain(avx512.then_some(Self::Avx512))
        }
        #[cfg(not(target_arch = "x86_64"))]
        portable
    }

    pub(crate) fn best() -> Self {
        Self::all().next_back().unwrap_or(Self::Portable)
    }
}

/// A register of `f32`.
pub(crate) trait Vector: Copy {
    /// Elements.
    const LEN: usize;
    /// Registers that a kernel may use as sums at once, in groups of four.
    const GROUPS: usize;

    fn splat(value: f32) -> Self;

    /// Reads `LEN` values.
    ///
    /// # Safety
    /// `from` must be valid for reading `LEN` values; alignment of an `f32` is enough.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes `LEN` values.
    ///
    /// # Safety
    /// `to` must be valid for writing `LEN` values; alignment of an `f32` is enough.
    unsafe fn store(self, to: *mut f32);

    /// `self * factor + sum`, rounded once.
    fn mul_add(self, factor: Self, sum: Self) -> Self;
}

impl Vector for [f32; 8] {
    const LEN: usize = 8;
    const GROUPS: usize = 1;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        [value; 8]
    }

    // SAFETY: the trait states the caller's obligation.
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for eight values; an array has the alignment of its elements.
        unsafe { from.cast::<Self>().read() }
    }

    // SAFETY: the trait states the caller's obligation.
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for eight values; an array has the alignment of its elements.
        unsafe { to.cast::<Self>().write(self) }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, sum: Self) -> Self {
        std::array::from_fn(|i| self[i].mul_add(factor[i], sum[i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_storeu_ps,
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_storeu_ps,
    };

    use super::{Kernel, Vector};

    macro_rules! vector {
        ($register:ty, $len:literal, $groups:literal, $splat:ident, $load:ident, $store:ident, $fma:ident) => {
            // Values of the register type exist only inside `avx2` and `avx512` below, which are
            // compiled for its instructions and run where `Width::all` found them.
            impl Vector for $register {
                const LEN: usize = $len;
                const GROUPS: usize = $groups;

                #[inline(always)]
                fn splat(value: f32) -> Self {
                    // SAFETY: the instructions are there, see above the impl.
                    unsafe { $splat(value) }
                }

                // SAFETY: the trait states the caller's obligation.
                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    // SAFETY: the caller vouches for the values; for the instructions see above.
                    unsafe { $load(from) }
                }

                // SAFETY: the trait states the caller's obligation.
                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    // SAFETY: the caller vouches for the place; for the instructions see above.
                    unsafe { $store(to, self) }
                }

                #[inline(always)]
                fn mul_add(self, factor: Self, sum: Self) -> Self {
                    // SAFETY: the instructions are there, see above the impl.
                    unsafe { $fma(self, factor, sum) }
                }
            }
        };
    }

    // Of 16 registers, 12 are sums; of 32, 24.
    vector!(__m256, 8, 3, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps);
    vector!(__m512, 16, 6, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps);

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<__m256>()
    }

    #[target_feature(enable = "avx512f,avx2,fma")]
    pub(super) fn avx512<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<__m512>()
    }
}

/// Work that is compiled for each width. `run` and everything hot below it must be `#[inline(always)]`, and no
/// registers may pass through closures: only inlined code is compiled for the width's instructions.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// Does the work with registers of type `V`.
    fn run<V: Vector>(self) -> Self::Output;
}

/// Runs a kernel with one of the widths of [`Width::all`].
pub(crate) fn dispatch<K: Kernel>(width: Width, kernel: K) -> K::Output {
    match width {
        Width::Portable => kernel.run::<[f32; 8]>(),
        // SAFETY: `Width::all` returns only widths that this CPU supports.
        #[cfg(target_arch = "x86_64")]
        Width::Avx2 => unsafe { x86::avx2(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Width::Avx512 => unsafe { x86::avx512(kernel) },
    }
}
