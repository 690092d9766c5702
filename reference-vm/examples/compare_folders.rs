//! Compares models with what a reference computed from them: `compare_folders FOLDER...`.
//!
//! A folder holds a model (or `model.gguf`), `golden.safetensors` (`tokens`, `logits`, `greedy`) and `dequant.safetensors`:
//! matrices in f32 under the graph's names. Every matrix is compared bit for bit, dequantised and as codes times scales;
//! the logits with those of the evaluator and of the program of the default schedule on the reference VM.

use std::path::Path;

use ir::schedule::{default_config, validate};
use ir::{Target, TensorId, decode};
use lower::{Options, lower};
use model::{Model, import, import_dequantised};
use reference_vm::Order;
use reference_vm::compare::{Tolerance, compare};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use safetensors::SafeTensors;

fn main() {
    let mut bad = 0;
    for folder in std::env::args().skip(1) {
        let name = Path::new(&folder).file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_default();
        match check(Path::new(&folder)) {
            Ok(what) => println!("{name:34} {what}"),
            Err(why) => {
                bad += 1;
                println!("{name:34} FAILED {why}");
            }
        }
    }
    assert!(bad == 0, "{bad} folders differ");
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn check(folder: &Path) -> Result<String, String> {
    let gguf = folder.join("model.gguf");
    let path = if gguf.exists() { &gguf } else { folder };
    let text = |error: model::ModelError| error.to_string();
    let (streamed, plain) = (import(path).map_err(text)?, import_dequantised(path).map_err(text)?);
    let read = |name: &str| std::fs::read(folder.join(name)).map_err(|error| error.to_string());
    let (dequant, golden) = (read("dequant.safetensors")?, read("golden.safetensors")?);
    let dequant = SafeTensors::deserialize(&dequant).map_err(|error| error.to_string())?;
    let mut same = 0;
    for (name, view) in dequant.tensors() {
        for model in [&plain, &streamed] {
            same_bits(model, &name, &floats(view.data()))?;
        }
        same += 1;
    }
    let golden = SafeTensors::deserialize(&golden).map_err(|error| error.to_string())?;
    let data = |name: &str| golden.tensor(name).expect("a tensor").data().to_vec();
    let ids = |name: &str| -> Vec<u32> {
        data(name).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
    };
    let (tokens, greedy) = (ids("tokens"), ids("greedy"));
    let vocab = streamed.graph.vocab as usize;
    let logits: Vec<Vec<f32>> =
        floats(&data("logits")).chunks_exact(vocab).map(<[f32]>::to_vec).collect();
    let eval = evaluated(&streamed, &tokens, &logits, &greedy)?;
    let vm = lowered(&streamed, &tokens, &logits, &greedy)?;
    let kinds: std::collections::BTreeSet<_> =
        streamed.graph.tensors.iter().map(|tensor| tensor.dtype.name()).collect();
    let kinds: Vec<_> = kinds.into_iter().collect();
    Ok(format!("{same} matrices equal, logits {eval:.1e} {vm:.1e}, {}", kinds.join(" ")))
}

/// Compares the values of a tensor, codes times the scale of their row.
fn same_bits(model: &Model, name: &str, want: &[f32]) -> Result<(), String> {
    let find = |name: &str| model.graph.tensors.iter().position(|tensor| tensor.name == name);
    let at = find(name).ok_or(format!("no tensor {name}"))?;
    let tensor = &model.graph.tensors[at];
    let cols = *tensor.shape.last().expect("a side") as usize;
    let mut got = vec![0.0; tensor.len()];
    let bytes = model.weights.bytes(TensorId(at as u32));
    for (row, out) in bytes.chunks(tensor.dtype.row_bytes(cols)).zip(got.chunks_mut(cols)) {
        decode(tensor.dtype, row, out);
    }
    if tensor.dtype.is_scaled() {
        let first = match name.split_once(".experts.") {
            Some((start, rest)) => {
                format!("{start}.experts.0{}", &rest[rest.find('.').unwrap_or(0)..])
            }
            None => name.to_owned(),
        };
        let scale = find(&format!("{first}_scale")).ok_or(format!("no scales of {name}"))?;
        let scales = floats(model.weights.bytes(TensorId(scale as u32)));
        for (row, scale) in got.chunks_mut(cols).zip(scales) {
            row.iter_mut().for_each(|value| *value *= scale);
        }
    }
    if got.len() != want.len() {
        return Err(format!("{name}: {} values, expected {}", got.len(), want.len()));
    }
    let differs = got.iter().zip(want).position(|(got, want)| got.to_bits() != want.to_bits());
    differs.map_or(Ok(()), |i| {
        let dtype = tensor.dtype.name();
        Err(format!("{name} ({dtype}) holds {} at {i}, expected {}", got[i], want[i]))
    })
}

fn evaluated(
    model: &Model,
    tokens: &[u32],
    logits: &[Vec<f32>],
    greedy: &[u32],
) -> Result<f64, String> {
    let error = |error: &dyn std::fmt::Display| format!("evaluator: {error}");
    let mut evaluator =
        Evaluator::new(&model.graph, &*model.weights).map_err(|e| error(&format!("{e:?}")))?;
    let got = evaluator.run(tokens, Logits::All).map_err(|e| error(&format!("{e:?}")))?;
    let agreement = compare(logits, &got, Tolerance::REFERENCE).map_err(|e| error(&e))?;
    let next = evaluator.greedy(greedy.len(), &[]).map_err(|e| error(&format!("{e:?}")))?;
    if next != greedy {
        return Err(format!("evaluator: greedy {next:?}, expected {greedy:?}"));
    }
    Ok(agreement.summary().max_rel_err)
}

fn lowered(
    model: &Model,
    tokens: &[u32],
    logits: &[Vec<f32>],
    greedy: &[u32],
) -> Result<f64, String> {
    let target = Target::by_name("h200").expect("a target");
    let error = |error: String| format!("reference VM: {error}");
    let config = validate(default_config(&model.graph, &target), &model.graph, &target)
        .map_err(|e| error(format!("{e:?}")))?;
    let program = lower(&config, &model.graph, &target, Options { kv_capacity: 96 })
        .map_err(|e| error(format!("{e:?}")))?;
    let mut machine = Machine::new(&program, &model.graph, &*model.weights)
        .map_err(|e| error(format!("{e:?}")))?;
    let finished = |run| match run {
        Run::Finished(outputs) => Ok(outputs),
        other @ (Run::Trapped(_) | Run::Stuck { .. }) => Err(error(format!("{other:?}"))),
    };
    let outputs =
        finished(machine.run(tokens, Order::Waves).map_err(|e| error(format!("{e:?}")))?)?;
    let agreement =
        compare(logits, &outputs.logits, Tolerance::REFERENCE).map_err(|e| error(e.to_string()))?;
    let next = finished(
        machine.greedy(greedy.len(), &[], Order::Waves).map_err(|e| error(format!("{e:?}")))?,
    )?;
    if next.tokens != greedy {
        return Err(error(format!("greedy {:?}, expected {greedy:?}", next.tokens)));
    }
    Ok(agreement.summary().max_rel_err)
}
