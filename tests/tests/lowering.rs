//! File tests that lower a toy model and run the program: `lower` compares the program with the one below its
//! directives, `run` compares its results with the evaluated graph in several orders.
//!
//! Directives: `shape` (`hidden=16 layers=2 ...`, any subset), `workers` of a device, `devices`, `config` (JSON, any
//! subset of the knobs).

use ir::program::{Program, Verified, verify};
use ir::{Graph, Target, schedule};
use lower::{Options, lower};
use reference_vm::Order;
use reference_vm::compare::{Tolerance, compare};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use tests::filetest::{Filetest, unified};
use tests::toy::{SeededWeights, Shape, graph};

const OPTIONS: Options = Options { kv_capacity: 64 };
/// More tokens than the smallest block of keys holds, so that a second split becomes active meanwhile.
const TOKENS: usize = 40;

fn shape(file: &Filetest) -> Result<Shape, String> {
    let mut shape = Shape {
        hidden: 16,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        ffn: 16,
        vocab: 24,
        layers: 1,
        tied: true,
        bias: false,
        qk_norm: false,
        window: None,
    };
    for word in file.directive("shape").unwrap_or("").split_whitespace() {
        let (name, value) = word.split_once('=').ok_or(format!("`{word}` is not name=value"))?;
        let number: u32 = value.parse().map_err(|_| format!("`{value}` is not a number"))?;
        match name {
            "hidden" => shape.hidden = number,
            "heads" => shape.heads = number,
            "kv_heads" => shape.kv_heads = number,
            "head_dim" => shape.head_dim = number,
            "ffn" => shape.ffn = number,
            "vocab" => shape.vocab = number,
            "layers" => shape.layers = number,
            "tied" => shape.tied = number == 1,
            "bias" => shape.bias = number == 1,
            "qk_norm" => shape.qk_norm = number == 1,
            "window" => shape.window = Some(number),
            _ => return Err(format!("there is no dimension `{name}`")),
        }
    }
    Ok(shape)
}

/// The program for the directives.
fn lowered(file: &Filetest, graph: &Graph) -> Result<Verified<Program>, String> {
    let mut target = Target::by_name("h200").map_err(|error| error.to_string())?;
    target.sms = file
        .directive("workers")
        .unwrap_or("2")
        .parse()
        .map_err(|_| "workers is not a number".to_owned())?;
    let devices = file.directive("devices").unwrap_or("1").parse();
    target = target.times(devices.map_err(|_| "devices is not a number".to_owned())?);
    let base = match file.directive("schedule") {
        None => schedule::neutral_config(graph, &target),
        Some("default") => schedule::default_config(graph, &target),
        Some(other) => return Err(format!("there is no schedule `{other}` to start from")),
    };
    let config = file.directive("config").unwrap_or("{}");
    let config =
        schedule::read_config_over(base, config, graph, &target).map_err(|v| v.to_string())?;
    lower(&config, graph, &target, OPTIONS).map_err(|error| error.to_string())
}

/// Checks that every order gives the same bits, and that they agree with the evaluated graph.
fn run(program: &Verified<Program>, graph: &Graph) -> Result<(), String> {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| (i * i + 3) % graph.vocab).collect();
    let weights = SeededWeights::new(graph, 7);
    let mut evaluator = Evaluator::new(graph, &weights).map_err(|error| error.to_string())?;
    let expected = evaluator.run(&tokens, Logits::All).map_err(|error| error.to_string())?;
    let mut first: Option<Vec<Vec<f32>>> = None;
    for order in [Order::Queue, Order::Reverse, Order::Waves, Order::Seeded(3), Order::Seeded(4)] {
        let mut machine =
            Machine::new(program, graph, &weights).map_err(|error| error.to_string())?;
        let outputs = match machine.run(&tokens, order).map_err(|error| error.to_string())? {
            Run::Finished(outputs) => outputs,
            other @ (Run::Trapped(_) | Run::Stuck { .. }) => {
                return Err(format!("{order:?}: {other:?}"));
            }
        };
        let _ = compare(&expected, &outputs.logits, Tolerance::REFERENCE)
            .map_err(|error| format!("{order:?}: {error}"))?;
        if first.get_or_insert_with(|| outputs.logits.clone()) != &outputs.logits {
            return Err(format!("{order:?} gives other bits than Queue"));
        }
    }
    Ok(())
}

/// Whether a file is lowered or run.
pub(crate) fn is_for(file: &Filetest) -> bool {
    file.has_mode("lower") || file.has_mode("run")
}

/// The program is as written, and agrees with the graph.
pub(crate) fn check(file: &Filetest) -> Result<(), String> {
    let graph = graph(&shape(file)?);
    let head: String = file
        .text
        .lines()
        .take_while(|line| line.starts_with(';'))
        .map(|line| format!("{line}\n"))
        .collect();
    let mut text = file.text.clone();
    if file.has_mode("lower") {
        let program = lowered(file, &graph)?;
        text = head + &ir::text::print(&program);
        if text != file.text {
            if !tests::blessing() {
                return Err(format!(
                    "{}rewrite with: BLESS=1 cargo test -p tests --test filetests",
                    unified(&file.text, &text)
                ));
            }
            std::fs::write(&file.path, &text).map_err(|error| error.to_string())?;
        }
    }
    if file.has_mode("run") {
        // The program in the file is the one that runs.
        let program = ir::text::parse(&text).map_err(|error| error.to_string())?;
        run(&verify(program).map_err(|violations| violations.to_string())?, &graph)?;
    }
    Ok(())
}
