//! The document of `amk top --once --json`.

use std::collections::BTreeMap;

use abi::{Activity, EntryState, SequenceEnd, SessionWords, TuneState};
use serde_json::{Value, json};
use telemetry::{Page, Rates, Stalls, ops, text};

use super::View;
use crate::process::{self, by_name};

fn rates(rates: &Rates) -> Value {
    json!({
        "seconds": rates.seconds,
        "tokens_per_s": rates.tokens,
        "positions_per_s": rates.positions,
        "p50_us": rates.p50_us,
        "p99_us": rates.p99_us,
        "mean_us": rates.mean_us,
        "bytes_per_s": rates.bytes,
        "bytes_counted": rates.counted,
        "running": rates.shares.running,
        "between": rates.shares.between,
        "idle": rates.shares.idle,
        "loading": rates.shares.loading,
        "device_idle": rates.device_idle,
        "telemetry": rates.telemetry,
    })
}

fn sessions(view: &View<'_>) -> Value {
    let open = view.now.page.open();
    open.map(|(place, session)| process::session(place, session, view.now.at_ns)).collect()
}

fn workers(view: &View<'_>) -> Value {
    let page = &view.now.page;
    let (suspected, suspect) = Stalls::suspects(page.running(), view.now.at_ns);
    let list = page.running().iter().zip(&view.before.page.workers).map(|(now, before)| {
        json!({
            "active": now.active != 0,
            "tasks": now.progress.wrapping_sub(before.progress),
            "position": now.position,
            "wait": abi::Trap::new(now.wait).filter(|trap| *trap != abi::Trap::None).map(abi::Trap::name),
            "object": now.object,
            "have": now.have,
            "need": now.need,
            "suspected": now.suspected != 0,
        })
    });
    json!({
        "count": page.running().len(),
        "suspected": suspected,
        "suspicion": suspect.map(|suspect| suspect.to_string()),
        "list": list.collect::<Vec<Value>>(),
    })
}

/// What a search without a GPU has found so far.
fn search(head: &abi::Telemetry) -> Option<Value> {
    (head.search_trials > 0).then(|| {
        let best = (head.search_best_ns > 0).then_some(head.search_best);
        let best_us = best.map(|_| f64::from(head.search_best_ns) / 1e3);
        json!({"trials": head.search_trials, "best_trial": best, "best_us": best_us})
    })
}

/// What a server that tunes itself has found so far.
pub(crate) fn tuning(head: &abi::Telemetry) -> Option<Value> {
    let state = TuneState::new(head.tune_state).filter(|state| *state != TuneState::Off)?;
    let runs = matches!(state, TuneState::Waiting | TuneState::Tuning);
    let share = |millionths: u32| f64::from(millionths) / 1e6;
    Some(json!({
        "state": state.name(),
        "stopped": (!runs).then_some(state.name()),
        "trials": head.tune_trials,
        "kept": head.tune_kept,
        "refused": head.tune_refused,
        "rolled_back": head.tune_rolled_back,
        "gain_ci": {"low": share(head.tune_gain_low), "high": share(head.tune_gain_high)},
        "wait_s": share(head.tune_wait_us),
        "schedule": format!("{:016x}", head.tune_schedule),
    }))
}

/// Positions of the windows of each open sequence, by what became of them, and of those that have left. A sequence whose
/// command is not done has one more position to run: it is in the command's state.
pub(crate) fn windows(page: &Page) -> Value {
    let of = |(place, session): (usize, &SessionWords)| {
        let mut counts = [0; EntryState::ALL.len()];
        counts[EntryState::Done as usize] = session.stood;
        counts[EntryState::Requeue as usize] = session.rerun;
        let state = EntryState::new(session.state);
        let next = state.filter(|state| !matches!(state, EntryState::Empty | EntryState::Done));
        next.iter().for_each(|state| counts[*state as usize] += 1);
        let names = EntryState::ALL.iter().map(|state| state.name());
        let mut window = by_name(names.skip(1), &counts[1..]);
        window["serial"] = session.serial.into();
        window["place"] = place.into();
        window["required"] = (session.required + u64::from(next.is_some())).into();
        window["lookahead"] = session.lookahead.into();
        window["accepted"] = session.accepted.into();
        window
    };
    let head = &page.head;
    json!({
        "open": page.open().map(of).collect::<Vec<_>>(),
        "left": {
            "required": head.left_required, "lookahead": head.left_lookahead, "accepted": head.left_accepted,
        },
        "accepted": head.accepted,
    })
}

/// Tasks by the names of their ops.
fn by_op(ops: &ops::Ops) -> BTreeMap<&'static str, u64> {
    ops::named(ops).collect()
}

pub(super) fn document(view: &View<'_>) -> Value {
    let head = &view.now.page.head;
    let since = Rates::since_start(&view.now.page, view.now.at_ns);
    let entered = |state: EntryState| head.entered[state as usize];
    let workers_ops = ops::tasks_by_worker(&view.before.page, &view.now.page);
    let priorities = || [0, 1, 2].into_iter().map(process::priority);
    json!({
        "schema": "amk.top.v2",
        "pid": head.pid,
        "command": text(&head.command),
        "model": text(&head.model),
        "device": text(&head.device),
        "activity": Activity::new(head.activity).map_or("unknown", Activity::name),
        "silent": view.silent(),
        "uptime_s": view.now.at_ns.saturating_sub(head.started_ns) as f64 / 1e9,
        "rates": rates(&view.rates),
        "since_start": rates(&since),
        "bound_us": view.rates.bound_us,
        "bandwidth": head.bandwidth,
        "step_bytes": head.step_bytes,
        "occupancy": by_name(EntryState::ALL.iter().map(|state| state.name()), &head.occupancy),
        "waiting": head.waiting,
        "places": head.places,
        "capacity": head.capacity,
        "commands": {
            "published": head.published, "drained": head.drained, "unseen": head.unseen, "traps": head.traps,
        },
        "totals": {
            "opened": head.opened, "turns": entered(EntryState::Claimed), "yields": entered(EntryState::Yield),
            "requeues": entered(EntryState::Requeue), "io_waits": entered(EntryState::WaitIo),
            "faults": entered(EntryState::Fault), "positions": head.positions, "tokens": head.tokens,
            "launches": head.launches, "loads": head.loads, "suspicions": head.suspicions, "batches": head.batches, "batched": head.batched,
            "windows": head.windows, "guessed": head.guessed, "accepted": head.accepted,
            "steps": view.now.page.step_count(),
        },
        "endings": by_name(SequenceEnd::ALL.iter().map(|ending| ending.name()), &head.endings),
        "priority_positions": by_name(priorities(), &head.priority_positions),
        "priority_tokens": by_name(priorities(), &head.priority_tokens),
        "bytes": {
            "resident": head.resident_bytes, "weights": head.weights_bytes, "arrived": head.arrived_bytes,
            "streamed": head.streamed_bytes, "uploaded": head.uploaded_bytes, "avoided": head.avoided_bytes,
        },
        "gpu": head.gpu(),
        "search": search(head),
        "tuning": tuning(head),
        "kv_pages": {"all": head.kv_pages, "held": head.kv_held, "promised": head.kv_promised},
        "telemetry": {
            "writes": head.writes,
            "write_ns": head.write_ns,
            "ns_per_write": head.write_ns.checked_div(head.writes.saturating_sub(1)),
        },
        "ops": {
            "source": "derived",
            "programs": process::programs(None, &view.now.page),
            "tasks": by_op(&ops::tasks(&view.now.page)),
            "by_worker": workers_ops.iter().map(by_op).collect::<Vec<_>>(),
        },
        "sessions": sessions(view),
        "windows": windows(&view.now.page),
        "workers": workers(view),
        "others": view.others,
    })
}
