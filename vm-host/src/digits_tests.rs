//! Integer products of 4-bit codes (digits.cuh), compiled as host C++, against the packer and the decoder of stored rows.

use ir::Format;

use crate::batch_products_tests::Multiplier;
use crate::emulated::compiler;

const FORMATS: [Format; 2] = [Format::Int4G128, Format::Int4G128Zero];

const MULTIPLIER: Multiplier = Multiplier {
    program: "digits",
    sources: &["amk_abi.h", "prelude.cuh", "unpack.cuh", "digits.cuh"],
    bits: 16,
};

#[test]
fn codes_times_digits_are_the_products_of_their_values() {
    let Some(compiler) = compiler() else { return };
    for formats in [&FORMATS[..1], &FORMATS[1..], &FORMATS] {
        if let Some(what) = MULTIPLIER.wrong(&compiler, formats, 1, None) {
            panic!("{formats:?}: {what}");
        }
    }
}

#[test]
fn mutations_of_digits_are_noticed() {
    let Some(compiler) = compiler() else { return };
    for (from, to) in [
        ("second ? back : front;", "second ? front : back;"),
        ("second ? 0x3715 : 0x7351", "0x7351"),
        ("second ? 0x2604 : 0x6240", "0x6240"),
        ("DIGIT_SCALE_BITS = 267u", "DIGIT_SCALE_BITS = 269u"),
        ("MORE = WHOLE + 128.f", "MORE = WHOLE"),
        ("lane / 8 * 4", "lane / 8 % 2 * 4"),
        ("upper_bytes(first << 4), upper", "upper_bytes(first), upper"),
        ("w.thread & 1 ? 1.f : 0.f", "0.f"),
        ("(13 << 23)", "(12 << 23)"),
        (
            "scaled_excess<UNPACK>(mine, plain, 0) - 8.f * plain",
            "scaled_excess<UNPACK>(mine, plain, 0)",
        ),
        ("fmaf(c[0], 256.f, c[1])", "c[0] * 256.f"),
        ("magnitudes_max(v.z, v.w)", "v.z"),
    ] {
        let wrong = MULTIPLIER.wrong(&compiler, &FORMATS, 1, Some((from, to)));
        assert!(wrong.is_some(), "nobody notices {to} for {from}");
    }
}
