//! `amk doctor`: what works here, what is missing, and how to get it.

use serde_json::json;

use crate::cli::{DoctorArgs, KvArgs};
use crate::context::kv_capacity;
use crate::device::Check;
use crate::failure::{Exit, Failure, Outcome};
use crate::memory::{self, Bytes, Needs, Use};
use crate::{models, peers, report};

pub(crate) fn run(args: &DoctorArgs) -> Outcome {
    let mut checks = vec![cores(), free_memory(), scratch()];
    checks.extend(crate::device::checks());
    if let Some(name) = &args.model {
        checks.extend(needed(name, args.kv_capacity, args.kv)?);
    }
    checks.extend(peers::look());
    let gpu = checks.iter().filter(|c| ["driver", "nvrtc", "gpu"].contains(&c.name)).all(|c| c.ok);
    for check in &checks {
        let mark = if check.ok { "yes" } else { "no " };
        report::say(&format!("  {mark} {:10} {}", check.name, check.found));
        if let Some(remedy) = check.to_do() {
            report::say(&format!("      {:10} {remedy}", ""));
        }
    }
    report::say(if gpu {
        "everything works here: amk loop --device cuda"
    } else {
        "no GPU: search, gates and predictions work (amk loop --budget 64); nothing can be measured"
    });
    report::document(&json!({
        "schema": "amk.doctor.v1",
        "amk": env!("CARGO_PKG_VERSION"),
        "can_predict": true,
        "can_measure": gpu,
        "checks": checks,
    }))?;
    Ok(Exit::Yes)
}

fn cores() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Check::new("cpu", true, format!("{cores} cores for the reference VM"))
}

fn free_memory() -> Check {
    let Some(free) = memory::free() else { return Check::new("memory", true, "unknown") };
    Check::new("memory", free.bytes > 1 << 30, format!("{} {} free", Bytes(free.bytes), free.by))
        .or("presets need their weights in memory: 2 bytes a parameter")
}

/// What a model needs on the host and on the GPU, beside what is free.
fn needed(name: &str, capacity: Option<u32>, kv: KvArgs) -> Result<[Check; 2], Failure> {
    let (mut graph, made) = models::graph(name, capacity.unwrap_or(0))?;
    graph.kv_dtype = kv.kv_dtype;
    let capacity = kv_capacity(capacity, &graph)?;
    let of = Use::Host { sequences: 1, positions: capacity.into() };
    let weights = graph.weight_bytes() as u64;
    let needs = Needs::new(&graph, [if made { weights } else { 0 }, 0], of);
    let weights = format!("{}{}", Bytes(weights), if made { "" } else { " in files" });
    let host = format!(
        "{} needs {} on the host: weights {weights}, {} of keys and values for {capacity} tokens, {} workspace",
        graph.name,
        Bytes(needs.bytes()),
        Bytes(needs.cache),
        Bytes(needs.workspace)
    );
    let fits = memory::free().is_none_or(|free| needs.bytes() <= free.bytes);
    let host = Check::new("host", fits, host).or("lower --kv-capacity, or take a smaller model");
    let bytes = memory::on_device(&graph, capacity);
    let card = vm_host::Card::default().free_memory().ok();
    let there = card.map_or_else(|| "no GPU".to_owned(), |free| format!("{} free", Bytes(free)));
    let device = format!(
        "{} needs {} on a GPU, {} bytes of keys and values per token ({}): {there}",
        graph.name,
        Bytes(bytes),
        graph.kv_token_bytes(),
        graph.kv_dtype.name()
    );
    let fits = card.is_none_or(|free| bytes <= free);
    let device =
        Check::new("device", fits, device).or("lower --kv-capacity, or end what else uses the GPU");
    Ok([host, device])
}

fn scratch() -> Check {
    let here = std::env::current_dir().unwrap_or_default();
    let probe = here.join(format!(".amk-doctor-{}", std::process::id()));
    let ok = std::fs::write(&probe, b"").is_ok();
    let _ = std::fs::remove_file(&probe);
    let found = format!("{} can {}be written", here.display(), if ok { "" } else { "not " });
    Check::new("folder", ok, found).or("searches write to ./runs: use --out, or another folder")
}
