//! Limit rules: sizes, dimensions and the weight ring. Later code allocates and loops only by numbers that are bounded
//! here.

use crate::program::Program;
use crate::violation::{At, Rule, Violations};

/// Most bytes of the activation arena. A generous bound: the arena of a 70B model is a few megabytes.
const ARENA_BYTES_MAX: u64 = 1 << 32;

/// Most words of clocks that `verify` allocates: `tasks * workers`. Sixteen times those of a 70B program on 132
/// workers.
const CLOCK_WORDS_MAX: u64 = 1 << 27;

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    sizes(program, found);
    dims(program, found);
    pipeline(program, found);
}

fn limit(found: &mut Violations, detail: String) {
    found.push(Rule::PLimit, At::Whole, detail);
}

fn range(found: &mut Violations, what: &str, value: u64, low: u64, high: u64) {
    if !(low..=high).contains(&value) {
        limit(found, format!("{what} is {value}, not within {low}..={high}"));
    }
}

fn sizes(program: &Program, found: &mut Violations) {
    let tasks = program.task_len() as u64;
    let workers = program.workers_per_device() as u64;
    range(found, "number of workers of a device", workers, 1, abi::WORKERS_MAX.into());
    range(found, "number of tasks", tasks, 1, abi::TASKS_MAX.into());
    range(found, "number of buffers", program.buffers.len() as u64, 0, abi::BUFFERS_MAX.into());
    range(found, "number of matrices", program.matrices.len() as u64, 0, abi::BUFFERS_MAX.into());
    range(found, "number of counters", program.counters.into(), 0, abi::COUNTERS_MAX.into());
    range(found, "kv_capacity", program.kv_capacity.into(), 1, abi::KV_CAPACITY_MAX.into());
    range(found, "arena_bytes", program.arena_bytes, 0, ARENA_BYTES_MAX);
    range(
        found,
        "tasks times workers of a device",
        tasks.saturating_mul(workers),
        1,
        CLOCK_WORDS_MAX,
    );
}

fn dims(program: &Program, found: &mut Violations) {
    let d = &program.dims;
    range(found, "hidden", d.hidden.into(), 1, 1 << 20);
    range(found, "ffn", d.ffn.into(), 1, 1 << 20);
    range(found, "vocab", d.vocab.into(), 1, 1 << 24);
    range(found, "layers", d.layers.into(), 0, u64::from(u16::MAX) - 1);
    range(found, "heads", d.heads.into(), 1, 1 << 12);
    range(found, "kv_heads", d.kv_heads.into(), 1, d.heads.max(1).into());
    range(found, "head_dim", d.head_dim.into(), 1, abi::HEAD_DIM_MAX.into());
    if !d.head_dim.is_multiple_of(2) {
        limit(found, format!("head_dim is {}, and rotation needs pairs", d.head_dim));
    }
    if d.kv_heads == 0 || !d.heads.is_multiple_of(d.kv_heads) {
        limit(
            found,
            format!("{} heads do not divide among {} key/value heads", d.heads, d.kv_heads),
        );
    } else {
        let group = d.heads / d.kv_heads;
        range(found, "heads per key/value head", group.into(), 1, abi::GROUP_MAX.into());
    }
}

fn pipeline(program: &Program, found: &mut Violations) {
    let p = &program.pipeline;
    range(found, "pipeline.stages", p.stages.into(), 1, abi::STAGES_MAX.into());
    range(found, "pipeline.stage_units", p.stage_units.into(), 1, abi::STAGE_UNITS_MAX.into());
    range(found, "pipeline.in_flight", p.in_flight.into(), 1, p.stages.into());
    range(
        found,
        "pipeline.in_flight_before_wait",
        p.in_flight_before_wait.into(),
        1,
        p.in_flight.into(),
    );
    if !p.stage_units.is_power_of_two() {
        limit(found, format!("pipeline.stage_units is {}, not a power of two", p.stage_units));
    }
}
