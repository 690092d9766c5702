//! Draws a view: readable at 80 by 24, on any terminal, also without colour.

use abi::{Activity, EntryState, SequenceEnd, Telemetry, Trap, TuneState, WorkerWords};
use ratatui::Frame;

use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use telemetry::{Stalls, ops, text as words};

use super::View;
use crate::process::priority;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Colours(pub(super) bool);

impl Colours {
    /// `NO_COLOR`, set and not empty, means none.
    pub(super) fn of_environment() -> Self {
        Self(std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
    }

    fn style(self, colour: Color) -> Style {
        if self.0 { Style::new().fg(colour) } else { Style::new() }
    }
}

/// The width of `--once`'s text, and the most lines.
const TEXT_SIZE: (u16, u16) = (100, 64);

/// A number with an SI letter for thousands, five characters or less.
pub(super) fn short(value: f64) -> String {
    let (value, letter) = match value {
        v if v >= 1e12 => (v / 1e12, "T"),
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e4 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let places =
        if letter.is_empty() && value.fract() < 1e-9 { 0 } else { usize::from(value < 100.0) };
    format!("{value:.places$}{letter}")
}

/// A time in µs, in a suitable unit.
fn time(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us >= 1e6 => format!("{:.2} s", us / 1e6),
        Some(us) if us >= 1e4 => format!("{:.1} ms", us / 1e3),
        Some(us) => format!("{us:.0} us"),
    }
}

fn age(ns: u64) -> String {
    let s = ns / 1_000_000_000;
    match s {
        0..60 => format!("{:.1}s", ns as f64 / 1e9),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        _ => format!("{}h{:02}m", s / 3600, s / 60 % 60),
    }
}

fn bar(share: f64, cells: usize) -> String {
    let full = (share.clamp(0.0, 1.0) * cells as f64).round() as usize;
    format!("{}{}", "#".repeat(full), ".".repeat(cells - full))
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// The width of a row's name.
const NAME: usize = 10;

/// A text in lines of at most this width, cut between words; a longer word has a line of its own.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().map_or(0, |line| line.chars().count());
        match lines.last_mut() {
            Some(last) if line > 0 && line + 1 + word.chars().count() <= width => {
                last.push(' ');
                last.push_str(word);
            }
            Some(last) if line == 0 => last.push_str(word),
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

struct Sheet {
    lines: Vec<Line<'static>>,
    colours: Colours,
    width: usize,
}

impl Sheet {
    /// A name and what it has, on as many lines as that takes.
    fn row(&mut self, name: &'static str, rest: String) {
        let mut name = Span::styled(format!("{name:<NAME$}"), self.colours.style(Color::Cyan));
        for line in wrapped(&rest, self.width.saturating_sub(NAME)) {
            let next = std::mem::replace(&mut name, Span::raw(" ".repeat(NAME)));
            self.lines.push(Line::from(vec![next, Span::raw(line)]));
        }
    }

    fn title(&mut self, text: String) {
        let rule = "-".repeat(self.width.saturating_sub(text.chars().count() + 4));
        let bold = Style::new().add_modifier(Modifier::BOLD);
        self.lines.push(Line::from(Span::styled(format!("-- {text} {rule}"), bold)));
    }

    fn warn(&mut self, text: &str) {
        let style = self.colours.style(Color::Red).add_modifier(Modifier::BOLD);
        let letters: Vec<char> = text.chars().collect();
        for line in letters.chunks(self.width.max(1)) {
            let line: String = line.iter().collect();
            self.lines.push(Line::from(Span::styled(line, style)));
        }
    }
}

fn heading(sheet: &mut Sheet, view: &View<'_>) {
    let head = &view.now.page.head;
    let doing = Activity::new(head.activity).map_or("unknown", Activity::name);
    let left = format!(
        "amk {}: {} on {}, process {}, up {}",
        words(&head.command),
        words(&head.model),
        words(&head.device),
        head.pid,
        age(view.now.at_ns.saturating_sub(head.started_ns))
    );
    let right = if view.paused { "paused".to_owned() } else { doing.to_owned() };
    let room = sheet.width.saturating_sub(right.len() + 1);
    let left: String = left.chars().take(room).collect();
    let line = format!("{left:room$} {right}");
    let style = Style::new().add_modifier(Modifier::REVERSED);
    sheet.lines.push(Line::from(Span::styled(line, style)));
    if let Some(silent) = view.silent() {
        sheet.warn(&silent);
    }
}

/// A search without a GPU: nothing else of the page is known.
fn search(sheet: &mut Sheet, view: &View<'_>) {
    let (head, before) = (&view.now.page.head, &view.before.page.head);
    let seconds = view.now.at_ns.saturating_sub(view.before.at_ns) as f64 / 1e9;
    let new = head.search_trials.saturating_sub(before.search_trials);
    let rate = if seconds > 0.0 { f64::from(new) / seconds } else { 0.0 };
    sheet.row("trials", format!("{}, {rate:.1} per second", head.search_trials));
    let best = match head.search_best_ns {
        0 => "nothing correct yet".to_owned(),
        ns => format!(
            "{:.1} us per token, predicted (trial {})",
            f64::from(ns) / 1e3,
            head.search_best
        ),
    };
    sheet.row("best", best);
}

/// The search of a server that tunes itself.
fn tuning(sheet: &mut Sheet, head: &Telemetry) {
    let Some(state) = TuneState::new(head.tune_state).filter(|state| *state != TuneState::Off)
    else {
        return;
    };
    let gain = percent(f64::from(head.tune_gain_low) / 1e6);
    let text = format!(
        "{}, {} trials, {} kept, {} refused, {} rolled back, saves {gain}",
        state.name(),
        head.tune_trials,
        head.tune_kept,
        head.tune_refused,
        head.tune_rolled_back
    );
    sheet.row("tuning", text);
}

fn figures(sheet: &mut Sheet, view: &View<'_>) {
    let (head, rates) = (&view.now.page.head, &view.rates);
    sheet.row(
        "speed",
        format!("{} tokens/s, {} positions/s", short(rates.tokens), short(rates.positions)),
    );
    let bound = match (rates.bound_us, rates.p50_us) {
        (Some(bound), Some(p50)) => {
            format!(", bound {} ({} of p50)", time(Some(bound)), percent(bound / p50))
        }
        (Some(bound), None) => format!(", bound {}", time(Some(bound))),
        (None, _) => String::new(),
    };
    sheet.row(
        "step",
        format!(
            "p50 {}, p99 {}, mean {}{bound}",
            time(rates.p50_us),
            time(rates.p99_us),
            time(rates.mean_us)
        ),
    );
    let of = match head.bandwidth {
        0 => String::new(),
        card => format!(
            ", {} of the card's {}B/s",
            percent(rates.bytes / card as f64),
            short(card as f64)
        ),
    };
    let how = if rates.counted { "counted" } else { "weights times positions" };
    let read = match rates.bytes {
        // Nothing ran, or nothing is known of when: only a GPU's commands are timed.
        0.0 => "-".to_owned(),
        bytes => format!("{}B/s{of} while running ({how})", short(bytes)),
    };
    sheet.row("reads", read);
    if let Some(gpu) = head.gpu() {
        sheet.row("gpu", gpu.line());
    }
    let shares = rates.shares;
    sheet.row(
        "time",
        format!(
            "[{}] running {}, between {}, idle {}, loading {}",
            bar(shares.running, 20),
            percent(shares.running),
            percent(shares.between),
            percent(shares.idle),
            percent(shares.loading)
        ),
    );
}

fn ring(sheet: &mut Sheet, view: &View<'_>) {
    let head = &view.now.page.head;
    let entered = |state: EntryState| head.entered[state as usize] as f64;
    let states = EntryState::ALL.iter().zip(head.occupancy);
    let states: Vec<String> = states
        .filter(|(_, count)| *count > 0)
        .map(|(state, count)| format!("{count} {}", state.name()))
        .collect();
    let states = if states.is_empty() { "no places".to_owned() } else { states.join(", ") };
    let under_way = head.published.saturating_sub(head.drained);
    sheet.row("ring", format!("{states}; {} waiting; {under_way} under way", head.waiting));
    sheet.row(
        "commands",
        format!(
            "{} given, {} drained; {} turns, {} requeued, {} io waits",
            short(head.published as f64),
            short(head.drained as f64),
            short(entered(EntryState::Claimed)),
            short(entered(EntryState::Requeue)),
            short(entered(EntryState::WaitIo))
        ),
    );
    let endings = SequenceEnd::ALL.iter().zip(head.endings).filter(|(_, count)| *count > 0);
    let endings =
        endings.map(|(ending, count)| format!("{} {}", short(count as f64), ending.name()));
    let endings = endings.collect::<Vec<String>>().join(", ");
    let endings = if endings.is_empty() { "none yet".to_owned() } else { endings };
    sheet.row(
        "ended",
        format!("{endings}; {} faults, {} traps", entered(EntryState::Fault), head.traps),
    );
    let bytes = |bytes: u64| format!("{}B", short(bytes as f64));
    if head.arrived_bytes > 0 {
        let watermark = head.arrived_bytes as f64 / head.weights_bytes as f64;
        sheet.row(
            "weights",
            format!(
                "{}, {} on the device; {} copied, {} avoided; {} a step",
                bytes(head.weights_bytes),
                percent(watermark),
                bytes(head.uploaded_bytes),
                bytes(head.avoided_bytes),
                bytes(head.step_bytes)
            ),
        );
    }
    if head.kv_pages > 0 {
        let batches = match head.batched.checked_div(head.batches) {
            Some(seqs) => format!("; {} batches of {seqs}", short(head.batches as f64)),
            None => String::new(),
        };
        let (all, held, promised) = (head.kv_pages, head.kv_held, head.kv_promised);
        sheet.row("kv pages", format!("{held} held, {promised} promised of {all}{batches}"));
    }
    guesses(sheet, head);
    tasks(sheet, view);
    let per_write = head.write_ns.checked_div(head.writes.saturating_sub(1));
    sheet.row(
        "this page",
        format!(
            "{} writes, {} ns each, {:.3}% of the time",
            short(head.writes as f64),
            per_write.unwrap_or_default(),
            view.rates.telemetry * 100.0
        ),
    );
}

/// Guessed tokens, if there were any.
fn guesses(sheet: &mut Sheet, head: &Telemetry) {
    let [guessed, accepted, windows] =
        [head.guessed, head.accepted, head.windows].map(|count| short(count as f64));
    if head.windows > 0 {
        sheet.row("guesses", format!("{guessed} tokens in {windows} windows, {accepted} right"));
    }
}

/// Tasks by op, if a program is known.
fn tasks(sheet: &mut Sheet, view: &View<'_>) {
    let tasks = ops::tasks(&view.now.page);
    let of = |(op, tasks): (&str, u64)| format!("{op} {}", short(tasks as f64));
    let mix: Vec<String> = ops::named(&tasks).map(of).collect();
    if !mix.is_empty() {
        sheet.row("tasks", format!("{} (derived)", mix.join(", ")));
    }
}

fn sequences(sheet: &mut Sheet, view: &View<'_>, rows: usize) {
    let page = &view.now.page;
    let open = page.open().count();
    sheet.title(format!("{open} of {} sequences", page.head.places));
    if rows == 0 || open == 0 {
        return;
    }
    sheet.lines.push(Line::from(
        "place  priority  state       positions            tokens  tokens/s     age",
    ));
    let shown = if open > rows - 1 { rows.saturating_sub(2) } else { open };
    for (place, session) in page.open().take(shown) {
        let before = &view.before.page.sessions[place];
        let new = if before.serial == session.serial {
            session.tokens.saturating_sub(before.tokens)
        } else {
            session.tokens
        };
        let speed = if view.rates.seconds > 0.0 { new as f64 / view.rates.seconds } else { 0.0 };
        let done = session.positions as f64 / session.goal.max(1) as f64;
        let state = EntryState::new(session.state).map_or("unknown", EntryState::name);
        let positions = format!("{}/{}", session.positions, session.goal);
        sheet.lines.push(Line::from(format!(
            "{place:>5}  {:<8}  {state:<9}  [{}] {positions:>11}  {:>7}  {:>8}  {:>6}",
            priority(session.priority),
            bar(done, 8),
            session.tokens,
            short(speed),
            age(view.now.at_ns.saturating_sub(session.opened_ns))
        )));
    }
    if shown < open {
        sheet.lines.push(Line::from(format!("       and {} more", open - shown)));
    }
}

/// A worker in one character.
pub(super) fn mark(now: &WorkerWords, before: &WorkerWords, most: u32) -> char {
    let tasks = now.progress.wrapping_sub(before.progress);
    if now.suspected != 0 {
        return '!';
    }
    if tasks == 0 {
        return match (now.active != 0, Trap::new(now.wait)) {
            (false, _) => '.',
            (true, Some(Trap::CounterDeadline)) => 'c',
            (true, Some(Trap::PayloadDeadline)) => 'p',
            (true, Some(Trap::StageDeadline)) => 's',
            (true, _) => '?',
        };
    }
    // Tenths of the busiest worker's tasks.
    let share = u64::from(tasks) * 9 / u64::from(most.max(1));
    char::from_digit(share.min(9) as u32, 10).unwrap_or('9')
}

fn workers(sheet: &mut Sheet, view: &View<'_>, rows: usize) {
    let (now, before) = (view.now.page.running(), &view.before.page.workers);
    if now.is_empty() {
        return;
    }
    let (suspected, suspect) = Stalls::suspects(now, view.now.at_ns);
    let tasks =
        now.iter().zip(before).map(|(now, before)| now.progress.wrapping_sub(before.progress));
    let most = tasks.max().unwrap_or(0);
    sheet.title(format!(
        "{} workers: tenths of {} tasks; c p s waits, . idle, ! stalled",
        now.len(),
        short(f64::from(most))
    ));
    if let Some(suspect) = suspect {
        sheet.warn(&format!("{suspected} suspected: {suspect}"));
    }
    let marks: Vec<char> =
        now.iter().zip(before).map(|(now, before)| mark(now, before, most)).collect();
    let per_row = sheet.width.saturating_sub(5).max(10) / 10 * 10;
    for (row, marks) in marks.chunks(per_row).enumerate().take(rows) {
        let marks: String = marks.iter().collect();
        sheet.lines.push(Line::from(format!("{:>4} {marks}", row * per_row)));
    }
}

fn sheet(view: &View<'_>, area: Rect, colours: Colours) -> Vec<Line<'static>> {
    let (width, height) = (area.width as usize, area.height as usize);
    let mut sheet = Sheet { lines: Vec::new(), colours, width };
    heading(&mut sheet, view);
    if view.now.page.head.search_trials > 0 {
        search(&mut sheet, view);
        return sheet.lines;
    }
    figures(&mut sheet, view);
    ring(&mut sheet, view);
    tuning(&mut sheet, &view.now.page.head);
    let count = view.now.page.running().len();
    let per_row = width.saturating_sub(5).max(10) / 10 * 10;
    // A title, a warning, the rows; and the line of keys below.
    let below = if count > 0 { 2 + count.div_ceil(per_row) } else { 0 };
    let left = height.saturating_sub(sheet.lines.len() + below + 2);
    sequences(&mut sheet, view, left);
    workers(&mut sheet, view, height);
    sheet.lines
}

pub(super) fn draw(frame: &mut Frame<'_>, view: &View<'_>, colours: Colours) {
    let area = frame.area();
    let [body, foot] = [
        Rect { height: area.height.saturating_sub(1), ..area },
        Rect { y: area.height.saturating_sub(1), height: area.height.min(1), ..area },
    ];
    frame.render_widget(Paragraph::new(sheet(view, body, colours)), body);
    let others = match view.others {
        0 => String::new(),
        1 => "; 1 other process (--pid)".to_owned(),
        others => format!("; {others} other processes (--pid)"),
    };
    let keys = format!("q ends, p pauses{others}");
    frame.render_widget(Paragraph::new(keys).style(colours.style(Color::DarkGray)), foot);
}

/// The same as text, for `--once`.
pub(super) fn text(view: &View<'_>) -> String {
    let (width, height) = TEXT_SIZE;
    let lines = sheet(view, Rect::new(0, 0, width, height), Colours(false));
    let text = lines.iter().map(|line| line.to_string().trim_end().to_owned());
    text.collect::<Vec<String>>().join("\n")
}
