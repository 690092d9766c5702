//! The order of tasks within a step, as vector clocks: happens-before in the sense of the memory model.
//!
//! **What orders.** Worker queues and counters do: a signal releases everything that its worker did or had acquired
//! before. A flag-in-data hand-off orders nothing besides its own words. Value and tag of those arrive together, but
//! the store is relaxed, and the writer's other stores may become visible later or never win
//! (`tests/src/explore/models/transitive.rs` has each shape with an execution that goes wrong). So clocks propagate
//! along queues and counters only. Edges of flag-in-data buffers are used to find cycles and a sequence to check in. A
//! read of flag-in-data words needs no order, because it polls those words itself.
//!
//! **Devices.** Counters and queues are of one device, so clocks are as wide as a device has workers. The exchange between
//! the `sample` tasks releases each device's whole step to the next step of all.
//!
//! **Neighbours.** The warps of a worker meet at a block barrier inside every task, in front of a task that waits, and
//! behind one that signals. Stores may come after the barrier inside, and loads before it. So a task and the next one
//! in its queue are ordered only if one of them adds a barrier between them; with a task in between, that task's own
//! barrier orders them.

use std::collections::VecDeque;

use abi::{BufferKind, Opcode};
use rustc_hash::FxHashMap;

use crate::id::WorkerId;
use crate::program::{Program, Region, Verified, accesses};
use crate::violation::{At, Rule, Violations};

use super::words::Writes;
use super::{at, buffer_name, on_devices};

/// Most flag-in-data edges, and rows of clocks, that `verify` allocates. A 70B program has a hundredth of them.
const EDGES_MAX: usize = 1 << 26;
const CLOCK_WORDS_MAX: usize = 1 << 28;

/// Most tasks in a printed cycle.
const CYCLE_SHOWN_MAX: usize = 12;

/// The order of a program's tasks. Tasks are numbered worker by worker, in queue order.
#[derive(Clone, Debug)]
pub struct Order {
    workers: usize,
    places: Vec<(u32, u32)>,
    /// Tasks with no block barrier between them and the preceding task of their queue.
    unparted: Vec<bool>,
    sequence: Vec<u32>,
    clocks: Clocks,
}

impl Order {
    /// The order of a verified program.
    #[must_use]
    pub fn of(program: &Verified<Program>) -> Self {
        let mut found = Violations::default();
        match check(program, &mut found) {
            Some(order) => order,
            None => unreachable!("a verified program has an order: {found}"),
        }
    }

    /// Number of tasks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there are no tasks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The tasks in an order in which a single worker could run them all.
    #[must_use]
    pub fn sequence(&self) -> &[u32] {
        &self.sequence
    }

    /// Worker, and index in its queue.
    #[must_use]
    pub fn place(&self, task: u32) -> (WorkerId, u32) {
        let (worker, index) = self.places[task as usize];
        (WorkerId(worker), index)
    }

    /// Whether every access of `a` happens before every access of `b`.
    #[must_use]
    pub fn happens_before(&self, a: u32, b: u32) -> bool {
        let ((worker, index), (other, next)) = (self.places[a as usize], self.places[b as usize]);
        let neighbours = worker == other && index + 1 == next;
        self.released_to(a, b) && !(neighbours && self.unparted[b as usize])
    }

    /// Whether all accesses of `a` happen before everything that `b` releases.
    #[must_use]
    pub fn released_to(&self, a: u32, b: u32) -> bool {
        let ((worker, index), (other, _)) = (self.places[a as usize], self.places[b as usize]);
        let width = self.clocks.width;
        let (worker, other) = (worker as usize, other as usize);
        a != b
            && worker / width == other / width
            && self.clocks.row(b as usize)[worker % width] > index
    }

    pub(super) fn at(&self, task: u32) -> At {
        let (worker, index) = self.places[task as usize];
        at(worker as usize, index as usize)
    }
}

#[derive(Clone, Copy, Debug)]
struct Edge {
    to: u32,
    flag_in_data: bool,
}

/// Outgoing edges of tasks and joins, by source, without queue order. A join is a counter, or a range of a flag-in-data
/// buffer that several tasks read; the latter has no clock.
struct Edges {
    starts: Vec<u32>,
    list: Vec<Edge>,
}

impl Edges {
    fn new(nodes: usize, pairs: &[(u32, Edge)]) -> Self {
        let mut starts = vec![0_u32; nodes + 1];
        for (from, _) in pairs {
            starts[*from as usize + 1] += 1;
        }
        for node in 0..nodes {
            starts[node + 1] += starts[node];
        }
        let mut next = starts.clone();
        let mut list = vec![Edge { to: 0, flag_in_data: false }; pairs.len()];
        for (from, edge) in pairs {
            let place = &mut next[*from as usize];
            list[*place as usize] = *edge;
            *place += 1;
        }
        Self { starts, list }
    }

    fn out(&self, node: u32) -> &[Edge] {
        &self.list[self.starts[node as usize] as usize..self.starts[node as usize + 1] as usize]
    }
}

/// One row of clocks per task and counter: for each worker of its device, the number of its tasks that happen before this one, itself
/// included.
#[derive(Clone, Debug)]
struct Clocks {
    width: usize,
    words: Vec<u32>,
}

impl Clocks {
    fn row(&self, row: usize) -> &[u32] {
        &self.words[row * self.width..(row + 1) * self.width]
    }

    fn join(&mut self, from: usize, to: usize) {
        let [source, target] = self
            .words
            .get_disjoint_mut([
                from * self.width..(from + 1) * self.width,
                to * self.width..(to + 1) * self.width,
            ])
            .expect("a node has no edge to itself: that is a cycle, and cycles never get here");
        for (t, s) in target.iter_mut().zip(source) {
            *t = (*t).max(*s);
        }
    }

    fn tick(&mut self, row: usize, worker: usize, index: u32) {
        self.words[row * self.width + worker % self.width] = index + 1;
    }
}

fn flag_in_data(program: &Program, region: &Region) -> bool {
    program.buffers[region.buffer.index()].kind == BufferKind::FlagInData
}

/// Computes the order and checks it. Relies on every word being written once.
pub(in crate::program) fn check(program: &Program, found: &mut Violations) -> Option<Order> {
    let writes = Writes::new(program);
    let graph = match Graph::new(program, &writes) {
        Ok(graph) => graph,
        Err(detail) => {
            found.push(Rule::PLimit, At::Whole, detail);
            return None;
        }
    };
    let order = graph.sort(program, found)?;
    last(program, &order, found);
    Some(order)
}

/// Checks that each device has one `sample` and that it comes after everything else there. It releases the next step,
/// which must see every store of this one (keys and values among them) and find no worker still in it.
fn last(program: &Program, order: &Order, found: &mut Violations) {
    let devices = program.topology.devices;
    for device in 0..devices {
        let of = || on_devices(program).zip(0..).filter(move |&((on, _), _)| on == device);
        let samples: Vec<u32> =
            of().filter(|((_, task), _)| task.opcode == Opcode::Sample).map(|(_, n)| n).collect();
        let &[sample] = samples.as_slice() else {
            let place = if devices == 1 { String::new() } else { format!(" on device {device}") };
            let detail = format!("{} `sample` tasks{place}, expected one", samples.len());
            found.push(Rule::OStep, At::Whole, detail);
            continue;
        };
        let late = |&task: &u32| task != sample && !order.released_to(task, sample);
        for task in of().map(|(_, task)| task).filter(late) {
            let detail = format!("not ordered before `sample` at {}", order.at(sample));
            found.push(Rule::OStep, order.at(task), detail);
        }
    }
}

/// Tasks, joins and edges, before they are sorted.
struct Graph {
    tasks: usize,
    nodes: usize,
    counters: usize,
    joins: Vec<Region>,
    pairs: Vec<(u32, Edge)>,
}

impl Graph {
    fn new(program: &Program, writes: &Writes<'_>) -> Result<Self, String> {
        let task_len = program.task_len();
        let counters = program.counters as usize;
        let all = counters * program.topology.devices as usize;
        let mut graph = Self {
            tasks: task_len,
            nodes: task_len + all,
            counters: all,
            joins: Vec::new(),
            pairs: Vec::new(),
        };
        // By the device that writes them, if it is the reader's own.
        let mut readers: FxHashMap<(u32, Region), Vec<u32>> = FxHashMap::default();
        let mut regions: Vec<(u32, Region)> = Vec::new();
        for ((device, task), number) in on_devices(program).zip(0_u32..) {
            let first = task_len + device as usize * counters;
            if let Some(counter) = task.signal {
                let to = (first + counter.index()) as u32;
                graph.pairs.push((number, Edge { to, flag_in_data: false }));
            }
            for wait in &task.waits {
                let from = (first + wait.counter.index()) as u32;
                graph.pairs.push((from, Edge { to: number, flag_in_data: false }));
            }
            for region in accesses(program, task)
                .reads
                .into_iter()
                .filter(|region| flag_in_data(program, region))
            {
                let key = (if program.is_shared(region.buffer) { 0 } else { device }, region);
                let list = readers.entry(key).or_default();
                if list.is_empty() {
                    regions.push(key);
                }
                list.push(number);
            }
        }
        for key in regions {
            graph.flag_in_data_edges(writes, key, &readers[&key])?;
        }
        Ok(graph)
    }

    /// A region with one reader needs no join.
    fn flag_in_data_edges(
        &mut self,
        writes: &Writes<'_>,
        (device, region): (u32, Region),
        readers: &[u32],
    ) -> Result<(), String> {
        let target = if let [reader] = *readers {
            reader
        } else {
            let join = self.nodes as u32;
            self.nodes += 1;
            self.joins.push(region);
            self.pairs.extend(
                readers.iter().map(|&reader| (join, Edge { to: reader, flag_in_data: true })),
            );
            join
        };
        self.pairs.extend(
            writes
                .writers(device, region)
                .map(|writer| (writer, Edge { to: target, flag_in_data: true })),
        );
        if self.pairs.len() > EDGES_MAX {
            return Err(format!("flag-in-data reads make more than {EDGES_MAX} edges"));
        }
        Ok(())
    }

    /// Kahn's algorithm, propagating clocks along the edges.
    fn sort(self, program: &Program, found: &mut Violations) -> Option<Order> {
        let mut order = self.unsorted(program, found)?;
        let edges = Edges::new(self.nodes, &self.pairs);
        let mut waiting = vec![0_u32; self.nodes];
        for (_, edge) in &self.pairs {
            waiting[edge.to as usize] += 1;
        }
        for (task, &(_, index)) in order.places.iter().enumerate() {
            waiting[task] += u32::from(index > 0);
        }
        let mut ready: VecDeque<u32> =
            (0..self.nodes as u32).filter(|&node| waiting[node as usize] == 0).collect();
        let mut done = 0;
        while let Some(node) = ready.pop_front() {
            done += 1;
            if (node as usize) < self.tasks {
                order.sequence.push(node);
                let (worker, index) = order.places[node as usize];
                order.clocks.tick(node as usize, worker as usize, index);
                if order.places.get(node as usize + 1).is_some_and(|&(_, next)| next == index + 1) {
                    let queue = Edge { to: node + 1, flag_in_data: false };
                    order.pass(node, queue, &mut waiting, &mut ready);
                }
            }
            for &edge in edges.out(node) {
                order.pass(node, edge, &mut waiting, &mut ready);
            }
        }
        if done < self.nodes {
            found.push(Rule::OAcyclic, At::Whole, self.cycle(program, &order, &waiting));
            return None;
        }
        Some(order)
    }

    fn unsorted(&self, program: &Program, found: &mut Violations) -> Option<Order> {
        let width = program.workers_per_device();
        let words = (self.tasks + self.counters).saturating_mul(width);
        if words > CLOCK_WORDS_MAX {
            let detail = format!("clocks of {words} words, more than {CLOCK_WORDS_MAX}");
            found.push(Rule::PLimit, At::Whole, detail);
            return None;
        }
        let places = program
            .workers
            .iter()
            .zip(0..)
            .flat_map(|(worker, w)| (0..worker.tasks.len() as u32).map(move |i| (w, i)))
            .collect();
        let unparted = program.workers.iter().flat_map(|worker| {
            let before = std::iter::once(None).chain(worker.tasks.iter().map(Some));
            worker.tasks.iter().zip(before).map(|(task, before)| {
                task.waits.is_empty() && before.is_some_and(|before| before.signal.is_none())
            })
        });
        Some(Order {
            workers: program.workers.len(),
            places,
            unparted: unparted.collect(),
            sequence: Vec::with_capacity(self.tasks),
            clocks: Clocks { width, words: vec![0; words] },
        })
    }

    /// One cycle among the nodes that never became ready, described task by task.
    fn cycle(&self, program: &Program, order: &Order, waiting: &[u32]) -> String {
        let stuck = |node: usize| waiting[node] > 0;
        let mut before: Vec<Option<u32>> = vec![None; self.nodes];
        for (task, &(_, index)) in order.places.iter().enumerate() {
            if index > 0 && stuck(task) && stuck(task - 1) {
                before[task] = Some(task as u32 - 1);
            }
        }
        for (from, edge) in &self.pairs {
            if stuck(*from as usize) && stuck(edge.to as usize) {
                before[edge.to as usize] = Some(*from);
            }
        }
        // Every stuck node has a stuck predecessor, so a backward walk from any of them ends in a cycle.
        let Some(start) = (0..self.nodes).find(|&node| stuck(node)) else {
            return "a cycle".into();
        };
        let mut seen = vec![false; self.nodes];
        let mut node = start;
        while !seen[node] {
            seen[node] = true;
            match before[node] {
                Some(previous) => node = previous as usize,
                None => {
                    return format!("{} never becomes ready", self.node_name(program, order, node));
                }
            }
        }
        let mut names = vec![self.node_name(program, order, node)];
        let mut walk = node;
        while let Some(previous) = before[walk] {
            names.push(self.node_name(program, order, previous as usize));
            walk = previous as usize;
            if walk == node {
                break;
            }
        }
        let total = names.len();
        if total > CYCLE_SHOWN_MAX {
            names.truncate(CYCLE_SHOWN_MAX);
            names.push(format!("... ({total} in all)"));
        }
        names.join(", which waits for ")
    }

    fn node_name(&self, program: &Program, order: &Order, node: usize) -> String {
        if node < self.tasks {
            let (worker, index) = order.places[node];
            return format!(
                "{} {}",
                order.at(node as u32),
                program.workers[worker as usize].tasks[index as usize].opcode.info().name
            );
        }
        match node - self.tasks {
            counter if counter < self.counters => {
                format!("c{}", counter % program.counters as usize)
            }
            join => buffer_name(program, self.joins[join - self.counters].buffer),
        }
    }
}

impl Order {
    /// Consumes `edge`, and merges `node`'s clock if the edge orders memory.
    fn pass(&mut self, node: u32, edge: Edge, waiting: &mut [u32], ready: &mut VecDeque<u32>) {
        let (from, to) = (node as usize, edge.to as usize);
        if !edge.flag_in_data {
            self.clocks.join(from, to);
        }
        waiting[to] -= 1;
        if waiting[to] == 0 {
            ready.push_back(edge.to);
        }
    }

    /// Workers of the program.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers
    }
}
