//! The part of a schedule that decides the bits of its results.

use super::{Knob, ScheduleConfig, id_of};

/// Whether another value of the knob may change the bits of the results. The assignment of rows to workers, the loading
/// of weights and the polling do not: the order in which a row's products are summed does not depend on the worker that
/// has the row (`reference-vm/tests/golden/devices.rs`).
#[must_use]
pub fn decides_bits(knob: Knob) -> bool {
    match knob {
        // A flag-in-data word has fewer bits for its value than a plain one.
        Knob::SyncEmbed
        | Knob::SyncQkv
        | Knob::SyncAttention
        | Knob::SyncMerge
        | Knob::SyncOProj
        | Knob::SyncGateUp
        | Knob::SyncDown
        // Fused phases hand over nothing, so they round nothing.
        | Knob::FusionGroupingEmbed
        | Knob::FusionGroupingMerge
        // The keys that are summed together.
        | Knob::TilingAttentionKvBlock
        | Knob::TilingAttentionKvSplit
        // The columns that are summed together, by stages of the ring.
        | Knob::PipelineStageBytes => true,
        Knob::PipelineStages
        | Knob::PipelineInFlightBytes
        | Knob::PipelineInFlightBeforeWaitBytes
        | Knob::TilingQkvRows
        | Knob::TilingOProjRows
        | Knob::TilingGateUpRows
        | Knob::TilingDownRows
        | Knob::TilingLmHeadRows
        | Knob::KernelPollSleepNs
        | Knob::KernelEvict
        | Knob::SmAssignmentPolicy => false,
    }
}

/// The id of what decides the bits of a schedule's results: schedules of one graph with equal ids give equal logits, on
/// any number of GPUs and workers.
#[must_use]
pub fn numeric_id(config: &ScheduleConfig) -> String {
    let deciding = Knob::ALL.iter().filter(|&&knob| decides_bits(knob));
    let values: String = deciding.map(|&knob| format!("{knob}={}\n", config.get(knob))).collect();
    id_of("numeric", &values)
}
