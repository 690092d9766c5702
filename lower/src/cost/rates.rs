//! Rates of the cost model: a handful of named rates, fitted to measurements, and tables whose shape does not depend on
//! the kernel.
//!
//! The rates are in `rates.json`, which `amk calibrate --fit` writes from the measured grids under `corpus/grids/`. They
//! are those of an H200 and are scaled to other GPUs by bandwidth per multiprocessor. The tables were measured on an
//! H200 with a skeleton of the kernel: real bytes, real hand-offs, no arithmetic. **Not modelled**: clocks, and
//! interference between workers other than sharing the bandwidth.

use std::sync::OnceLock;

use abi::Unpack;
use ir::schedule::Evict;
use ir::{KernelConfig, Target};
use serde::{Deserialize, Serialize};

const KIB: f64 = 1024.0;
const H200_WORKERS: f64 = 132.0;
const H200_BANDWIDTH: f64 = 4.67e12;
const H200_CLOCK_MHZ: f64 = 1980.0;

/// Latency of a copy of so many bytes from memory, derived from the measured stream with one of them in flight.
const MEMORY_BYTES: f64 = 16.0 * KIB;
const MEMORY_US: f64 = MEMORY_BYTES / (3.08e12 / H200_WORKERS / 1e6);

/// Stages held in registers beyond the ring, where each warp loads its fragment of a stage at once: two fragments, which are
/// half a stage each in a kernel in which some units have scales (FRAGMENT in vm-device/cuda/unit_products.cuh).
const TAKEN_STAGES: [u32; 2] = [2, 1];

/// Stages of the ring that consumers hold while products run, so that nothing is in flight to them: where they read unit by
/// unit, those between the first warp and the last; else the one that the warps load into registers, which they give back
/// before they multiply.
const HELD_STAGES: [u32; 2] = [3, 1];

/// Measured: bytes in flight per worker, and the stream of all workers in bytes per second.
const STREAM: &[(f64, f64)] = &[
    (0.0, 0.0),
    (16.0 * KIB, 3.08e12),
    (32.0 * KIB, 4.33e12),
    (48.0 * KIB, 4.61e12),
    (64.0 * KIB, 4.62e12),
    (96.0 * KIB, 4.64e12),
    (176.0 * KIB, 4.65e12),
];

/// Measured: bytes in flight per worker, and the delay in microseconds that they add to one trip through L2.
const QUEUE: &[(f64, f64)] = &[
    (0.0, 0.0),
    (16.0 * KIB, 0.35),
    (32.0 * KIB, 0.7),
    (48.0 * KIB, 1.2),
    (64.0 * KIB, 2.15),
    (96.0 * KIB, 3.925),
    (176.0 * KIB, 8.45),
];

/// Bytes in flight up to which a wait sees the delay for as long as it lasts.
const QUEUE_KNEE: f64 = 32.0 * KIB;

/// Time that codes add to the products of 1 KiB of them: instructions between the ring and the tensor cores, per unit and warp.
/// From traces of an H200, as time of products without a wait for a stage beyond what as many bytes of operands take: floats
/// docs/lab/2026-11-26-cost-model-again.md, integers in groups docs/lab/2026-11-28-integers-for-all-codes.md. Not measured,
/// and taken from the format that has most of the same code: integers of 8 bits with a scale per row, and zero points.
const fn unpack_kib_us(unpack: Unpack) -> f64 {
    match unpack {
        Unpack::None => 0.0,
        Unpack::E4m3 | Unpack::Int8 => 0.004,
        Unpack::E4m3G64 | Unpack::E4m3G64Row => 0.011,
        Unpack::Mxfp4 => 0.042,
        Unpack::Int8G32 => 0.007,
        Unpack::Int8K => 0.010,
        Unpack::Int4G128 | Unpack::Int4G128Zero | Unpack::Int4K => 0.013,
        Unpack::Int4G32 => 0.015,
    }
}

macro_rules! rates {
    ($($(#[doc = $doc:literal])+ $name:ident: [$low:literal, $high:literal],)+) => {
        /// The fitted rates, for one H200. Times in microseconds.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Rates { $($(#[doc = $doc])+ pub $name: f64,)+ }

        impl Rates {
            /// Name, least and greatest value of a fit, in the order of the table.
            pub const TABLE: &'static [(&'static str, f64, f64)] = &[$((stringify!($name), $low, $high)),+];

            /// The value of a row of the table.
            #[must_use]
            pub fn get(&self, index: usize) -> f64 {
                [$(self.$name),+][index]
            }

            /// The same rates with another value in a row of the table.
            #[must_use]
            pub fn with(mut self, index: usize, value: f64) -> Self {
                let places = [$(&mut self.$name),+];
                *places.into_iter().nth(index).expect("a row of the table") = value;
                self
            }
        }
    };
}

rates! {
    /// One trip of a message through L2 with nothing else in flight.
    trip_us: [0.2, 1.5],
    /// Fraction of the measured delay by bytes in flight that a message really sees.
    queue_share: [0.9, 1.1],
    /// The same for the delay by the bytes in flight beyond 32 KiB, which a wait sees only until they have arrived.
    queue_more_share: [0.0, 1.5],
    /// Fraction of the delay by bytes in flight that remains where no other worker loads. The table was measured with all
    /// of them loading; in between the delay grows with the square of the bandwidth that the step uses.
    queue_alone_share: [0.0, 1.0],
    /// Cost of a counter hand-off beyond four trips.
    counter_us: [0.0, 3.0],
    /// Average delay of a hand-off whose poller sleeps between two looks. It does not grow with
    /// `kernel.poll_sleep_ns`: 100 ns instead of 0 cost 15 to 76 ns on a card, 20 ns some 56 (corpus/checks).
    poll_us: [0.0, 0.4],
    /// From a task's end to its worker's first look at the next one's input. The other workers' words arrive meanwhile, so it
    /// counts only where a worker has a task in the phase before. Measured: 0.52 to 0.61 after the begin of a task.
    begin_us: [0.4, 1.0],
    /// Fixed part of a product task: descriptor, reduction over warps, epilogue, stores.
    task_us: [0.1, 2.0],
    /// Staging 1 024 elements of the input vector.
    vector_us: [0.1, 0.3],
    /// Taking a stage out of the ring, by its consumers.
    stage_us: [0.0, 1.0],
    /// Multiplying 1 KiB of weights that have arrived.
    kib_us: [0.0, 0.03],
    /// Cost per stage beyond its bytes where the warps read it unit by unit, instead of each loading its fragment into
    /// registers at once.
    odd_stage_us: [0.0, 1.0],
    /// Cost per tile there, beyond its bytes.
    odd_tile_us: [0.0, 1.5],
    /// Fraction of the measured stream that the loader reaches.
    stream_share: [0.95, 1.0],
    /// From a stage's arrival to the next request: the wait of a loader with few bytes in flight, beyond the trip
    /// to memory.
    issue_us: [0.0, 1.0],
    /// From a freed stage to the arrival of what refills it, beyond the trip to memory.
    refill_us: [0.0, 1.0],
    /// Additional time of a copy to arrive, per KiB beyond 16.
    copy_kib_us: [0.0, 0.03],
    /// Fraction of the unused bandwidth that the workers that load get: inside a phase that of workers with less to do in
    /// it, before a wait that of workers whose rings are full.
    idle_share: [0.0, 1.0],
    /// Fixed part of attention if there are keys.
    attention_us: [0.2, 6.0],
    /// Attention over 256 keys, one pass of all warps.
    pass_us: [0.2, 3.0],
    /// How much later a worker that attended begins its next task, beyond the end of its attention.
    attended_us: [0.0, 4.0],
    /// Fixed part of a merge of several active splits, as a phase or in front of the output projection.
    merge_us: [0.0, 4.0],
    /// Merging one split in front of the output projection.
    fused_split_us: [0.0, 2.0],
    /// Merging one split in a phase of its own.
    split_us: [0.0, 1.0],
    /// The other ops: copying a part of an embedding row, choosing a token.
    small_us: [0.0, 4.0],
    /// Between two steps: publishing the last token until every worker sees it.
    step_us: [0.0, 20.0],
    /// Fraction of the stream lost when it does not mark its lines for eviction first.
    evict_normal_share: [0.0, 0.2],
}

/// The contents of the rates file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateFile {
    /// The measurements that they were fitted to.
    pub source: String,
    /// The rates.
    pub rates: Rates,
}

impl Rates {
    /// The rates that predictions use.
    #[must_use]
    pub fn shipped() -> &'static Self {
        static SHIPPED: OnceLock<RateFile> = OnceLock::new();
        let read = || {
            serde_json::from_str(include_str!("rates.json")).expect("rates.json is read by a test")
        };
        &SHIPPED.get_or_init(read).rates
    }
}

/// Piecewise linear interpolation at `x`; beyond the last point its line is extrapolated.
fn interpolate(points: &[(f64, f64)], x: f64) -> f64 {
    let last = points.len() - 1;
    let upper = points.iter().position(|&(px, _)| x <= px).unwrap_or(last).max(1);
    let ((x0, y0), (x1, y1)) = (points[upper - 1], points[upper]);
    y0 + (y1 - y0) * (x - x0) / (x1 - x0)
}

/// Flow of one kind of task's weights through the ring of a worker. The ring is counted in stages, since a stage is taken
/// however little of it is filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    /// Stages of the ring.
    pub(super) ring: f64,
    /// Stages of the task that its warps load into registers before its input arrives, which frees them.
    pub(super) taken: f64,
    /// Stages of the task.
    pub(super) needed: f64,
    /// Bytes of a stage.
    pub(super) payload: f64,
    /// Stages per microsecond that arrive inside a phase, and before a wait, with every worker streaming.
    pub(super) stream: f64,
    pub(super) stream_before_wait: f64,
    /// Stages per microsecond that the bytes in flight allow if no other worker streams.
    pub(super) alone: f64,
    /// From a request to the next one in its place, where nothing but the bytes in flight limits the stream.
    pub(super) round: f64,
    /// Multiplying one byte, and the additional cost per stage and per tile.
    pub(super) byte: f64,
    pub(super) stage: f64,
    pub(super) tile: f64,
    /// Stages in flight before a wait at most.
    pub(super) before_wait: f64,
    /// From a request to its arrival.
    pub(super) refill: f64,
}

/// The parameters of a [`Flow`]: the ring's stages, and how the task fills and uses them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    pub(super) stages: u32,
    pub(super) in_flight: u32,
    pub(super) in_flight_before_wait: u32,
    /// Bytes of an average stage.
    pub(super) payload: f64,
    /// Whether each warp loads its fragment of a stage into registers at once.
    pub(super) even: bool,
    /// Stages of the task.
    pub(super) needed: f64,
    /// What is done to its weights before they are multiplied.
    pub(super) unpack: Unpack,
    /// Whether some units of the kernel have scales.
    pub(super) scaled: bool,
}

/// Microseconds that a hand-off to all devices takes longer than one within a device: an exchange of finished rows between
/// two or four H200s over NVLink, beside the weight stream. One word takes 0.63 to 0.74 one way.
pub(super) const LINK_US: f64 = 0.6;

/// The rates of one worker for one kernel and GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speeds {
    pub(super) rates: Rates,
    /// Bandwidth per worker relative to the H200's: the effect of bytes in flight is proportional to it.
    scale: f64,
    /// Bytes per microsecond per worker at the full bandwidth.
    per_worker: f64,
    /// Cycle time of an H200 over that of this GPU.
    clock: f64,
    evict: f64,
    /// Average delay of a hand-off by sleeps between polls.
    pub(super) poll: f64,
    /// Fraction of the bandwidth that the step before used; the first one takes all of it.
    busy: f64,
}

impl Speeds {
    pub(super) fn new(
        rates: &Rates,
        workers: usize,
        kernel: &KernelConfig,
        target: &Target,
    ) -> Self {
        // Each device reads its own memory.
        let workers = workers / target.devices.max(1) as usize;
        let per_worker = target.bandwidth as f64 / workers.max(1) as f64;
        let evict = match kernel.evict {
            Evict::Normal => 1.0 - rates.evict_normal_share,
            Evict::First => 1.0,
        };
        Self {
            rates: *rates,
            scale: per_worker / (H200_BANDWIDTH / H200_WORKERS),
            per_worker: per_worker / 1e6,
            clock: f64::from(target.clock_mhz) / H200_CLOCK_MHZ,
            evict,
            poll: if kernel.poll_sleep_ns > 0 { rates.poll_us } else { 0.0 },
            busy: 1.0,
        }
    }

    pub(super) fn flow(&self, shape: &Shape) -> Flow {
        let rates = &self.rates;
        let byte = (rates.kib_us + unpack_kib_us(shape.unpack)) / KIB / self.clock;
        let taken = f64::from(TAKEN_STAGES[usize::from(shape.scaled)]);
        let stage = if shape.even { rates.stage_us } else { rates.odd_stage_us } / self.clock;
        let held = HELD_STAGES[usize::from(shape.even)];
        let free = shape.stages.saturating_sub(held).max(1);
        let in_flight = f64::from(shape.in_flight.min(free)) * shape.payload;
        let before_wait = f64::from(shape.in_flight_before_wait) * shape.payload;
        let copy = (shape.payload - MEMORY_BYTES).max(0.0) / KIB * rates.copy_kib_us;
        let memory = MEMORY_US + copy + rates.issue_us;
        // While products run, a stage becomes free once it has arrived and been multiplied.
        let refill = in_flight / (memory + stage + shape.payload * byte);
        Flow {
            ring: f64::from(shape.stages),
            taken: if shape.even { shape.needed.min(taken) } else { 0.0 },
            needed: shape.needed,
            payload: shape.payload,
            stream: self.stream(in_flight, memory) / shape.payload,
            stream_before_wait: self.stream(before_wait, memory) / shape.payload,
            alone: refill / shape.payload,
            round: memory,
            byte,
            stage,
            tile: if shape.even { 0.0 } else { rates.odd_tile_us / self.clock },
            before_wait: f64::from(shape.in_flight_before_wait),
            refill: MEMORY_US + copy + rates.refill_us,
        }
    }

    /// Notes how much of the bandwidth of all workers a step uses that streams so many bytes in so many microseconds, for
    /// the steps that follow.
    pub(super) fn note_step(&mut self, bytes: f64, us: f64, workers: usize) {
        let used = bytes / (us * self.per_worker * workers as f64);
        self.busy = used.clamp(f64::MIN_POSITIVE, 1.0);
    }

    /// Delay of a trip by this many bytes in flight to its worker.
    pub(super) fn queue(&self, in_flight: f64) -> f64 {
        let in_flight = in_flight / self.scale;
        let little = interpolate(QUEUE, in_flight.min(QUEUE_KNEE));
        let more = interpolate(QUEUE, in_flight) - little;
        let alone = self.rates.queue_alone_share;
        let seen = alone + (1.0 - alone) * self.busy.powi(2);
        seen * (self.rates.queue_share * little + self.rates.queue_more_share * more)
    }

    /// Bytes per microsecond with this many in flight that take `memory` microseconds, while every worker streams.
    fn stream(&self, in_flight: f64, memory: f64) -> f64 {
        let measured = interpolate(STREAM, (in_flight / self.scale).min(176.0 * KIB));
        let share = measured / H200_BANDWIDTH * self.rates.stream_share * self.evict;
        (share.min(1.0) * self.per_worker).min(in_flight / memory)
    }

    /// Stages per microsecond of a worker in a phase whose workers stream on average `mean` times what it streams: those
    /// that finish early leave it their bandwidth.
    pub(super) fn stream_of(&self, flow: &Flow, mean: f64) -> f64 {
        (flow.stream * self.left(mean)).min(flow.alone.max(flow.stream))
    }

    /// Stages per microsecond of a worker before a wait, into a ring with `free` stages free: no more are in flight.
    pub(super) fn stream_before_wait(&self, flow: &Flow, free: f64) -> f64 {
        let in_flight = free.min(flow.before_wait).max(1.0);
        (flow.stream_before_wait * self.left(self.busy)).min(in_flight / flow.round)
    }

    /// How many times its part of the bandwidth a worker gets, where the fraction `used` of all is used.
    fn left(&self, used: f64) -> f64 {
        let used = used.clamp(f64::MIN_POSITIVE, 1.0);
        1.0 + self.rates.idle_share * (1.0 / used - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolation_meets_the_measured_points() {
        for table in [QUEUE, STREAM] {
            for &(x, y) in table {
                assert!((interpolate(table, x) - y).abs() <= 1e-9 * y, "{x}");
            }
        }
        assert!((interpolate(QUEUE, 8.0 * KIB) - 0.175).abs() < 1e-9);
        assert!(interpolate(QUEUE, 400.0 * KIB) > 8.45);
    }

    #[test]
    fn the_shipped_rates_are_in_their_bounds_and_say_where_they_are_from() {
        let file: RateFile = serde_json::from_str(include_str!("rates.json")).expect("rates.json");
        assert!(!file.source.is_empty());
        for (index, &(name, low, high)) in Rates::TABLE.iter().enumerate() {
            let value = file.rates.get(index);
            assert!((low..=high).contains(&value), "{name} is {value}, not in {low} to {high}");
            assert_eq!(file.rates.with(index, low).get(index), low);
        }
    }
}
