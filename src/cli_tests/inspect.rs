//! `amk inspect kernel`: the compiled kernel on a machine without a GPU, with and without nvdisasm.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::folder;
use super::schemas::fields;

/// Prints an instruction of an op as nvdisasm does, if it was given a file that is there.
const NVDISASM: &str = r#"#!/bin/sh
[ "$1 $2" = "-c -gi" ] && [ -s "$3" ] || exit 7
printf '.text.amk_megakernel:\n\t//## File "/x/cuda/worker.cuh", line 3\n        /*0000*/   STL [R1], R2 ;\n'
"#;

fn inspect(path: &Path, more: &[&str]) -> (i32, Value) {
    let place = ["inspect", "kernel", "--model", "toy", "--device", "cpu", "--json"];
    let ran = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(place)
        .args(more)
        .env("PATH", path)
        .current_dir(path)
        .output()
        .unwrap();
    (ran.status.code().unwrap(), serde_json::from_slice(&ran.stdout).unwrap())
}

/// The folder of this machine's NVRTC, or nothing where it has none and needs none.
fn nvrtc() -> Option<&'static Path> {
    let folder = vm_host::nvrtc_file().ok().and_then(Path::parent).filter(|path| path.is_dir());
    let required = std::env::var_os("AMK_REQUIRE_NVRTC").is_some_and(|v| v == "1");
    assert!(folder.is_some() || !required, "no folder of NVRTC: set AMK_NVRTC");
    if folder.is_none() {
        println!("skipped: no folder of NVRTC");
    }
    folder
}

#[test]
fn the_nvrtc_that_is_named_is_the_one_that_compiles() {
    let Some(named) = nvrtc() else { return };
    let other = folder();
    // A library of that name in the loader's path, as a CUDA toolkit has it. This one has none of the calls.
    let mut entries = std::fs::read_dir(named).unwrap().map(|entry| entry.unwrap().path());
    let builtins = entries.find(|path| path.to_string_lossy().contains("libnvrtc-builtins.so."));
    std::os::unix::fs::symlink(builtins.unwrap(), other.path().join("libnvrtc.so")).unwrap();
    let run = |arguments: &str, nvrtc: &Path| {
        let mut amk = Command::new(env!("CARGO_BIN_EXE_amk"));
        amk.args(arguments.split(' ')).env("LD_LIBRARY_PATH", other.path());
        amk.env("AMK_NVRTC", nvrtc).env("AMK_CACHE", other.path()).output().unwrap()
    };
    let inspect = "inspect kernel --model toy --device cpu --json";
    let ran = run(inspect, named);
    assert!(ran.status.success(), "{ran:?}");
    let doctor = run("doctor --json", named);
    let file = named.join("libnvrtc.so.13").display().to_string();
    assert!(String::from_utf8_lossy(&doctor.stdout).contains(&file), "{doctor:?}");
    let ran = run(inspect, other.path());
    let looked = format!("looked in {})", other.path().display());
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.code() == Some(3) && said.contains(&looked), "no other folder: {ran:?}");
}

#[test]
fn a_kernel_is_inspected_without_a_gpu() {
    let folder = folder();
    if nvrtc().is_none() {
        return;
    }
    let (code, without) = inspect(folder.path(), &["--sass", "k.sass"]);
    let why = without["message"].as_str().unwrap_or_default();
    let has_own = code == 0; // in /usr/local/cuda or beside NVRTC
    assert!(has_own || (code == 3 && why.contains("nvidia-cuda-nvdisasm")), "{code} {without}");
    let tool = folder.path().join("nvdisasm");
    std::fs::write(&tool, NVDISASM).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    let files = ["--sass", "k.sass", "--ptx", "k.ptx", "--cubin", "k.cubin"];
    let (code, document) = inspect(folder.path(), &files);
    assert_eq!((code, &document["schema"]), (0, &"amk.inspect_kernel.v1".into()), "{document}");
    let kernels = document["kernels"].as_array().unwrap();
    let kernel = kernels.iter().find(|kernel| kernel["kernel"] == "amk_megakernel").unwrap();
    assert_eq!((&kernel["registers"], &kernel["spills"]), (&168.into(), &0.into()), "{kernel}");
    assert_eq!(document["ops"][0]["local"], 1, "{document}");
    assert_eq!(document["ops"][0]["lines"][0]["source"], "cuda/worker.cuh:3");
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    assert!(String::from_utf8_lossy(&read("k.ptx")).contains(".entry amk_megakernel"));
    assert!(read("k.cubin").starts_with(b"\x7fELF"));
    assert!(read("k.sass").starts_with(b".text.amk_megakernel:"));
    let mut found = fields::Fields::new();
    fields::fields_of(&document, "", &mut found);
    fields::settle([("amk.inspect_kernel.v1".to_owned(), found)].into());
    // One that fails is a reason, and the rest of the answer is there.
    std::fs::write(&tool, "#!/bin/sh\necho broken >&2\nexit 1\n").unwrap();
    let (code, document) = inspect(folder.path(), &[]);
    assert_eq!((code, &document["ops"]), (0, &Value::Null));
    assert!(document["not_disassembled"].as_str().unwrap().contains("broken"), "{document}");
}
