//! The output of `amk top`, character by character.

use abi::{Activity, EntryState, SequenceEnd, Trap};
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use telemetry::{Page, bucket};

use super::draw::{mark, short, text};
use super::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
const START: u64 = 1_700_000_000 * SECOND;

fn named(out: &mut [u8], name: &str) {
    out[..name.len()].copy_from_slice(name.as_bytes());
}

/// A server of a model on a card, with three sequences, ten seconds after its start.
fn served(at_ns: u64, tokens: u64) -> Look {
    let mut page = Page::boxed();
    let head = &mut page.head;
    named(&mut head.command, "serve");
    named(&mut head.model, "llama-3.2-1b");
    named(&mut head.device, "NVIDIA H200");
    (head.pid, head.started_ns, head.beat_ns) = (4711, START, at_ns);
    (head.places, head.capacity, head.waiting, head.workers) = (4, 4096, 2, 132);
    (head.activity, head.activity_ns) = (Activity::Running as u32, at_ns);
    head.spent_ns[Activity::Running as usize] = (at_ns - START) / 10 * 8;
    head.spent_ns[Activity::Between as usize] = (at_ns - START) / 10;
    head.spent_ns[Activity::Idle as usize] = (at_ns - START) / 10;
    head.occupancy = [1, 0, 1, 0, 0, 0, 2, 0];
    (head.published, head.drained) = (tokens + 1, tokens);
    head.entered[EntryState::Claimed as usize] = tokens;
    head.entered[EntryState::Requeue as usize] = tokens - 9;
    head.endings[SequenceEnd::Stop as usize] = 7;
    head.endings[SequenceEnd::Cancelled as usize] = 1;
    (head.tokens, head.positions) = (tokens, tokens + 100);
    head.steps[bucket(600_000)] = tokens;
    head.steps_ns = tokens * 600_000;
    (head.step_bytes, head.bandwidth) = (2_470_000_000, 4_600_000_000_000);
    (head.weights_bytes, head.arrived_bytes, head.uploaded_bytes) =
        (2_470_000_000, 2_470_000_000, 2_470_000_000);
    (head.kv_pages, head.kv_held, head.kv_promised) = (255, 9, 24);
    (head.batches, head.batched) = (tokens / 4, tokens);
    (head.windows, head.guessed, head.accepted) = (tokens / 10, tokens / 2, tokens / 5);
    head.set_gpu(&abi::GpuState {
        sm_mhz: 1755,
        memory_mhz: 3201,
        power_w: Some(699.25),
        power_limit_w: Some(700.0),
        temperature_c: Some(71),
        busy_percent: Some(100),
        throttled: vec![abi::ThrottleReason::PowerCap],
        ..abi::GpuState::default()
    });
    head.streamed_bytes = tokens * 2_480_000_000;
    (head.writes, head.write_ns) = (tokens, tokens * 900);
    for (place, (priority, state)) in
        [(2, EntryState::Claimed), (1, EntryState::Requeue), (0, EntryState::Requeue)]
            .into_iter()
            .enumerate()
    {
        let session = &mut page.sessions[place];
        (session.serial, session.priority, session.state) =
            (place as u64 + 8, priority, state as u32);
        (session.goal, session.opened_ns) = (400, START + 2 * SECOND);
        session.positions = tokens / 100;
        session.tokens = tokens / 100 - 40;
    }
    for (worker, words) in page.workers[..132].iter_mut().enumerate() {
        (words.active, words.beat_ns, words.moved_ns) = (1, at_ns, at_ns);
        words.progress = tokens as u32 * (50 + worker as u32 % 10);
    }
    Look { page, at_ns }
}

fn view<'a>(before: &'a Look, now: &'a Look) -> View<'a> {
    View::new(before, now, 1, false)
}

#[track_caller]
fn is_as_recorded(name: &str, shown: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/top").join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, format!("{shown}\n")).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(shown, recorded.trim_end_matches('\n'), "look at it, then BLESS=1");
}

#[test]
fn a_served_model_fits_the_smallest_terminal() {
    let (before, now) = (served(START + 9 * SECOND, 12_000), served(START + 10 * SECOND, 13_500));
    let shown = rendered(&view(&before, &now), (80, 24));
    assert!(shown.lines().all(|line| line.chars().count() <= 80));
    assert_eq!(shown.lines().count(), 24);
    is_as_recorded("served.frame", &shown);
}

#[test]
fn a_long_row_goes_on_below_its_name() {
    let (before, mut now) =
        (served(START + 9 * SECOND, 12_000), served(START + 10 * SECOND, 13_500));
    let program = &mut now.page.programs[0];
    program.all[..8].fill(123);
    program.passes = 13_500;
    let shown = rendered(&view(&before, &now), (80, 24));
    let rows: Vec<&str> = shown.lines().skip_while(|row| !row.starts_with("tasks ")).collect();
    assert!(rows[1].starts_with("          ") && rows[1].len() > 10, "{shown}");
    let both = format!("{} {}", rows[0].trim(), rows[1].trim());
    assert!(both.contains("(derived)") && both.matches("1.7M").count() == 8, "{shown}");
}

#[test]
fn a_search_without_a_gpu_has_its_trials() {
    let (mut before, mut now) =
        (served(START + SECOND, 12_000), served(START + 3 * SECOND, 12_000));
    before.page.head.search_trials = 10;
    let head = &mut now.page.head;
    (head.search_trials, head.search_best, head.search_best_ns) = (15, 12, 301_700);
    let shown = rendered(&view(&before, &now), (80, 24));
    assert!(shown.contains("trials    15, 2.5 per second"), "{shown}");
    assert!(shown.contains("best      301.7 us per token, predicted (trial 12)"), "{shown}");
    assert!(!shown.contains("ring"), "{shown}");
    let document = super::document::document(&view(&before, &now));
    assert_eq!(
        document["search"],
        serde_json::json!({"trials": 15, "best_trial": 12, "best_us": 301.7})
    );
    now.page.head.search_best_ns = 0;
    assert!(rendered(&view(&before, &now), (80, 24)).contains("nothing correct yet"));
}

#[test]
fn a_server_that_tunes_itself_shows_what_it_found() {
    let (before, mut now) = (served(START + SECOND, 12_000), served(START + 3 * SECOND, 12_000));
    assert!(!rendered(&view(&before, &now), (100, 24)).contains("tuning"));
    assert_eq!(super::document::document(&view(&before, &now))["tuning"], serde_json::Value::Null);
    let head = &mut now.page.head;
    (head.tune_state, head.tune_trials, head.tune_kept) = (abi::TuneState::Goal as u32, 9, 2);
    (head.tune_gain_low, head.tune_gain_high) = (215_000, 240_000);
    let shown = rendered(&view(&before, &now), (100, 24));
    assert!(
        shown.contains("goal, 9 trials, 2 kept, 0 refused, 0 rolled back, saves 22%"),
        "{shown}"
    );
    let document = super::document::document(&view(&before, &now));
    assert_eq!(document["tuning"]["stopped"], "goal");
    assert_eq!(document["tuning"]["gain_ci"], serde_json::json!({"low": 0.215, "high": 0.24}));
    now.page.head.tune_state = abi::TuneState::Tuning as u32;
    let document = super::document::document(&view(&before, &now));
    assert_eq!(document["tuning"]["state"], "tuning");
    assert_eq!(document["tuning"]["stopped"], serde_json::Value::Null);
}

#[test]
fn a_stalled_worker_is_named() {
    let (before, mut now) =
        (served(START + 9 * SECOND, 12_000), served(START + 10 * SECOND, 12_000));
    for words in &mut now.page.workers[..132] {
        (words.wait, words.object, words.have, words.need) =
            (Trap::CounterDeadline as u32, 7, 12, 16);
    }
    let stuck = &mut now.page.workers[31];
    (stuck.suspected, stuck.wait, stuck.task, stuck.position) = (1, 0, 14, 130);
    stuck.moved_ns -= 900 * MS;
    now.page.head.beat_ns -= 3 * SECOND;
    let shown = rendered(&view(&before, &now), (80, 24));
    for part in
        ["silent for 3.0 s", "1 suspected: worker 31", "900 ms", "task 14 of position 130", "c!c"]
    {
        assert!(shown.contains(part), "{part}:\n{shown}");
    }
    is_as_recorded("stalled.frame", &shown);
}

#[test]
fn any_size_and_any_page_are_drawn() {
    let (before, now) = (served(START + 9 * SECOND, 12_000), served(START + 10 * SECOND, 13_500));
    let empty = Look { page: Page::boxed(), at_ns: START };
    // A page can hold anything: another process writes it.
    let mut odd = served(START + SECOND, 10_000);
    bytemuck::bytes_of_mut(&mut *odd.page).fill(0xff);
    for (before, now) in [
        (&before, &now),
        (&empty, &empty),
        (&empty, &now),
        (&odd, &odd),
        (&now, &odd),
        (&odd, &now),
    ] {
        for size in [(1, 1), (10, 3), (40, 10), (80, 24), (200, 60)] {
            let shown = rendered(&view(before, now), size);
            assert!(shown.lines().count() <= size.1 as usize, "{size:?}");
        }
        assert!(!text(&view(before, now)).is_empty());
        assert_eq!(document::document(&view(before, now))["schema"], "amk.top.v2");
    }
}

#[test]
fn marks_say_what_a_worker_does() {
    let before = abi::WorkerWords::default();
    let with = |progress, active, wait: Trap| abi::WorkerWords {
        progress,
        active,
        wait: wait as u32,
        ..before
    };
    for (words, expected) in [
        (with(0, 0, Trap::None), '.'),
        (with(100, 0, Trap::None), '9'),
        (with(50, 1, Trap::StageDeadline), '4'),
        (with(0, 1, Trap::None), '?'),
        (with(0, 1, Trap::CounterDeadline), 'c'),
        (with(0, 1, Trap::PayloadDeadline), 'p'),
        (with(0, 1, Trap::StageDeadline), 's'),
        (abi::WorkerWords { suspected: 1, ..with(100, 1, Trap::None) }, '!'),
    ] {
        assert_eq!(mark(&words, &before, 100), expected, "{words:?}");
    }
    let short: Vec<String> = [0.0, 0.5, 999.0, 12_345.0, 2.47e9, 4.6e12].map(short).to_vec();
    assert_eq!(short, ["0", "0.5", "999", "12.3k", "2.5G", "4.6T"]);
}

#[test]
fn keys_do_what_the_last_line_says() {
    let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
    let none = KeyModifiers::NONE;
    assert_eq!(wish(&key(KeyCode::Char('q'), none)), Wish::Leave);
    assert_eq!(wish(&key(KeyCode::Char('c'), KeyModifiers::CONTROL)), Wish::Leave);
    assert_eq!(wish(&key(KeyCode::Char('c'), none)), Wish::Nothing);
    assert_eq!(wish(&key(KeyCode::Char('p'), none)), Wish::Pause);
    assert_eq!(wish(&Event::Resize(80, 24)), Wish::Redraw);
}

/// A frame as shown on a terminal.
fn rendered(view: &View<'_>, (width, height): (u16, u16)) -> String {
    let mut terminal =
        ratatui::Terminal::new(ratatui::backend::TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw::draw(frame, view, draw::Colours(false))).unwrap();
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(width as usize);
    let rows = rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
    rows.map(|row| row.trim_end().to_owned()).collect::<Vec<String>>().join("\n")
}
