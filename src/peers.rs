//! Other engines on this machine, to be measured side by side. What is absent is named, never left out in silence.

use serde::Serialize;

/// One engine.
#[derive(Debug, Serialize)]
pub(crate) struct Peer {
    /// Its name.
    pub(crate) name: &'static str,
    /// Median microseconds a token, if it was measured.
    pub(crate) us_per_token: Option<f64>,
    /// Whether it was found here.
    pub(crate) present: bool,
    /// Why there is no number, and what would give one.
    pub(crate) note: String,
}

/// Looks for the peers. They are only looked for, not run: measuring them needs the GPU.
pub(crate) fn look() -> Vec<Peer> {
    let torch = runs("python3", &["-c", "import torch, transformers"]);
    let llama = runs("llama-bench", &["--help"]);
    let note = |present: bool, remedy: &str| {
        if present {
            "found; not measured by this version".to_owned()
        } else {
            format!("absent: {remedy}")
        }
    };
    vec![
        Peer {
            name: "pytorch",
            us_per_token: None,
            present: torch,
            note: note(torch, "python3 cannot import torch and transformers"),
        },
        Peer {
            name: "llama.cpp",
            us_per_token: None,
            present: llama,
            note: note(llama, "llama-bench is not on the PATH"),
        },
    ]
}

fn runs(program: &str, args: &[&str]) -> bool {
    let quiet = std::process::Stdio::null;
    std::process::Command::new(program)
        .args(args)
        .stdin(quiet())
        .stdout(quiet())
        .stderr(quiet())
        .status()
        .is_ok_and(|status| status.success())
}
