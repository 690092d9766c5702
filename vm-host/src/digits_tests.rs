//! Integer products of 4-bit codes (digits.cuh), compiled as host C++, against the packer and the decoder of stored rows.

use ir::Format;

use crate::batch_products_tests::Multiplier;
use crate::emulated::compiler;

const FORMATS: [Format; 2] = [Format::Int4G128, Format::Int4G128Zero];

/// Products with three digits of an element, or with two where the longest vector has `ffn` elements.
fn multiplier(ffn: u32, bits: i32) -> Multiplier {
    let sources = &["amk_abi.h", "prelude.cuh", "unpack.cuh", "digits.cuh"];
    Multiplier { program: "digits", sources, defines: vec![format!("-DAMK_FFN={ffn}")], bits }
}

#[test]
fn codes_times_digits_are_the_products_of_their_values() {
    let Some(compiler) = compiler() else { return };
    for (ffn, bits) in [(abi::TWO_HALVES_MAX, 20), (abi::TWO_HALVES_MAX + 1, 12)] {
        let multiplier = multiplier(ffn, bits);
        for formats in [&FORMATS[..1], &FORMATS[1..], &FORMATS] {
            if let Some(what) = multiplier.wrong(&compiler, formats, 1, None) {
                panic!("{ffn}, {formats:?}: {what}");
            }
        }
    }
}

#[test]
fn mutations_of_digits_are_noticed() {
    let Some(compiler) = compiler() else { return };
    for (from, to) in [
        ("second ? v.x : v.z", "second ? v.z : v.x"),
        ("make_float4(x, v.z, y, v.w)", "make_float4(v.z, x, v.w, y)"),
        ("254 + WHOLE_MOST - 1 - exponent", "254 + WHOLE_MOST + 1 - exponent"),
        ("lane / 8 * 4", "lane / 8 % 2 * 4"),
        ("column >> 1 & 1", "column & 1"),
        ("first << 4), upper", "first), upper"),
        ("float const high = w.thread & 1 ? 1.f : 0.f", "float const high = 0.f"),
        ("exponent - (WHOLE_MOST - 1)", "exponent - WHOLE_MOST"),
        ("0x808080u - (WHOLE_BITS", "0x808000u - (WHOLE_BITS"),
        ("scaled_excess<UNPACK>(mine, plain) - 8.f * plain", "scaled_excess<UNPACK>(mine, plain)"),
        ("third ? 0.f : c[1] * SECOND", "third ? 0.f : c[1] * LAST"),
    ] {
        let wrong = multiplier(1024, 20).wrong(&compiler, &FORMATS, 1, Some((from, to)));
        assert!(wrong.is_some(), "nobody notices {to} for {from}");
    }
}
