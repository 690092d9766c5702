//! Other engines on this machine, measured for comparison: each a child process with a time limit, on the same shapes,
//! element type and context, and never while the device holds our kernel. An absent engine is listed with its reason.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ir::Graph;
use ir::program::Dims;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cli::PeerChoice;
use crate::device::Check;

/// The step in PyTorch, passed to the interpreter as text, so that there is nothing to install.
const TORCH_STEP: &str = include_str!("peers/torch_step.py");

/// Timed blocks of a peer, and the fewest that make a median.
const BLOCKS: usize = 9;
const BLOCKS_MIN: usize = 5;

/// Untimed blocks before them.
const WARMUP: usize = 2;

/// The polling interval of a running child.
const LOOK: Duration = Duration::from_millis(20);

/// How long the pipes may stay open after a child has ended: a grandchild can hold them.
const DRAIN: Duration = Duration::from_secs(2);

/// The most characters of a peer's own message that are passed on.
const WORDS_MAX: usize = 300;

pub(crate) struct Ask<'a> {
    pub(crate) graph: &'a Graph,
    /// Tokens before the measured ones.
    pub(crate) context: u32,
    pub(crate) tokens: u32,
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
        false => Check::new(name, false, missing).or("only needed for side-by-side `amk bench`"),
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
        "attention_bias": layer.is_some_and(|layer| layer.q.bias.is_some()),
        "qk_norm": layer.is_some_and(|layer| layer.q_norm.is_some()),
        "norm_eps": graph.norm_eps,
        "inv_freq": graph.inv_freq,
        "attn_scale": graph.attn_scale,
        "context": ask.context,
        "tokens": ask.tokens,
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

/// Runs a child to its end or its time limit and returns its standard output. The child is always reaped.
fn run(
    mut command: Command,
    input: &str,
    timeout: Duration,
    missing: &str,
) -> Result<String, String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn().map_err(|error| {
        let gone = error.kind() == std::io::ErrorKind::NotFound;
        if gone { missing.to_owned() } else { format!("it cannot be started: {error}") }
    })?;
    let stdin = child.stdin.take();
    let input = input.to_owned();
    // On threads: a child may stop reading, and pipes fill up.
    std::thread::spawn(move || stdin.map(|mut pipe| pipe.write_all(input.as_bytes())));
    let (out, err) = (collected(child.stdout.take()), collected(child.stderr.take()));
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if start.elapsed() < timeout => std::thread::sleep(LOOK),
            waiting => {
                let _ = child.kill();
                let _ = child.wait();
                let limit = timeout.as_secs_f64();
                return Err(match waiting {
                    Err(error) => format!("it cannot be waited for: {error}"),
                    Ok(_) => format!("no answer within {limit} s; --peer-timeout raises the limit"),
                });
            }
        }
    };
    let out = out.recv_timeout(DRAIN).unwrap_or_default();
    if status.success() {
        return Ok(out);
    }
    let err = err.recv_timeout(DRAIN).unwrap_or_default();
    let last = err.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    Err(format!("it failed ({status}): {}", shortened(last)))
}

/// Everything written to a pipe, once it is closed.
fn collected(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // After an error, the bytes read so far are the result.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// One line of bounded length.
fn shortened(text: &str) -> String {
    let line: String =
        text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(WORDS_MAX).collect();
    if line.is_empty() { "nothing".to_owned() } else { line }
}
