//! `amk doctor`: what works here, what is missing, and how to get it.

use serde_json::json;

use crate::device::Check;
use crate::failure::{Exit, Outcome};
use crate::{peers, report};

pub(crate) fn run() -> Outcome {
    let mut checks = vec![cores(), memory(), scratch()];
    checks.extend(crate::device::checks());
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

fn memory() -> Check {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let Some(kib) = available else { return Check::new("memory", true, "unknown") };
    Check::new("memory", kib > 1 << 20, format!("{:.1} GiB free", kib as f64 / (1 << 20) as f64))
        .or("presets need their weights in memory: 2 bytes a parameter")
}

fn scratch() -> Check {
    let here = std::env::current_dir().unwrap_or_default();
    let probe = here.join(format!(".amk-doctor-{}", std::process::id()));
    let ok = std::fs::write(&probe, b"").is_ok();
    let _ = std::fs::remove_file(&probe);
    let found = format!("{} can {}be written", here.display(), if ok { "" } else { "not " });
    Check::new("folder", ok, found).or("searches write to ./runs: use --out, or another folder")
}
