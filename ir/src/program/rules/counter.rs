//! Counter rules: every wait can be satisfied, and is for all arrivals. After a wait for some of several arrivals it is
//! unknown which ones have arrived.

use crate::id::CounterId;
use crate::program::{Program, Wait};
use crate::violation::{At, Rule, Violations};

use super::{on_devices, tasks};

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    // Each device has its own.
    let counters = program.counters as usize;
    let mut arrivals = vec![0_u32; counters * program.topology.devices as usize];
    for (device, task) in on_devices(program) {
        if let Some(counter) = task.signal {
            arrivals[device as usize * counters + counter.index()] += 1;
        }
    }
    for ((device, task), (at, _)) in on_devices(program).zip(tasks(program)) {
        for &Wait { counter, count } in &task.waits {
            let have = arrivals[device as usize * counters + counter.index()];
            if count == 0 || count > have {
                let detail = format!("waits for {count} arrivals of {counter}, which gets {have}");
                found.push(Rule::CSatisfiable, at.clone(), detail);
            } else if count != have {
                let detail = format!("waits for {count} of the {have} arrivals of {counter}");
                found.push(Rule::CAlljoin, at.clone(), detail);
            }
            if u64::from(count) * u64::from(program.kv_capacity) > u64::from(u32::MAX) {
                found.push(Rule::CWidth, at.clone(), width(count, program));
            }
        }
    }
    for (index, &have) in arrivals.iter().enumerate() {
        if u64::from(have) * u64::from(program.kv_capacity) > u64::from(u32::MAX) {
            found.push(
                Rule::CWidth,
                At::Counter(CounterId((index % counters) as u32)),
                width(have, program),
            );
        }
    }
}

fn width(count: u32, program: &Program) -> String {
    format!("{count} arrivals in each of {} steps do not fit into 32 bits", program.kv_capacity)
}
