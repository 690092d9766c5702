//! `amk doctor`: what works here, what is missing, and how to get it.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Serialize;

use crate::cli::{DoctorArgs, KvArgs};
use crate::commands::search_loop::store_sink::STORE;
use crate::context::kv_capacity;
use crate::device::Check;
use crate::failure::{Exit, Failure};
use crate::memory::{self, Bytes, Needs, Use};
use crate::report::{self, Answer, Ink};
use crate::{found, models, peers};

/// What works here, and what `amk` keeps on the disk.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Findings {
    #[schemars(extend("const" = "amk.doctor.v1"))]
    schema: &'static str,
    amk: &'static str,
    can_predict: bool,
    can_measure: bool,
    checks: Vec<Check>,
    places: Vec<Place>,
}

/// A file or folder that `amk` writes.
#[derive(Debug, Serialize, JsonSchema)]
struct Place {
    name: &'static str,
    path: PathBuf,
    bytes: u64,
    /// What to run to make room.
    remove: String,
}

pub(crate) fn answer(args: &DoctorArgs) -> Result<Answer<Findings>, Failure> {
    let mut checks = vec![cores(), free_memory(), scratch()];
    checks.extend(crate::device::checks());
    if let Some(name) = &args.model {
        checks.extend(needed(name, args.kv_capacity, args.kv)?);
    }
    checks.extend(peers::look());
    let can_measure =
        checks.iter().filter(|c| ["driver", "nvrtc", "gpu"].contains(&c.name)).all(|c| c.ok);
    for check in &checks {
        let (ink, mark) = match (check.ok, check.optional) {
            (true, _) => (Ink::Green, "yes"),
            (false, true) => (Ink::Plain, "-  "),
            (false, false) => (Ink::Red, "no "),
        };
        report::say_marked(ink, mark, &format!("{:10} {}", check.name, check.found));
        if let Some(remedy) = check.to_do() {
            report::say(&format!("      {:10} {remedy}", ""));
        }
    }
    let places = places();
    for place in &places {
        let (bytes, path) = (Bytes(place.bytes), place.path.display());
        report::say(&format!(
            "      {:10} {bytes} in {path}; to remove: {}",
            place.name, place.remove
        ));
    }
    report::say(if can_measure {
        "everything works here: amk loop --device cuda"
    } else {
        "no GPU: search, gates and predictions work (amk loop --budget 64); nothing can be measured"
    });
    let amk = env!("CARGO_PKG_VERSION");
    let schema = "amk.doctor.v1";
    let document = Findings { schema, amk, can_predict: true, can_measure, checks, places };
    Ok(Answer { document, exit: Exit::Yes })
}

/// What there is on the disk, with the command that makes room. Models of the Hub are also those of other programs.
fn places() -> Vec<Place> {
    /// A name, where it is, and the command from the path.
    type Known = (&'static str, Option<PathBuf>, fn(&str) -> String);
    let shown = |path: &Path| path.display().to_string();
    let all: [Known; 6] = [
        ("kernels", vm_host::default_cache(), |path| format!("rm {path}/*-nvrtc*")),
        ("schedules", found::folder(), |path| format!("rm -r {path}")),
        ("models", hub::Hub::from_env().map(|hub| hub.cache), |path| {
            format!("rm -r {path}/models--ORG--NAME")
        }),
        ("runs", Some("runs".into()), |path| format!("amk runs gc {path} --keep 3 --apply")),
        ("store", Some(Path::new("runs").join(STORE)), removed_store),
        ("store", Some(STORE.into()), removed_store),
    ];
    let there = |(name, path, remove): Known| {
        let path = std::path::absolute(path?).ok().filter(|path| path.exists())?;
        Some(Place { name, bytes: size(&path), remove: remove(&shown(&path)), path })
    };
    all.into_iter().filter_map(there).collect()
}

fn removed_store(path: &str) -> String {
    format!("rm {path} (amk corpus import RUNS makes it anew)")
}

/// The bytes of a file, or of all files in a folder. Links are not followed; what cannot be read counts nothing.
fn size(path: &Path) -> u64 {
    let Ok(meta) = path.symlink_metadata() else { return 0 };
    if !meta.is_dir() {
        return meta.len();
    }
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten();
    inside.map(|entry| size(&entry.path())).sum()
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
