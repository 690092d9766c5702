//! The wait for a vector's words (buffer.cuh), compiled as host C++: what it looks at, and that it ends with all of them.

use crate::emulated::{compiler, run_text};

/// The text of the wait, without what it calls.
fn wait() -> &'static str {
    let source = vm_device::SOURCES.iter().find(|source| source.name.ends_with("buffer.cuh"));
    let text = source.expect("buffer.cuh").text;
    let begin = text.find("#if AMK_UNPACK == 1 && AMK_FFN").expect("the looks of long vectors");
    let end = text.find("// Waits for one word.").expect("what is behind the wait");
    &text[begin..end]
}

fn says(compiler: &str, ffn: u32, spoil: Option<(&str, &str)>) -> String {
    let defines = [
        "-DAMK_UNPACK=1".to_owned(),
        format!("-DAMK_FFN={ffn}"),
        format!("-DLONG_VECTOR={}", u32::from(ffn > 10240)),
    ];
    run_text(compiler, "looks", (wait(), &defines), spoil, "")
}

#[test]
fn a_wait_ends_with_all_words_and_looks_at_one_group_of_many() {
    let Some(compiler) = compiler() else { return };
    for ffn in [8192, 14336] {
        assert_eq!(says(&compiler, ffn, None), "right\n", "a vector of {ffn}");
    }
    for (from, to) in [
        ("missing[i] && !(N > 4 && alone && asked)", "missing[i]"),
        ("missing[i] = was &&", "missing[i] ="),
        ("left += missing[i]", "left = missing[i]"),
        ("left > 4", "left > 3"),
        (" && !(alone && came)", ""),
        ("!(alone && came)", "!came"),
    ] {
        let spoiled = says(&compiler, 14336, Some((from, to)));
        assert_ne!(spoiled, "right\n", "nobody notices {to} for {from}");
    }
}
