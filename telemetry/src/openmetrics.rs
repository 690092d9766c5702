//! A page as OpenMetrics text. The encoder is Prometheus's own; this file maps the words of the page to metrics.

use std::fmt::{Error, Write as _};

use abi::{Activity, EntryState, SequenceEnd, Telemetry, ThrottleReason};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::ops;
use crate::page::{Page, now_ns, text};
use crate::rates::spent_ns;
use crate::steps::{BUCKETS, upper_ns};

/// Number of buckets merged into one: bounds every half octave. Any of the page's bounds would be exact.
const MERGED: usize = 4;

/// A metric without labels.
struct Plain {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    kind: MetricType,
    value: fn(&Telemetry) -> f64,
}

const SECONDS: Option<Unit> = Some(Unit::Seconds);
const BYTES: Option<Unit> = Some(Unit::Bytes);

macro_rules! plain {
    ($($kind:ident $name:literal $unit:expr, $help:literal, $value:expr;)+) => {
        /// The metrics without labels: name, unit, help, source.
        const PLAIN: &[Plain] = &[$(Plain {
            name: $name, help: $help, unit: $unit, kind: MetricType::$kind, value: $value,
        }),+];
    };
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn entered(head: &Telemetry, state: EntryState) -> f64 {
    head.entered[state as usize] as f64
}

plain! {
    Gauge "start_time" SECONDS, "When the process made its page, since 1970.", |h| seconds(h.started_ns);
    Gauge "last_write_time" SECONDS, "When the page was last written, since 1970.", |h| seconds(h.beat_ns);
    Gauge "workers" None, "Workers of the machine.", |h| f64::from(h.workers);
    Gauge "places" None, "Sequences that can be open at once.", |h| f64::from(h.places);
    Gauge "waiting_requests" None, "Requests that wait for a place.", |h| f64::from(h.waiting);
    Counter "commands_published" None, "Commands published to the machine.", |h| h.published as f64;
    Counter "commands_drained" None, "Commands that it has completed.", |h| h.drained as f64;
    Counter "commands_unseen" None, "Of these, commands whose positions and times are not counted.", |h| h.unseen as f64;
    Counter "turns" None, "Turns given to sequences.", |h| entered(h, EntryState::Claimed);
    Counter "yields" None, "Turns after which a sequence yielded.", |h| entered(h, EntryState::Yield);
    Counter "requeues" None, "Times that a sequence was queued again.", |h| entered(h, EntryState::Requeue);
    Counter "io_waits" None, "Turns whose weights had not arrived.", |h| entered(h, EntryState::WaitIo);
    Counter "faults" None, "Times that a sequence's command failed.", |h| entered(h, EntryState::Fault);
    Counter "traps" None, "Commands of a kernel that trapped.", |h| h.traps as f64;
    Counter "sequences_opened" None, "Sequences that were opened.", |h| h.opened as f64;
    Counter "device_running" SECONDS, "Time from taking a command up to completing it, by the device's clock.", |h| seconds(h.device_running_ns);
    Counter "device_idle" SECONDS, "Time from completing a command to taking up the next one, by the device's clock.", |h| seconds(h.device_idle_ns);
    Gauge "step_weights" BYTES, "Weights that a step reads.", |h| h.step_bytes as f64;
    Gauge "bandwidth_bytes_per_second" None, "Bandwidth measured on the card; zero without a card.", |h| h.bandwidth as f64;
    Gauge "resident" BYTES, "Weights and caches on the device.", |h| h.resident_bytes as f64;
    Gauge "weights" BYTES, "Weights to be loaded onto the device.", |h| h.weights_bytes as f64;
    Gauge "weights_arrived" BYTES, "Weights that have arrived.", |h| h.arrived_bytes as f64;
    Counter "streamed" BYTES, "Weights, keys and values that loaders requested.", |h| h.streamed_bytes as f64;
    Counter "uploaded" BYTES, "Bytes copied to the device.", |h| h.uploaded_bytes as f64;
    Counter "avoided" BYTES, "Bytes not copied because they were on the device already.", |h| h.avoided_bytes as f64;
    Gauge "kv_pages" None, "Pages of keys and values on the device.", |h| f64::from(h.kv_pages);
    Gauge "kv_pages_held" None, "Of these, pages that sequences hold.", |h| f64::from(h.kv_held);
    Gauge "kv_pages_promised" None, "Pages that sequences hold or were promised.", |h| f64::from(h.kv_promised);
    Counter "batches" None, "Commands that ran several sequences at once.", |h| h.batches as f64;
    Counter "batched_turns" None, "Turns of sequences in these commands.", |h| h.batched as f64;
    Counter "windows" None, "Steps of one sequence that checked guessed tokens.", |h| h.windows as f64;
    Counter "guessed_tokens" None, "Tokens guessed for these steps.", |h| h.guessed as f64;
    Counter "accepted_tokens" None, "Guessed tokens that were right.", |h| h.accepted as f64;
    Counter "launches" None, "Times that a kernel was launched.", |h| h.launches as f64;
    Counter "program_loads" None, "Programs loaded.", |h| h.loads as f64;
    Gauge "suspected_workers" None, "Workers with no progress for longer than the limit while a step is under way.", |h| f64::from(h.suspected);
    Counter "suspicions" None, "Times that such a suspicion arose.", |h| h.suspicions as f64;
    Counter "telemetry_writes" None, "Writes of this page.", |h| h.writes as f64;
    Counter "telemetry" SECONDS, "Time spent writing this page.", |h| seconds(h.write_ns);
}

/// Names of priorities, lowest first.
const PRIORITIES: [&str; 3] = ["low", "normal", "high"];

#[derive(Debug)]
struct Snapshot(Box<Page>);

/// A metric with one label: its name, its label's name, its help, its unit and kind, and its values by label.
type Family =
    (&'static str, &'static str, &'static str, Option<Unit>, MetricType, Vec<(String, f64)>);

impl Snapshot {
    fn families(&self) -> [Family; 8] {
        use MetricType::{Counter, Gauge};
        let (head, now) = (&self.0.head, now_ns());
        let by_state = |state: &EntryState| {
            (state.name().to_owned(), f64::from(head.occupancy[*state as usize]))
        };
        let by_end =
            |end: &SequenceEnd| (end.name().to_owned(), head.endings[*end as usize] as f64);
        let by_priority = |values: &[u64]| {
            let named = PRIORITIES.iter().zip(values);
            named.map(|(priority, value)| ((*priority).to_owned(), *value as f64)).collect()
        };
        let spent = Activity::ALL.iter().filter(|activity| **activity != Activity::Ended);
        let spent = spent
            .map(|activity| (activity.name().to_owned(), seconds(spent_ns(head, *activity, now))));
        let by_place = |value: fn(&abi::SessionWords) -> u64| {
            let open = self.0.open();
            open.map(|(place, session)| (place.to_string(), value(session) as f64)).collect()
        };
        let states = EntryState::ALL.iter().map(by_state).collect();
        let endings = SequenceEnd::ALL.iter().map(by_end).collect();
        let positions = by_priority(&head.priority_positions);
        let tokens = by_priority(&head.priority_tokens);
        let (ran, goals) = (by_place(|s| s.positions), by_place(|s| s.goal));
        [
            ("occupancy", "state", "Places by the state of their command.", None, Gauge, states),
            ("sequences_ended", "outcome", "Sequences ended, by outcome.", None, Counter, endings),
            ("positions", "priority", "Positions run, by priority.", None, Counter, positions),
            ("tokens", "priority", "Tokens chosen, by priority.", None, Counter, tokens),
            (
                "tasks",
                "op",
                "Tasks run by op: those of a pass of the program times its passes.",
                None,
                Counter,
                ops::named(&ops::tasks(&self.0))
                    .map(|(op, tasks)| (op.to_owned(), tasks as f64))
                    .collect(),
            ),
            ("activity", "activity", "Time spent, by activity.", SECONDS, Counter, spent.collect()),
            (
                "place_positions",
                "place",
                "Positions run by the sequence that is open in a place.",
                None,
                Gauge,
                ran,
            ),
            (
                "place_positions_goal",
                "place",
                "Maximum positions that it may run.",
                None,
                Gauge,
                goals,
            ),
        ]
    }

    /// The GPU, once it was read; what it cannot tell is left out.
    fn gpu(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        use MetricType::{Counter, Gauge};
        let Some(gpu) = self.0.head.gpu() else { return Ok(()) };
        let other = |unit: &str| Some(Unit::Other(unit.to_owned()));
        let hertz = |mhz: u32| Some(f64::from(mhz) * 1e6);
        let rows = [
            (
                "gpu_sm_clock",
                other("hertz"),
                Gauge,
                "Clock of the multiprocessors.",
                hertz(gpu.sm_mhz),
            ),
            (
                "gpu_memory_clock",
                other("hertz"),
                Gauge,
                "Clock of the memory.",
                hertz(gpu.memory_mhz),
            ),
            ("gpu_power", other("watts"), Gauge, "Power that the GPU draws.", gpu.power_w),
            (
                "gpu_power_limit",
                other("watts"),
                Gauge,
                "Power that it may draw.",
                gpu.power_limit_w,
            ),
            (
                "gpu_temperature",
                Some(Unit::Celsius),
                Gauge,
                "Temperature of the chip.",
                gpu.temperature_c.map(f64::from),
            ),
            (
                "gpu_busy",
                other("ratio"),
                Gauge,
                "Share of the driver's last sampling period in which a kernel ran.",
                gpu.busy_percent.map(|percent| f64::from(percent) / 100.0),
            ),
            (
                "gpu_ecc_errors",
                None,
                Counter,
                "Memory errors since the driver was loaded that were not corrected.",
                gpu.ecc_errors.map(f64::from),
            ),
            ("gpu_links", None, Gauge, "NVLinks that are up.", gpu.links.map(f64::from)),
        ];
        for (name, unit, kind, help, value) in rows {
            let Some(value) = value else { continue };
            number(encoder.encode_descriptor(name, help, unit.as_ref(), kind)?, kind, value)?;
        }
        let help = "Whether the clocks are held down, by reason.";
        let mut family = encoder.encode_descriptor("gpu_throttled", help, None, Gauge)?;
        for why in ThrottleReason::ALL {
            let holds = f64::from(u8::from(gpu.throttled.contains(why)));
            number(family.encode_family(&[("reason", why.name())])?, Gauge, holds)?;
        }
        Ok(())
    }

    fn steps(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let head = &self.0.head;
        let about = "Steps of the machine, one position each.";
        let mut metric = encoder.encode_descriptor(
            "step_duration",
            about,
            SECONDS.as_ref(),
            MetricType::Histogram,
        )?;
        let buckets: Vec<(f64, u64)> = (0..BUCKETS)
            .step_by(MERGED)
            .map(|first| {
                let merged = &head.steps[first..first + MERGED];
                let count = merged.iter().fold(0_u64, |sum, count| sum.wrapping_add(*count));
                (upper_ns(first + MERGED - 1).map_or(f64::INFINITY, seconds), count)
            })
            .collect();
        metric.encode_histogram::<NoLabelSet>(
            seconds(head.steps_ns),
            self.0.step_count(),
            &buckets,
            None,
        )
    }
}

fn number(mut encoder: MetricEncoder<'_>, kind: MetricType, value: f64) -> Result<(), Error> {
    if matches!(kind, MetricType::Counter) {
        encoder.encode_counter::<NoLabelSet, f64, f64>(&value, None)
    } else {
        encoder.encode_gauge(&value)
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let head = &self.0.head;
        let labels = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("command", text(&head.command)),
            ("model", text(&head.model)),
            ("device", text(&head.device)),
            ("pid", head.pid.to_string()),
        ];
        let mut build = encoder.encode_descriptor(
            "process",
            "The process of these metrics.",
            None,
            MetricType::Info,
        )?;
        build.encode_info(&labels)?;
        for plain in PLAIN {
            let metric = encoder.encode_descriptor(
                plain.name,
                plain.help,
                plain.unit.as_ref(),
                plain.kind,
            )?;
            number(metric, plain.kind, (plain.value)(head))?;
        }
        for (name, label, help, unit, kind, values) in self.families() {
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
            for (of, value) in values {
                number(family.encode_family(&[(label, of)])?, kind, value)?;
            }
        }
        self.gpu(&mut encoder)?;
        self.steps(&mut encoder)
    }
}

/// A metric that is not on the page: the samples of one name.
#[derive(Clone, Debug)]
pub struct MetricFamily {
    /// Its name without prefix, unit and suffix.
    pub name: &'static str,
    /// What it counts or shows.
    pub help: &'static str,
    /// Whether it is in seconds; otherwise it has no unit.
    pub in_seconds: bool,
    /// Whether it only grows; otherwise it is a gauge.
    pub only_grows: bool,
    /// The values by labels.
    pub samples: Vec<(Vec<(&'static str, String)>, f64)>,
}

#[derive(Debug)]
struct Families(Vec<MetricFamily>);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        for MetricFamily { name, help, in_seconds, only_grows, samples } in &self.0 {
            let unit = SECONDS.filter(|_| *in_seconds);
            let kind = || if *only_grows { MetricType::Counter } else { MetricType::Gauge };
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind())?;
            for (labels, value) in samples {
                number(family.encode_family(labels)?, kind(), *value)?;
            }
        }
        Ok(())
    }
}

/// The page as text.
#[must_use]
pub fn openmetrics(page: Box<Page>) -> String {
    encoded(Box::new(Snapshot(page)))
}

/// Other metrics as text.
#[must_use]
pub fn openmetrics_of(families: Vec<MetricFamily>) -> String {
    encoded(Box::new(Families(families)))
}

fn encoded(collector: Box<dyn Collector>) -> String {
    let mut registry = Registry::with_prefix("amk");
    registry.register_collector(collector);
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, &registry).is_err() {
        // Writing to a string cannot fail. A partial page would look complete, so nothing is written.
        text.clear();
        let _ = writeln!(text, "# EOF");
    }
    text
}

#[cfg(test)]
mod tests {
    use abi::GpuState;

    use super::*;

    /// The value of a name with its labels.
    fn value(text: &str, name: &str) -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }

    #[test]
    fn every_word_becomes_a_metric_of_its_kind() {
        let mut page = Page::boxed();
        page.head.model[..6].copy_from_slice(b"a\"b\\c\n");
        page.head.endings[SequenceEnd::Stop as usize] = 3;
        page.head.occupancy[EntryState::Claimed as usize] = 1;
        page.head.tokens = 7;
        page.head.priority_tokens[1] = 7;
        page.head.write_ns = 1_500_000_000;
        page.head.steps[crate::bucket(600_000)] = 4;
        page.head.steps[BUCKETS - 1] = 1;
        page.head.steps_ns = 2_000_000_000;
        (page.sessions[3].serial, page.sessions[3].positions) = (9, 12);
        assert!(!openmetrics(page.clone()).contains("amk_gpu"), "no GPU was read");
        page.head.set_gpu(&GpuState {
            sm_mhz: 1755,
            power_w: Some(699.5),
            ecc_errors: Some(2),
            busy_percent: Some(97),
            throttled: vec![ThrottleReason::PowerCap],
            ..GpuState::default()
        });
        let text = openmetrics(page);
        assert!(text.ends_with("# EOF\n"), "{text}");
        assert!((value(&text, "amk_gpu_sm_clock_hertz") - 1.755e9).abs() < 1e-9);
        assert!((value(&text, "amk_gpu_power_watts") - 699.5).abs() < 1e-9);
        assert!((value(&text, "amk_gpu_busy_ratio") - 0.97).abs() < 1e-9);
        assert!((value(&text, "amk_gpu_ecc_errors_total") - 2.0).abs() < 1e-9);
        assert!((value(&text, "amk_gpu_throttled{reason=\"power cap\"}") - 1.0).abs() < 1e-9);
        assert!(value(&text, "amk_gpu_throttled{reason=\"power brake\"}").abs() < 1e-9);
        assert!(!text.contains("amk_gpu_temperature"), "what the GPU cannot tell is left out");
        assert!(text.contains("model=\"a\\\"b\\\\c\""), "{text}");
        assert!((value(&text, "amk_sequences_ended_total{outcome=\"stop\"}") - 3.0).abs() < 1e-9);
        assert!((value(&text, "amk_occupancy{state=\"claimed\"}") - 1.0).abs() < 1e-9);
        assert!((value(&text, "amk_tokens_total{priority=\"normal\"}") - 7.0).abs() < 1e-9);
        assert!((value(&text, "amk_telemetry_seconds_total") - 1.5).abs() < 1e-9);
        assert!((value(&text, "amk_place_positions{place=\"3\"}") - 12.0).abs() < 1e-9);
        assert!((value(&text, "amk_step_duration_seconds_count") - 5.0).abs() < 1e-9);
        assert!((value(&text, "amk_step_duration_seconds_sum") - 2.0).abs() < 1e-9);
        assert!((value(&text, "amk_step_duration_seconds_bucket{le=\"+Inf\"}") - 5.0).abs() < 1e-9);
        let helps = text.lines().filter(|line| line.starts_with("# HELP")).count();
        let types = text.lines().filter(|line| line.starts_with("# TYPE")).count();
        assert_eq!(helps, types);
        assert!(helps > 35, "{helps}");
    }
}
