//! Faults that make a running device wait forever, for tests of the code that must notice. Only in builds
//! with assertions, that is not in a release.
//!
//! Programs are spoiled on the device, after their verification: nothing here makes a `Verified<Program>`.

use abi::{NONE, ProgramHeader, Queue, Task};
use ir::program::{Program, Verified};

use crate::error::HostError;
use crate::machine::Resident;

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A task does not signal the counter that others wait for.
    MissingSignal,
    /// A task waits for one that waits for it.
    CyclicWait,
    /// A task waits for one arrival more than there are.
    WrongThreshold,
    /// A worker's load list is empty, and its tasks wait for bytes.
    StuckLoader,
    /// A command is lost: the device waits for one entry of the ring, while the host writes the next.
    LostCommand,
    /// Every word of the ring that the host can write is overwritten.
    ScribbledRing,
    /// The tasks are at an unmapped address.
    BadAddress,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::MissingSignal,
        Self::CyclicWait,
        Self::WrongThreshold,
        Self::StuckLoader,
        Self::LostCommand,
        Self::ScribbledRing,
        Self::BadAddress,
    ];
}

impl Resident {
    /// Makes the next command meet a fault: loads a program beside the current one, spoils it there and switches to it.
    ///
    /// # Errors
    /// If that fails, or the fault does not apply to the program.
    pub fn spoil(&mut self, program: &Verified<Program>, fault: Fault) -> Result<(), HostError> {
        self.spoil_on(0, program, fault)
    }

    /// The same on one of several devices, where the fault is one of its tables.
    ///
    /// # Errors
    /// The same.
    pub fn spoil_on(
        &mut self,
        device: u32,
        program: &Verified<Program>,
        fault: Fault,
    ) -> Result<(), HostError> {
        match fault {
            Fault::LostCommand => self.idle().memory.ring.lose_one(),
            Fault::ScribbledRing => self.idle().memory.ring.scribble(),
            Fault::MissingSignal
            | Fault::CyclicWait
            | Fault::WrongThreshold
            | Fault::StuckLoader
            | Fault::BadAddress => self.spoil_tables(device, program, fault)?,
        }
        Ok(())
    }

    fn spoil_tables(
        &mut self,
        device: u32,
        program: &Verified<Program>,
        fault: Fault,
    ) -> Result<(), HostError> {
        let loaded = self.load(program)?;
        let base = self.idle().memory.regions[device as usize].program(loaded.place);
        let mut header = [ProgramHeader::default()];
        self.peek(base, &mut header)?;
        let mut queues = vec![Queue::default(); program.workers_per_device()];
        self.peek(header[0].queues, &mut queues)?;
        let tasks = queues.iter().map(|queue| queue.tasks as usize).sum();
        let mut tables = Tables { tasks: vec![Task::default(); tasks], queues };
        self.peek(header[0].tasks, &mut tables.tasks)?;
        if fault == Fault::BadAddress {
            header[0].tasks = 128;
            self.poke(base, &header)?;
        } else {
            let nothing =
                || HostError::Request(format!("{fault:?}: the program has no such place"));
            tables.spoil(fault).ok_or_else(nothing)?;
            self.poke(header[0].tasks, &tables.tasks)?;
            self.poke(header[0].queues, &tables.queues)?;
        }
        self.switch(loaded)
    }

    fn peek<T: bytemuck::Pod>(&mut self, at: u64, out: &mut [T]) -> Result<(), HostError> {
        let idle = self.idle();
        idle.memory.copier.download(at, bytemuck::cast_slice_mut(out))
    }

    fn poke<T: bytemuck::Pod>(&mut self, at: u64, values: &[T]) -> Result<(), HostError> {
        let idle = self.idle();
        idle.memory.copier.upload(at, bytemuck::cast_slice(values))
    }
}

/// The tables of a program, as on the device.
struct Tables {
    tasks: Vec<Task>,
    queues: Vec<Queue>,
}

impl Tables {
    /// Makes one edit. Returns `None` if no place in the program fits.
    fn spoil(&mut self, fault: Fault) -> Option<()> {
        let tasks = &self.tasks;
        // A counter that is waited for, and the task that signals it.
        let waits = |task: &Task| task.wait_len > 0;
        let waiter = tasks.iter().position(waits)?;
        let counter = tasks[waiter].wait_counter[0];
        let producer = tasks.iter().position(|task| task.signal == counter)?;
        match fault {
            Fault::MissingSignal => self.tasks[producer].signal = NONE,
            Fault::WrongThreshold => self.tasks[waiter].wait_count[0] += 1,
            Fault::CyclicWait => {
                let back = |task: &&Task| {
                    waits(task) && task.wait_counter[0] == counter && task.signal != NONE
                };
                let back = tasks.iter().find(back)?.signal;
                let arrivals = tasks.iter().filter(|task| task.signal == back).count();
                let task = &mut self.tasks[producer];
                task.wait_len = 1;
                task.wait_counter[0] = back;
                task.wait_count[0] = u32::try_from(arrivals).ok()?;
            }
            Fault::StuckLoader => {
                self.queues.iter_mut().find(|queue| queue.loads > 0)?.loads = 0;
            }
            Fault::LostCommand | Fault::ScribbledRing | Fault::BadAddress => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> Tables {
        let task = |signal: u32, wait: Option<(u32, u32)>| {
            let mut task = Task { signal, wait_len: u8::from(wait.is_some()), ..Task::default() };
            if let Some((counter, count)) = wait {
                (task.wait_counter[0], task.wait_count[0]) = (counter, count);
            }
            task
        };
        Tables {
            tasks: vec![
                task(0, None),
                task(0, None),
                task(1, Some((0, 2))),
                task(NONE, Some((1, 1))),
            ],
            queues: vec![Queue { tasks: 4, loads: 3, ..Queue::default() }],
        }
    }

    #[test]
    fn each_fault_is_one_edit() {
        let mut spoiled = tables();
        spoiled.spoil(Fault::MissingSignal).expect("a place");
        assert_eq!(spoiled.tasks[0].signal, NONE);
        assert_eq!(spoiled.tasks[1..], tables().tasks[1..]);
        let mut spoiled = tables();
        spoiled.spoil(Fault::WrongThreshold).expect("a place");
        assert_eq!(spoiled.tasks[2].wait_count[0], 3);
        let mut spoiled = tables();
        spoiled.spoil(Fault::CyclicWait).expect("a place");
        assert_eq!((spoiled.tasks[0].wait_counter[0], spoiled.tasks[0].wait_count[0]), (1, 1));
        assert_eq!((spoiled.tasks[0].wait_len, spoiled.tasks[0].signal), (1, 0));
        let mut spoiled = tables();
        spoiled.spoil(Fault::StuckLoader).expect("a place");
        assert_eq!(spoiled.queues[0].loads, 0);
        assert_eq!(spoiled.tasks, tables().tasks);
    }

    #[test]
    fn what_cannot_be_spoiled_says_so() {
        let nothing = || Tables { tasks: vec![Task::default()], queues: Vec::new() };
        for fault in Fault::ALL {
            assert_eq!(nothing().spoil(fault), None, "{fault:?}");
        }
    }
}
