//! Runs a fuzz body under libFuzzer. `AMK_FUZZ_TARGET` names it.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tests::fuzz::guard::Guarded;
use tests::fuzz::memory::Counting;
use tests::fuzz::{TARGETS, Target, execute, target};

#[global_allocator]
static ALLOCATOR: Guarded<Counting> = Guarded(Counting);

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    // libfuzzer-sys ends the process at any panic. The tokenizer's reader catches some; those that reach libFuzzer still count.
    drop(std::panic::take_hook());
    std::panic::set_hook(Box::new(|info| {
        if std::env::var_os("AMK_FUZZ_PANICS").is_some() {
            eprintln!("{info}");
        }
    }));
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    let name = std::env::var("AMK_FUZZ_TARGET").unwrap_or_default();
    let Some(target) = target(&name) else {
        eprintln!("AMK_FUZZ_TARGET must be one of {}", names.join(", "));
        std::process::exit(2);
    };
    target
});

fuzz_target!(|input: &[u8]| execute(&TARGET, input));
