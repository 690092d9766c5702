//! A machine with too little memory: refusals with numbers and exit code 3, never an abort.

use std::process::{Command, Stdio};

use super::{Ran, amk, folder, ran};

/// `amk` with at most this many KiB of address space.
fn within(kib: u32, args: &[&str]) -> Ran {
    let home = folder();
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {kib}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_amk")]).args(args);
    command.current_dir(home.path()).env("AMK_DATA", home.path()).env("RAYON_NUM_THREADS", "1");
    ran(command.stdin(Stdio::null()).output().unwrap())
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_memory_is_taken() {
    let of = |command: &str| format!("{command} --model llama-3.1-8b --device");
    for (command, device) in [("generate --tokens 1,2", "eval"), ("evaluate", "cpu")] {
        let line = of(command);
        let args: Vec<&str> = line.split(' ').chain([device]).collect();
        let words =
            ["llama-3.1-8b needs 15.", "GiB weights", "ulimit -v", "are free", "smaller model"];
        within(4 << 20, &args).fails(3, &words);
    }
    for (model, bytes) in [("qwen3-32b", "61."), ("llama-3.1-70b", "131.")] {
        let words = [&format!("{model} needs {bytes}"), "GiB weights", "ulimit -v", "are free"];
        let args = ["generate", "--tokens", "1,2", "--device", "eval", "--model", model];
        within(4 << 20, &args).fails(3, &words.map(|word| word as &str));
    }
    let small = ["generate", "--model", "toy", "--tokens", "1,2", "--device", "eval"];
    within(4 << 20, &small).succeeds("amk.generate.v1");
}

#[test]
fn an_allocation_that_fails_is_no_abort() {
    // Nothing is checked before a saved program runs, and the preset's first matrix does not fit. Of smaller ones many do, and
    // then what glibc wants for a thread can be what is refused, where it aborts.
    let home = folder();
    let path = home.path().join("p.amkp").display().to_string();
    let model = ["--model", "llama-3.2-1b"];
    amk(&[&["lower", "--device", "cpu", "-o", &path][..], &model].concat())
        .succeeds("amk.lower.v2");
    let args = [&["interpret", &path, "--tokens", "1"][..], &model].concat();
    within(256 << 10, &args).fails(3, &["out of memory", "bytes more were refused", "amk doctor"]);
}

#[test]
fn doctor_says_what_a_model_needs() {
    let document = amk(&["doctor", "--model", "llama-3.1-8b", "--kv-capacity", "4096"]);
    let document = document.succeeds("amk.doctor.v1");
    let found = |name: &str| {
        let mut checks = document["checks"].as_array().unwrap().iter();
        let check = checks.find(|check| check["name"] == name).expect(name);
        check["found"].as_str().unwrap().to_owned()
    };
    // 1 GiB: 4096 tokens, 32 layers of 8 heads of 128, keys and values in f32.
    assert!(
        found("host").contains("1.0 GiB of keys and values for 4096 tokens"),
        "{}",
        found("host")
    );
    assert!(found("device").contains("16.1 GiB on a GPU"), "{}", found("device"));
    amk(&["doctor", "--model", "org/model"])
        .fails(2, &["not in the cache", "hf download org/model"]);
    assert_eq!(amk(&["doctor", "--kv-capacity", "1"]).code, 2);
}
