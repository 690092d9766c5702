//! `amk inspect ring` and `amk inspect evidence`: a running process, from its telemetry page.

use std::time::Instant;

use abi::{Activity, EntryState, EventTrack, EventWords, Evidence, EvidenceFamily, RING_ENTRIES};
use serde_json::{Map, Value, json};
use telemetry::{last_of, text};

use crate::cli::InspectProcessArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::process::{Look, Process, by_name, session};
use crate::report;

/// Runs of which the median time of reading and decoding counts.
const RUNS: usize = 101;

fn about(look: &Look, schema: &str) -> Map<String, Value> {
    let head = &look.page.head;
    let fields = [
        ("schema", json!(schema)),
        ("pid", json!(head.pid)),
        ("command", json!(text(&head.command))),
        ("model", json!(text(&head.model))),
        ("device", json!(text(&head.device))),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn states() -> impl Iterator<Item = &'static str> {
    EntryState::ALL.iter().map(|state| state.name())
}

/// The entries of the ring, and the commands that went through it last.
pub(crate) fn ring(args: &InspectProcessArgs) -> Outcome {
    let process = Process::find(&telemetry::folder(), args.pid)?;
    let look = process.look()?;
    let commands = last_of(&process.reader, EventTrack::Command, RING_ENTRIES as usize);
    let head = &look.page.head;
    let entries = look.page.sessions.iter().enumerate();
    let entry = |(place, words)| {
        let mut row = session(place, words, look.at_ns);
        // Without a sequence only the place and its state say something.
        if words.serial == 0
            && let Some(fields) = row.as_object_mut()
        {
            fields.retain(|name, _| name == "place" || name == "state");
        }
        row
    };
    let command = |event: &EventWords| {
        json!({
            "number": event.number, "begin_ns": event.begin_ns, "end_ns": event.end_ns, "place": event.place,
            "first": event.first, "positions": event.positions, "tokens": event.tokens, "sequences": event.sequences,
        })
    };
    let mut document = about(&look, "amk.inspect_ring.v1");
    let fields = [
        ("places", json!(head.places)),
        ("occupancy", by_name(states(), &head.occupancy)),
        ("entered", by_name(states(), &head.entered)),
        ("published", json!(head.published)),
        ("drained", json!(head.drained)),
        ("entries", entries.map(entry).collect()),
        ("commands", commands.iter().map(command).collect()),
    ];
    document.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
    report::table(
        &EntryState::ALL
            .iter()
            .map(|state| {
                let (now, entered) =
                    (head.occupancy[*state as usize], head.entered[*state as usize]);
                (state.name(), format!("{now:>3} now, entered {entered} times"))
            })
            .collect::<Vec<_>>(),
    );
    report::document(&document)?;
    Ok(Exit::Yes)
}

/// How the process knows the figures of a family.
fn known(look: &Look, family: EvidenceFamily) -> Evidence {
    let how = look.page.head.evidence.get(family as usize).copied();
    how.and_then(Evidence::new).unwrap_or(Evidence::Missing)
}

/// Where the figures of a family come from.
fn source(family: EvidenceFamily, how: Evidence) -> Option<&'static str> {
    Some(match (family, how) {
        (_, Evidence::Missing) => return None,
        (EvidenceFamily::Ring, Evidence::Measured) => {
            "each change of an entry's state and each completion, as it is made"
        }
        (EvidenceFamily::Ring, Evidence::Derived) => "commands; one sequence has no ring of places",
        (EvidenceFamily::Control, _) => {
            "activity as it changes; heartbeats of the workers of a GPU"
        }
        (EvidenceFamily::Copy, Evidence::Measured) => {
            "bytes of each copy, and what the loaders requested"
        }
        (EvidenceFamily::Copy, Evidence::Derived) => "sizes of the program's matrices",
        (EvidenceFamily::Residency, Evidence::Measured) => "NVML: memory of this process",
        (EvidenceFamily::Residency, Evidence::Derived) => "sizes of matrices and pages",
    })
}

/// The figures of a family, decoded from the page.
fn figures(look: &Look, family: EvidenceFamily) -> Value {
    let (head, how) = (&look.page.head, known(look, family));
    if how == Evidence::Missing {
        return Value::Null;
    }
    match family {
        EvidenceFamily::Ring => json!({
            "published": head.published, "drained": head.drained, "unseen": head.unseen,
            "occupancy": by_name(states(), &head.occupancy), "entered": by_name(states(), &head.entered),
        }),
        EvidenceFamily::Control => json!({
            "activity": Activity::new(head.activity).map_or("unknown", Activity::name),
            "writes": head.writes,
            "age_ns": look.at_ns.saturating_sub(head.beat_ns),
            "workers": look.page.running().len(),
            "suspected": head.suspected,
        }),
        EvidenceFamily::Copy => {
            let all = head.uploaded_bytes.saturating_add(head.avoided_bytes);
            let avoided = u128::from(head.avoided_bytes) * 10_000;
            json!({
                "uploaded_bytes": head.uploaded_bytes, "avoided_bytes": head.avoided_bytes,
                "streamed_bytes": head.streamed_bytes,
                "host_copy_avoided_bps": avoided.checked_div(u128::from(all)).map(|bps| bps as u64),
            })
        }
        EvidenceFamily::Residency => {
            let used = (how == Evidence::Measured).then_some(head.device_used_bytes);
            json!({"resident_bytes": head.resident_bytes, "device_used_bytes": used})
        }
    }
}

/// The median time of some runs, in nanoseconds.
fn median_ns(mut run: impl FnMut() -> Result<(), Failure>) -> Result<u64, Failure> {
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let began = Instant::now();
        run()?;
        times.push(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    times.sort_unstable();
    Ok(times[RUNS / 2])
}

/// What the process can show of itself. Only a family that is counted or timed where it happens is evidence.
pub(crate) fn evidence(args: &InspectProcessArgs) -> Outcome {
    let process = Process::find(&telemetry::folder(), args.pid)?;
    let look = process.look()?;
    let read_ns = median_ns(|| process.look().map(drop))?;
    let mut families = Map::new();
    let mut rows = Vec::new();
    for family in EvidenceFamily::ALL {
        let (how, name) = (known(&look, *family), family.name());
        let decode_ns = median_ns(|| {
            std::hint::black_box(figures(&look, *family));
            Ok(())
        })?;
        let source = source(*family, how);
        rows.push((name, format!("{:<9}{}", how.name(), source.unwrap_or("no source"))));
        let row = json!({
            "known": how.name(), "source": source, "decode_ns": decode_ns, "figures": figures(&look, *family),
        });
        families.insert(name.to_owned(), row);
    }
    let of = |wanted: Evidence| -> Vec<&str> {
        let all = EvidenceFamily::ALL.iter().filter(|family| known(&look, **family) == wanted);
        all.map(|family| family.name()).collect()
    };
    let complete = of(Evidence::Measured).len() == EvidenceFamily::ALL.len();
    report::table(&rows);
    let mut document = about(&look, "amk.inspect_evidence.v1");
    let fields = [
        ("complete", json!(complete)),
        ("missing", json!(of(Evidence::Missing))),
        ("derived", json!(of(Evidence::Derived))),
        ("read_ns", json!(read_ns)),
        ("families", Value::Object(families)),
    ];
    document.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
    report::document(&document)?;
    Ok(if complete { Exit::Yes } else { Exit::Inconclusive })
}
