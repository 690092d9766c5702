//! Integer products of codes (digits.cuh), compiled as host C++, against the packer and the decoder of stored rows.

use ir::Format;

use crate::batch_products_tests::Multiplier;
use crate::emulated::compiler;

/// The formats that are multiplied so.
fn formats() -> Vec<Format> {
    Format::ALL.iter().copied().filter(|format| format.has_digits()).collect()
}

const MULTIPLIER: Multiplier = Multiplier {
    program: "digits",
    sources: &["amk_abi.h", "prelude.cuh", "unpack.cuh", "digits.cuh"],
    bits: 16,
};

#[test]
fn codes_times_digits_are_the_products_of_their_values() {
    let Some(compiler) = compiler() else { return };
    let all = formats();
    let files = [Format::Int4K, Format::Int8K];
    for formats in all.chunks(1).chain([&files[..], &all]) {
        if let Some(what) = MULTIPLIER.wrong(&compiler, formats, 1, None) {
            panic!("{formats:?}: {what}");
        }
    }
}

#[test]
fn mutations_of_digits_are_noticed() {
    let Some(compiler) = compiler() else { return };
    let all = formats();
    for (from, to) in [
        ("form.bytes || !second ? front[n] : back[n]", "front[n]"),
        ("second ? 0x3715 : 0x7351", "0x7351"),
        ("second ? 0x2604 : 0x6240", "0x6240"),
        ("form.bytes ? 0x7531", "form.bytes ? 0x7513"),
        ("DIGIT_SCALE_BITS = 267u", "DIGIT_SCALE_BITS = 269u"),
        ("MORE = WHOLE + 128.f", "MORE = WHOLE"),
        ("form.bytes ? lane / 8 % 2 : lane / 8,", "lane / 8 % 2,"),
        ("upper_bytes<SIGNED>(first << 4), ", "upper_bytes<SIGNED>(first), "),
        ("make_uint4(v.x, v.z, v.y, v.w)", "v"),
        ("unpack != AMK_UNPACK_INT4_K; }", "true; }"),
        ("w.thread & 1 ? 1.f : 0.f", "0.f"),
        ("(13 << 23)", "(12 << 23)"),
        ("has_zeros(UNPACK) ? 8.f * scale : 0.f", "0.f"),
        ("fmaf(c[0], 256.f, c[1])", "c[0] * 256.f"),
        ("upper ? second : first", "second"),
        ("upper == 0 ? own : make_uint2(0, 0)", "own"),
        ("APART && upper != t / 2", "false"),
        ("lane % 16 / 4 : lane / 8", "0 : lane / 8"),
        ("return form.bytes ? sum : sum + other", "return sum"),
        ("t % 2 * 2 + t / 2", "t"),
        ("digit_groups(unpack) < 4 ? 2 : 4", "2"),
        ("(w.thread & digit_threads(UNPACK) - 1) < GROUPS", "true"),
        ("e + n * turn < end", "true"),
        ("has_factors(unpack) ? 32 : 16", "has_factors(unpack) ? 64 : 16"),
    ] {
        let wrong = MULTIPLIER.wrong(&compiler, &all, 1, Some((from, to)));
        assert!(wrong.is_some(), "nobody notices {to} for {from}");
    }
}
