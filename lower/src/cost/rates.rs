//! How fast a worker loads, multiplies and is told: numbers measured on one H200, scaled to other GPUs.
//!
//! **Measured** (one H200, Llama-3.2-1B shapes, bf16): stream and handoff against bytes in flight, the cost of small copies, what
//! consumers reach with nothing else to do. **Estimated**: how consumers scale with warps and unrolling, attention's fixed
//! part, the fixed part of a task. **Not modelled**: cache eviction hints, clocks, what workers do to each other beyond
//! sharing the bandwidth evenly.

use ir::program::Program;
use ir::{KernelConfig, Target};

const KIB: f64 = 1024.0;
const H200_WORKERS: f64 = 132.0;
const H200_BANDWIDTH: f64 = 4.67e12;

/// Bytes in flight per worker, and the stream of all workers in bytes per second.
const STREAM: &[(f64, f64)] = &[
    (0.0, 0.0),
    (16.0 * KIB, 3.08e12),
    (32.0 * KIB, 4.33e12),
    (48.0 * KIB, 4.61e12),
    (64.0 * KIB, 4.62e12),
    (96.0 * KIB, 4.64e12),
    (176.0 * KIB, 4.65e12),
];

/// Bytes in flight per worker, and microseconds of one counter handoff (four trips through L2).
const HANDOFF: &[(f64, f64)] = &[
    (0.0, 2.0),
    (16.0 * KIB, 3.4),
    (32.0 * KIB, 4.8),
    (48.0 * KIB, 6.8),
    (64.0 * KIB, 10.6),
    (96.0 * KIB, 17.7),
    (176.0 * KIB, 35.8),
];

/// Bytes of an activation vector that the measured handoff includes.
const HANDOFF_VECTOR_BYTES: f64 = 8.0 * KIB;

/// Reduction, epilogue and stores of a task (measured: 5 to 12 us for the 16 phases of one kind).
pub(super) const TASK_US: f64 = 0.6;

/// Norms, rotation and the softmax's reductions; estimated.
pub(super) const ATTENTION_US: f64 = 1.0;

/// The value at `x` on straight lines between the points; beyond the last one its line goes on.
fn interpolate(points: &[(f64, f64)], x: f64) -> f64 {
    let last = points.len() - 1;
    let upper = points.iter().position(|&(px, _)| x <= px).unwrap_or(last).max(1);
    let ((x0, y0), (x1, y1)) = (points[upper - 1], points[upper]);
    y0 + (y1 - y0) * (x - x0) / (x1 - x0)
}

/// The rates of one worker for one program and kernel. Bytes and microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    /// Bandwidth per worker over that of the H200: bytes in flight matter in proportion to it.
    scale: f64,
    stage_bytes: f64,
    /// Ring of landed weights.
    pub(super) ring: f64,
    /// Cap on bytes in flight near a handoff.
    near: f64,
    /// Stream inside a phase, and near a handoff.
    pub(super) stream: f64,
    pub(super) stream_near: f64,
    /// What the consumers multiply.
    pub(super) consume: f64,
    /// What a worker reads without the ring: keys, values, activations.
    pub(super) direct: f64,
    poll_us: f64,
}

impl Rates {
    pub(super) fn new(program: &Program, kernel: &KernelConfig, target: &Target) -> Self {
        let per_worker = target.bandwidth as f64 / program.workers.len().max(1) as f64;
        let scale = per_worker / (H200_BANDWIDTH / H200_WORKERS);
        let pipeline = program.pipeline;
        let stage_bytes = f64::from(pipeline.stage_units * abi::UNIT_BYTES);
        let in_flight = f64::from(pipeline.in_flight) * stage_bytes;
        let near = f64::from(pipeline.in_flight_near) * stage_bytes;
        let stream = |bytes: f64| {
            let measured = interpolate(STREAM, (bytes / scale).min(176.0 * KIB));
            measured / H200_BANDWIDTH * copy_efficiency(stage_bytes) * per_worker / 1e6
        };
        Self {
            scale,
            stage_bytes,
            ring: f64::from(pipeline.stages) * stage_bytes,
            near,
            stream: stream(in_flight),
            stream_near: stream(near),
            consume: CONSUMER / H200_WORKERS / 1e6 * f64::from(target.clock_mhz) / 1980.0,
            direct: per_worker / 1e6,
            poll_us: f64::from(kernel.poll_sleep_ns) / 2000.0,
        }
    }

    /// `trips` dependent trips through L2 to a worker with so many bytes free in its ring. They are slow while bytes are in
    /// flight; once the ring is full nothing is, and the rest goes at the speed of an idle machine.
    pub(super) fn trips(&self, trips: f64, free: f64) -> f64 {
        let loaded = trips / 4.0 * interpolate(HANDOFF, self.near / self.scale);
        let idle = trips / 4.0 * interpolate(HANDOFF, 0.0);
        let fill = free.max(0.0) / self.stream_near;
        if fill >= loaded { loaded } else { fill + (1.0 - fill / loaded) * idle }
    }

    /// Between two looks at a counter or tag, on average.
    pub(super) fn poll(&self) -> f64 {
        self.poll_us
    }

    /// Loading an activation vector, beyond what a handoff includes.
    pub(super) fn vector(&self, bytes: f64) -> f64 {
        (bytes - HANDOFF_VECTOR_BYTES).max(0.0) / self.direct
    }

    /// Multiplying `bytes` of weights of which `landed` are in the ring: the last stage is used after it has landed.
    pub(super) fn multiply(&self, bytes: f64, landed: f64) -> f64 {
        let tail = self.stage_bytes.min(bytes) / self.consume;
        (bytes / self.consume).max((bytes - landed).max(0.0) / self.stream + tail)
    }
}

/// Small copies cost: 8 KB 3 to 6 %, larger ones next to nothing.
fn copy_efficiency(stage_bytes: f64) -> f64 {
    interpolate(
        &[(0.0, 0.0), (8.0 * KIB, 0.965), (16.0 * KIB, 0.995), (32.0 * KIB, 0.998)],
        stage_bytes,
    )
    .min(1.0)
}

/// Bytes per second that all consumers of an H200 multiply when everything has landed: 452 cycles for a tile of 32 KB, measured.
const CONSUMER: f64 = 15.7e12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolation_meets_the_measured_points() {
        for &(x, y) in HANDOFF.iter().chain(STREAM) {
            let table = if y < 100.0 && (x > 0.0 || y > 0.0) { HANDOFF } else { STREAM };
            assert!((interpolate(table, x) - y).abs() <= 1e-9 * y, "{x}");
        }
        assert!((interpolate(HANDOFF, 8.0 * KIB) - 2.7).abs() < 1e-9);
        assert!(interpolate(HANDOFF, 400.0 * KIB) > 35.8);
    }
}
