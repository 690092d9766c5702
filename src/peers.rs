//! Other engines on this machine, measured for comparison: each a child process with a time limit, on the same shapes,
//! element type and context, and never while the device holds our kernel. An absent engine is listed with its reason.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use ir::program::Dims;
use ir::{Activation, Graph};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::child_process;
use crate::cli::PeerChoice;
use crate::device::Check;

/// The step in PyTorch, passed to the interpreter as text, so that there is nothing to install.
const TORCH_STEP: &str = include_str!("peers/torch_step.py");

/// Timed blocks of a peer, and the fewest that make a median.
const BLOCKS: usize = 9;
const BLOCKS_MIN: usize = 5;

/// Untimed blocks before them.
const WARMUP: usize = 2;

/// The most characters of a peer's own message that are passed on.
const WORDS_MAX: usize = 300;

pub(crate) struct Ask<'a> {
    pub(crate) graph: &'a Graph,
    /// Tokens before the measured ones.
    pub(crate) context: u32,
    pub(crate) tokens: u32,
    /// GPUs that run a step together.
    pub(crate) gpus: u32,
    /// The time limit of each peer, its start included.
    pub(crate) timeout: Duration,
    /// The model for llama.cpp.
    pub(crate) gguf: Option<PathBuf>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) version: Option<String>,
    /// Median over blocks, in µs per token.
    pub(crate) us_per_token: Option<f64>,
    pub(crate) blocks_us: Vec<f64>,
    /// Fastest and slowest block.
    pub(crate) interval: Option<[f64; 2]>,
    pub(crate) conditions: Vec<String>,
    /// Why there is no number, and the remedy.
    pub(crate) absent: Option<String>,
}

/// The result of a peer that ran.
struct Measured {
    version: String,
    blocks: Vec<f64>,
    conditions: Vec<String>,
}

/// The answer of the step in PyTorch.
#[derive(Deserialize)]
struct Torch {
    absent: Option<String>,
    version: Option<String>,
    us_per_token: Option<Vec<f64>>,
    #[serde(default)]
    conditions: Vec<String>,
}

/// Detects the peers without measuring them.
pub(crate) fn look() -> [Check; 2] {
    let python = python();
    let found = |name, program: &OsStr, args: &[&str], missing: String| match runs(program, args) {
        true => Check::new(name, true, "found"),
        false => Check::new(name, false, missing)
            .or("only needed for side-by-side `amk bench`")
            .optional(),
    };
    let torch = format!("{} cannot import torch", python.display());
    let llama = "llama-bench is not on the PATH".to_owned();
    [
        found("pytorch", &python, &["-c", "import torch"], torch),
        found("llama.cpp", "llama-bench".as_ref(), &["--help"], llama),
    ]
}

fn runs(program: &OsStr, args: &[&str]) -> bool {
    let quiet = Stdio::null;
    let mut command = Command::new(program);
    command.args(args).stdin(quiet()).stdout(quiet()).stderr(quiet());
    command.status().is_ok_and(|status| status.success())
}

/// The interpreter that has PyTorch.
fn python() -> OsString {
    std::env::var_os("AMK_PYTHON").unwrap_or_else(|| "python3".into())
}

/// Measures the chosen peers, one after the other; the others are listed.
pub(crate) fn measure(chosen: &[PeerChoice], ask: &Ask<'_>, say: impl Fn(&str)) -> Vec<Peer> {
    let all = [PeerChoice::TorchGraph, PeerChoice::TorchCompile, PeerChoice::LlamaCpp];
    let one = |peer: PeerChoice| {
        if !chosen.contains(&peer) && !chosen.contains(&PeerChoice::All) {
            return absent(peer, format!("not asked for; --peers {peer} measures it"));
        }
        say(&format!("measuring {peer}, at most {} s", ask.timeout.as_secs()));
        let measured = match peer {
            PeerChoice::LlamaCpp => llama_bench(ask),
            PeerChoice::TorchGraph | PeerChoice::TorchCompile => torch(peer, ask),
            PeerChoice::All | PeerChoice::None => Err("it is no engine".to_owned()),
        };
        match measured {
            Ok(measured) => present(peer, measured),
            Err(reason) => absent(peer, reason),
        }
    };
    all.map(one).into()
}

fn absent(peer: PeerChoice, reason: String) -> Peer {
    Peer { name: peer.into(), absent: Some(reason), ..Peer::default() }
}

fn present(peer: PeerChoice, measured: Measured) -> Peer {
    let Measured { version, blocks, conditions } = measured;
    let sound = |us: &f64| us.is_finite() && *us > 0.0;
    if blocks.len() < BLOCKS_MIN || !blocks.iter().all(sound) {
        return absent(peer, format!("it answered {blocks:?}, not {BLOCKS_MIN} times or more"));
    }
    let low = blocks.iter().copied().fold(f64::INFINITY, f64::min);
    let high = blocks.iter().copied().fold(0.0, f64::max);
    Peer {
        name: peer.into(),
        version: Some(version),
        us_per_token: Some(search::median(&blocks)),
        interval: Some([low, high]),
        conditions: [vec![format!("{} blocks", blocks.len())], conditions].concat(),
        blocks_us: blocks,
        ..Peer::default()
    }
}

fn torch(peer: PeerChoice, ask: &Ask<'_>) -> Result<Measured, String> {
    let graph = ask.graph;
    let plain = |layer: &ir::Layer| {
        layer.attention.norm.is_some()
            && layer.mlp.norm.is_some()
            && layer.attention.post_norm.or(layer.mlp.post_norm).is_none()
            && layer.attention.body.rotary == 0
            && !graph.norms_all_heads(layer)
    };
    let scalars = graph.score_cap.or(graph.logit_cap).is_some() || graph.embed_scale != 1.0;
    let table = graph.inv_freq.len() != graph.head_dim as usize / 2;
    if scalars || table || graph.activation != Activation::Silu || !graph.layers.iter().all(plain) {
        return Err(format!("its step is that of a llama; {} has other blocks", graph.name));
    }
    let python = python();
    let mut command = Command::new(&python);
    command.args(["-c", TORCH_STEP]);
    let input = shapes(peer, ask).to_string();
    let missing = format!("{} is not there; AMK_PYTHON names another", python.display());
    let answer = run(command, &input, ask.timeout, &missing)?;
    let line = answer.lines().rev().find(|line| line.starts_with('{')).unwrap_or_default();
    let garbage = || format!("its answer is not the expected JSON: {}", shortened(&answer));
    let said: Torch = serde_json::from_str(line).map_err(|_| garbage())?;
    if let Some(reason) = &said.absent {
        return Err(shortened(reason));
    }
    Ok(Measured {
        version: shortened(&said.version.ok_or_else(garbage)?),
        blocks: said.us_per_token.ok_or_else(garbage)?,
        conditions: said.conditions.iter().map(|words| shortened(words)).collect(),
    })
}

fn shapes(peer: PeerChoice, ask: &Ask<'_>) -> Value {
    let graph = ask.graph;
    let layer = graph.layers.first();
    let shape = json!(Dims::from(graph));
    let mut asked = json!({
        "peer": peer.to_string(),
        "device": "cuda",
        "tied": graph.tied(),
        "attention_bias": layer.is_some_and(|layer| layer.attention.body.q.bias.is_some()),
        "qk_norm": layer.is_some_and(|layer| layer.attention.body.q_norm.is_some()),
        "norm_eps": graph.norm_eps,
        "inv_freq": graph.inv_freq,
        "attn_scale": graph.attn_scale,
        "context": ask.context,
        "tokens": ask.tokens,
        "gpus": ask.gpus,
        "blocks": BLOCKS,
        "warmup": WARMUP,
        "seconds": ask.timeout.as_secs(),
    });
    for (size, value) in shape.as_object().into_iter().flatten() {
        asked[size] = value.clone();
    }
    asked
}

fn llama_bench(ask: &Ask<'_>) -> Result<Measured, String> {
    let Some(gguf) = &ask.gguf else {
        return Err("no model for it; --gguf names one".to_owned());
    };
    let mut command = Command::new("llama-bench");
    command.arg("-m").arg(gguf).args(["-p", "0", "-ngl", "99", "-fa", "1", "-o", "json"]);
    command.args(["-n", &ask.tokens.to_string(), "-d", &ask.context.to_string()]);
    command.args(["-r", &BLOCKS.to_string()]);
    let answer = run(command, "", ask.timeout, "llama-bench is not on the PATH")?;
    let garbage = || format!("its answer is not llama-bench's JSON: {}", shortened(&answer));
    let rows: Value = serde_json::from_str(answer.trim()).map_err(|_| garbage())?;
    let row = &rows[0];
    let samples = row["samples_ns"].as_array().ok_or_else(garbage)?;
    let tokens = row["n_gen"].as_f64().filter(|n| *n > 0.0).ok_or_else(garbage)?;
    let us = |ns: &Value| ns.as_f64().unwrap_or(f64::NAN) / 1000.0 / tokens;
    let text = |field: &str| row[field].as_str().map(shortened).unwrap_or_default();
    Ok(Measured {
        version: format!("{} (build {})", text("build_commit"), row["build_number"]),
        blocks: samples.iter().map(us).collect(),
        conditions: vec![
            text("model_type"),
            text("gpu_info"),
            "flash attention, all layers on the GPU; tokens are random, no argmax".to_owned(),
        ],
    })
}

/// Runs an engine to its end or its time limit and returns its standard output.
fn run(command: Command, input: &str, timeout: Duration, missing: &str) -> Result<String, String> {
    let ended = child_process::run(command, input, timeout).map_err(|error| {
        if error.kind() == ErrorKind::NotFound {
            missing.to_owned()
        } else if error.kind() == ErrorKind::TimedOut {
            format!("{error}; --peer-timeout raises the limit")
        } else {
            format!("it cannot be run: {error}")
        }
    })?;
    if ended.status.success() {
        return Ok(ended.out);
    }
    Err(format!("it failed ({}): {}", ended.status, shortened(ended.last_line())))
}

/// One line of bounded length.
fn shortened(text: &str) -> String {
    let line: String =
        text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(WORDS_MAX).collect();
    if line.is_empty() { "nothing".to_owned() } else { line }
}
