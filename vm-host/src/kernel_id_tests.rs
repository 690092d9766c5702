use super::*;

const HEADER: &str = "#line 1 \"header.h\"\n#pragma once\n#define AMK_ABI_HASH 0x12ull\n#define USED 3u\n#define SPARE 4u\n\
    struct alignas(16) amk_spare {\nuint32_t token[8];\n};\nstatic_assert(sizeof(amk_spare) == 32, \"layout of amk_spare\");\n";

fn options(given: &[&str]) -> Vec<String> {
    given.iter().map(|name| format!("-D{name}")).collect()
}

/// The id of a body after the header, for one sequence.
fn id(body: &str) -> String {
    id_with(HEADER, body, &["SEQS=1", "FEATURES=32"])
}

fn id_with(header: &str, body: &str, given: &[&str]) -> String {
    kernel_id(&format!("{header}#line 1 \"body.cuh\"\n{body}"), &options(given))
}

#[test]
fn a_comment_is_no_code() {
    let bare = "int a = 1;\nasm(\"// kept \\\" // kept\");\nb = c / d;\n";
    let commented =
        "// A.\n\n  int a/* b\n c */= 1; // d \"e\nasm(\"// kept \\\" // kept\");\n\tb = c / d;";
    assert_eq!(without_comments(bare), bare);
    assert_eq!(without_comments(commented), bare);
    assert_ne!(without_comments("a / b"), without_comments("a b"));
    assert_eq!(without_comments("\"never closed"), "\"never closed\n");
    assert_eq!(id(bare), id(commented));
}

#[test]
fn in_which_file_a_line_stands_is_no_code() {
    let split = "int a = 1;\n#line 1 \"other.cuh\"\n#pragma once\nint b = a;\n";
    assert_eq!(id("int a = 1;\nint b = a;\n"), id(split));
    assert_ne!(id("int a = 1;\n#pragma unroll\nint b = a;\n"), id(split));
}

#[test]
fn only_the_branch_that_is_compiled_counts() {
    let body = "#if SEQS > 1\nbatch();\n#else\nalone();\n#endif\n";
    assert_eq!(id(body), id(&body.replace("batch", "other")));
    assert_ne!(id(body), id(&body.replace("alone", "other")));
    let pair = |body: &str| id_with(HEADER, body, &["SEQS=2", "FEATURES=32"]);
    assert_ne!(pair(body), pair(&body.replace("batch", "other")));
    assert_eq!(pair(body), pair(&body.replace("alone", "other")));
    // Branches within branches, and every other way to write one.
    let cases = [
        ("#if SEQS > 1\n#if 1\nX\n#endif\n#endif\n", false),
        ("#if SEQS == 1\n#if SEQS > 1\nX\n#else\nY\n#endif\n#endif\n", false),
        ("#if SEQS > 1\n#elif FEATURES >> 5 & 1\nX\n#else\nY\n#endif\n", true),
        ("#if 1\n#elif 1\nX\n#endif\n", false),
        ("#ifdef SEQS\nX\n#endif\n", true),
        ("#ifndef SEQS\nX\n#endif\n", false),
        ("#ifdef __CUDACC_RTC__\nX\n#endif\n", true),
        ("#if FEATURES >> 4 & 1\nX\n#endif\n", false),
        ("#if FEATURES >> 5 & 1 && SEQS == 1\nX\n#endif\n", true),
        ("#if UNKNOWN\nX\n#endif\n", false),
        ("#if SEQS != 1 || defined(FEATURES)\nX\n#endif\n", true),
        ("#define OWN (SEQS == 1 || (FEATURES >> 4 & 1))\n#if OWN\nX\n#endif\n", true),
    ];
    for (body, counts) in cases {
        assert_eq!(id(body) != id(&body.replace('X', "Z")), counts, "{body}");
    }
}

#[test]
fn what_is_not_understood_is_kept_whole() {
    for body in [
        "#if SEQS + 1 > 3\nX\n#endif\n",
        "#if !SEQS\nX\n#endif\n",
        "#if LOOP\nX\n#endif\n#define LOOP LOOP\n#if LOOP\nX\n#endif\n",
        "#if 0\nX\n",
        "#if 0\nX\n#endif\n#endif\n",
        "#if\nX\n#endif\n",
    ] {
        assert_ne!(id(body), id(&body.replace('X', "Z")), "{body}");
    }
}

#[test]
fn declarations_that_nothing_names_do_not_count() {
    let body = "int a = USED;\n";
    let edited = |from: &str, to: &str, body: &str| {
        let given = ["SEQS=1", "FEATURES=32"];
        id_with(HEADER, body, &given) != id_with(&HEADER.replace(from, to), body, &given)
    };
    assert!(edited("3u", "5u", body));
    assert!(!edited("4u", "5u", body));
    assert!(!edited("token[8]", "token[9]", body));
    assert!(!edited("0x12ull", "0x13ull", "probe = AMK_ABI_HASH;\n"));
    assert!(edited("token[8]", "token[9]", "amk_spare s;\n"));
    // A structure that is used brings what it names.
    let spare = HEADER.replace("token[8]", "token[SPARE]");
    let with = |header: &str| id_with(header, "amk_spare s;\n", &["SEQS=1"]);
    assert_ne!(with(&spare), with(&spare.replace("4u", "5u")));
}

#[test]
fn every_kernel_is_understood() {
    for row in vm_device::ARCHITECTURES {
        let resident: Vec<_> = row.sources.iter().collect();
        for (unit, seqs, batches) in
            [(&resident, 1, false), (&resident, 8, true), (&row.prefill_unit().collect(), 1, false)]
        {
            let given = options(&[
                &format!("AMK_SEQS={seqs}"),
                "AMK_DTYPE=2",
                "AMK_FEATURES=0",
                "AMK_UNPACK=1",
            ]);
            let texts = unit.iter().map(|s| format!("#line 1 \"{}\"\n{}\n", s.name, s.text));
            let bare = without_comments(&texts.collect::<String>());
            let kept = named(&reached(&bare, &given).expect("every condition is understood"));
            // A kernel for one sequence has nothing of batches.
            assert_eq!(kept.contains("amk_seqs"), batches);
            assert!(kept.len() < bare.len());
        }
    }
}
