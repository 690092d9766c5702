//! Life cycle of the device: boot, launch, commands, stop.
//!
//! [`Idle`] owns the memory and may allocate, load and free. [`Resident`] holds a running kernel and can do only what never waits for it:
//! copies on its own stream and words in mapped memory. Each transition moves the value, so that a call that waits for the device does not
//! compile while a kernel is resident.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use abi::{
    Command, Completion, Launch, LoaderRecord, SeqStates, StepState, Submission, TaskRecord,
};
use ir::program::{Program, Together, Verified};
use ir::{Graph, Weights};
use vm_device::Variant;

use crate::boot::{
    BootOptions, check_cards, check_devices, check_residency, check_shape, logits_bytes,
    make_device, probe_abi, program_room,
};
use crate::card::load_module;
use crate::devices::Cards;
use crate::driver::{DeviceInfo, Module, Stream};
use crate::error::HostError;
use crate::load::{Image, Residents, check_variant, images};
use crate::memory::{Copier, DeviceBuffer, HostBuffer};
use crate::monitor::Monitor;
use crate::pages::{DeviceCaches, PagePool, PageTables};
use crate::prefill::Prefill;
use crate::region::Region;
use crate::ring::{self, RingHost, RingTap};
use crate::sampling::SamplingMemory;
use crate::weight_stream::{LoadReport, Through, WeightStream};

mod batch;
mod chunks;
mod paged;
mod places;
mod run;
mod watch;

use places::Places;
use watch::Watched;

pub use batch::{Batch, BatchDecoded, SeqDecoded, Sequence, Window, WindowDecoded, WindowsDecoded};
pub use run::{Decoded, Request};
pub use watch::Watch;

/// Programs that can be loaded beside each other.
pub const PROGRAMS_MAX: usize = 4;
/// Bytes of this many task records; those of the loaders follow them.
fn records_bytes(records: u32) -> u64 {
    u64::from(records) * size_of::<TaskRecord>() as u64
}

/// The state of a step, directly followed by that of its sequences.
pub(crate) const STEP_BYTES: u64 = (size_of::<StepState>() + size_of::<SeqStates>()) as u64;
/// Refuses more tasks of a device than there are records.
fn enough_records(tasks: usize, options: &BootOptions) -> Result<(), HostError> {
    let records = options.records as usize;
    if tasks <= records {
        return Ok(());
    }
    Err(HostError::Request(format!("{tasks} tasks of a device; {records} records were set aside")))
}

/// Threads of a worker.
const THREADS: u32 = (abi::CONSUMER_WARPS + abi::HELPER_WARPS) * 32;
/// Least interval between a worker's heartbeats: 132 workers with 48 bytes each are 6 MB/s over the bus.
const WORKER_HEARTBEAT_EVERY: Duration = Duration::from_millis(1);
/// How long after a trap's completion its report may arrive: a few stores to host memory.
const REPORT_LIMIT: Duration = Duration::from_millis(100);
/// Bytes of the page-locked buffer for copies while a kernel is resident.
const BOUNCE_BYTES: usize = 32 << 20;

/// Launches of this process, so that a monitor can tell them apart.
static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// Handle of a loaded program: a place in device memory. Valid for the machine that loaded it, until the place is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    place: usize,
    serial: u64,
}

/// What a kernel begins with.
#[derive(Clone, Copy)]
pub enum Start<'p> {
    /// A program for one session at a time. It takes the place that was filled longest ago.
    Alone(&'p Verified<Program>),
    /// One that sessions may share.
    Together(&'p Together),
    /// A program that is loaded already, for a kernel of the same variant. It goes on from its epoch, so nothing is written.
    Held(Loaded),
}

/// Kernels that stay loaded: a server runs one for a lone sequence, and one for batches.
const KERNELS_MAX: usize = 2;

/// Everything on the device that outlives a launch.
struct Memory {
    residents: Residents,
    /// Per device: programs, and the words that devices share.
    regions: Vec<Region>,
    places: Places,
    /// Address and bytes of the first device's activations, per place.
    arenas: Vec<(u64, u64)>,
    /// On each device.
    records: Vec<DeviceBuffer>,
    tokens: HostBuffer,
    token_stride: u32,
    copier: Copier,
    pages: PageTables,
    sampling: SamplingMemory,
    ring: RingHost,
    block: Arc<HostBuffer>, // the ring's memory: dropped after it
    _weights: Vec<DeviceBuffer>,
}

/// A booted machine with no kernel running.
pub struct Idle {
    /// Weights in flight; ended before the memory that they go to is freed.
    weight_stream: Option<WeightStream>,
    memory: Memory,
    /// One on each GPU, for its kernel.
    compute: Vec<Stream>,
    /// The variants of the last launches, the last one first, on each GPU: loading one takes longer than the rest of a launch. Freed with the
    /// memory, or by a launch, never while a kernel runs.
    kernels: Vec<(Variant, Vec<Module>)>,
    /// Sequences that the memory is for; a kernel may run fewer.
    seqs_max: u32,
    cards: Cards,
    info: DeviceInfo,
    options: BootOptions,
    report: LoadReport,
    vocab: u32,
    graph: Graph,
    /// Kernels and memory for prompt chunks, created with the first of them.
    prefill: Option<Box<Prefill>>,
}

/// A machine whose kernel is running.
pub struct Resident {
    idle: Option<Idle>,
    variant: Variant,
    current: Loaded,
    failed: bool,
}

impl Idle {
    /// Loads a model onto the device: packed weights, constants, caches, rings. `program` is any program of the model.
    ///
    /// # Errors
    /// If there is no suitable device, memory is short, or a weight file cannot be read.
    pub fn boot(
        graph: &Graph,
        weights: &dyn Weights,
        program: &Program,
        variant: &Variant,
        options: BootOptions,
    ) -> Result<Self, HostError> {
        Self::boot_through(graph, weights, program, variant, options, &|source| source)
    }

    /// The same, with a wrapper for the source that weights are streamed from.
    pub(crate) fn boot_through(
        graph: &Graph,
        weights: &dyn Weights,
        program: &Program,
        variant: &Variant,
        mut options: BootOptions,
        through: Through<'_>,
    ) -> Result<Self, HostError> {
        options.program_bytes = program_room(program, variant.seqs, options.program_bytes);
        let devices = program.topology.devices;
        let cards = Cards::open(&options.cards, devices)?;
        let info = cards.info()?;
        check_shape(graph, &options)?;
        check_devices(devices, variant)?;
        let pages = check_cards(&cards, graph, program, &options, variant.seqs)?;
        let compute = cards.on_cards(Stream::new)?;
        let modules = cards.on_cards(|| Ok(load_module(variant, &info)?.0))?;
        modules.iter().zip(&compute).try_for_each(|(module, stream)| probe_abi(module, stream))?;
        let row_bytes = graph.vocab as usize * size_of::<f32>();
        let streams = cards.on_cards(Stream::new)?;
        let mut copier = Copier::new(streams, BOUNCE_BYTES.max(row_bytes))?;
        let mut owned = Vec::new();
        let regions = cards.on_each(|_| Region::new(options.program_bytes))?;
        let on = (&cards, &regions[..]);
        let bring = (program, weights, through);
        let Brought { mut placed, starts, weight_stream, report } =
            bring_weights(bring, &options, on, &mut copier, &mut owned)?;
        let parts = cards.on_each(|device| {
            let (part, matrices) =
                ((program, device), std::mem::take(&mut placed[device as usize]));
            make_device(graph, weights, part, pages, matrices, &mut owned, &mut copier)
        })?;
        let logits = DeviceBuffer::zeroed(logits_bytes(&options, variant.seqs, graph.vocab))?;
        let residents = Residents {
            devices: parts,
            weight_stream_starts: starts,
            matrix_table: program.matrices.clone(),
            heads: (graph.kv_heads, graph.head_dim),
            pages,
            logits: logits.address,
            logits_rows: options.logits_rows,
            kv_capacity: program.kv_capacity,
            workers: info.sms / cards.per_card(),
            seqs: variant.seqs,
        };
        owned.push(logits);
        let sampling = SamplingMemory::new(options.sessions, graph.vocab, residents.logits)?;
        let memory = Memory::new(residents, &options, &cards, copier, (owned, regions), sampling)?;
        Ok(Self {
            weight_stream,
            memory,
            compute,
            kernels: vec![(*variant, modules)],
            seqs_max: variant.seqs,
            cards,
            info,
            options,
            report,
            vocab: graph.vocab,
            graph: graph.clone(),
            prefill: None,
        })
    }

    /// The device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// How the weights were loaded, or how far they have arrived.
    #[must_use]
    pub fn load_report(&self) -> LoadReport {
        self.weight_stream.as_ref().map_or_else(|| self.report.clone(), WeightStream::report)
    }

    /// Shows everything that goes through the ring from now on to a callback, over all launches.
    pub fn show_ring(&mut self, tap: Option<RingTap>) {
        self.memory.ring.show(tap);
    }

    /// Launches the kernel with a program, after checking that the whole grid can be resident.
    ///
    /// # Errors
    /// If the kernel does not compile, does not fit, or the program is of another model; the machine is returned with the error.
    pub fn launch(
        self,
        variant: Variant,
        program: &Verified<Program>,
    ) -> Result<Resident, Box<(Self, HostError)>> {
        self.launch_with(variant, Start::Alone(program))
    }

    /// The same, with what the kernel begins with.
    ///
    /// # Errors
    /// The same, and if the place of a program that is held was used again.
    pub fn launch_with(
        mut self,
        variant: Variant,
        start: Start<'_>,
    ) -> Result<Resident, Box<(Self, HostError)>> {
        let launched = self.try_launch(&variant, start);
        tracing::info!(seqs = variant.seqs, ok = launched.is_ok(), "kernel launched");
        match launched {
            Ok(current) => Ok(Resident { idle: Some(self), variant, current, failed: false }),
            Err(error) => Err(Box::new((self, error))),
        }
    }

    fn try_launch(&mut self, variant: &Variant, start: Start<'_>) -> Result<Loaded, HostError> {
        let booted = self.seqs_max;
        if variant.seqs > booted {
            return Err(HostError::Request(format!(
                "a kernel of {} sequences on a machine booted for {booted}: boot with the widest variant that is to run",
                variant.seqs
            )));
        }
        check_devices(self.cards.devices(), variant)?;
        match self.kernels.iter().position(|(loaded, _)| loaded == variant) {
            Some(index) => self.kernels[..=index].rotate_right(1),
            None => {
                self.kernels.truncate(KERNELS_MAX - 1);
                let load = || Ok(load_module(variant, &self.info)?.0);
                let modules = self.cards.on_cards(load)?;
                self.kernels.insert(0, (*variant, modules));
            }
        }
        // Programs are laid out for the sequences of the kernel that runs them.
        self.memory.residents.seqs = variant.seqs;
        let shared = self.info.shared_bytes;
        let requested = self.memory.residents.workers * self.cards.per_card();
        let mut kernels = Vec::new();
        for module in &self.kernels[0].1 {
            let kernel = module.function(c"amk_megakernel")?;
            kernel.allow_shared(shared)?;
            let per_sm = kernel.resident_blocks(THREADS, shared)?;
            check_residency(requested, per_sm, self.info.sms, THREADS, shared)?;
            kernels.push(kernel);
        }
        let place = self.memory.places.oldest(None);
        let loaded = match start {
            Start::Alone(program) => self.load_into(place, program, 1)?,
            Start::Together(program) => self.load_into(place, program.program(), program.seqs())?,
            Start::Held(held) if self.holds(held) => held,
            Start::Held(_) => return Err(used_again()),
        };
        self.memory.ring.reset();
        let devices = 0..self.cards.devices();
        let launches: Vec<Launch> =
            devices.map(|device| self.launch_block(device, loaded)).collect();
        let Memory { copier, regions, .. } = &mut self.memory;
        for region in &*regions {
            for (address, bytes) in region.zeroed_at_launch() {
                copier.fill(address, bytes, 0)?;
            }
            let waits = region.weight_stream() + offset_of!(abi::WeightStream, waits) as u64;
            copier.fill(waits, WEIGHT_STREAM_COUNTS, 0)?;
            copier.upload(region.launches(), bytemuck::cast_slice(&launches))?;
        }
        // Nothing that could wait for a kernel comes between the launches of the GPUs.
        for ((stream, kernel), (first, _)) in
            self.compute.iter().zip(&kernels).zip(self.cards.iter())
        {
            let mut launch = launches[first as usize];
            let mut arguments: [*mut std::ffi::c_void; 1] = [(&raw mut launch).cast()];
            stream.launch(kernel, requested, THREADS, shared, &mut arguments)?;
        }
        LAUNCHES.fetch_add(1, Ordering::Relaxed);
        Ok(loaded)
    }

    fn launch_block(&self, device: u32, program: Loaded) -> Launch {
        let (m, index) = (&self.memory, device as usize);
        let (region, block) = (&m.regions[index], m.block.device + (index * ring::BYTES) as u64);
        let several = |address: u64| if self.cards.devices() > 1 { address } else { 0 };
        Launch {
            submissions: block + ring::SUBMISSIONS as u64,
            completions: block + ring::COMPLETIONS as u64,
            indices: block + ring::INDICES as u64,
            status: block + ring::STATUS as u64,
            tokens: m.tokens.device,
            step: region.step(),
            done: region.done(),
            device,
            launches: several(region.launches()),
            exchange: several(region.exchange()),
            records: m.records[index].address,
            record_len: self.options.records,
            deadline_ns: self.options.deadline.as_nanos() as u64,
            token_stride: m.token_stride,
            sessions: self.options.sessions,
            workers: m.residents.workers,
            program: region.program(program.place),
            weight_stream: region.weight_stream(),
            sampling: m.sampling.settings(),
            pages: m.pages.devices[index].address(),
            page_stride: m.pages.stride(),
            page_count: m.residents.pages + 1,
            worker_heartbeats: block + ring::WORKER_HEARTBEATS as u64,
            worker_heartbeat_ns: WORKER_HEARTBEAT_EVERY.as_nanos() as u32,
        }
    }

    /// Whether a handle still names the program that it was given for.
    #[must_use]
    pub fn holds(&self, program: Loaded) -> bool {
        self.memory.places.holds(program)
    }

    /// Writes a program's image to a place. While a kernel is resident it must not be the current place.
    fn load_into(
        &mut self,
        place: usize,
        program: &Verified<Program>,
        sequences: u32,
    ) -> Result<Loaded, HostError> {
        let m = &mut self.memory;
        check_variant(program, &self.kernels[0].0)?;
        let bases: Vec<u64> = m.regions.iter().map(|region| region.program(place)).collect();
        let images = images(program, &m.residents, self.info.shared_bytes, &bases)?;
        let room = m.regions[0].program_bytes();
        let bytes = |image: &Image| image.bytes.len() as u64 + image.zeroed + image.poisoned;
        if let Some(needed) = images.iter().map(bytes).max().filter(|&needed| needed > room) {
            return Err(HostError::Request(format!(
                "the program needs {needed} bytes of tables and activations, {room} were set aside"
            )));
        }
        for (Image { bytes, zeroed, poisoned }, base) in images.iter().zip(&bases).rev() {
            m.copier.upload(*base, bytes)?;
            let end = base + bytes.len() as u64;
            m.copier.fill(end, *zeroed, 0)?;
            m.copier.fill(end + zeroed, *poisoned, 0xff)?;
            m.arenas[place] = (end + zeroed, *poisoned); // the first device's comes last
        }
        Ok(m.places.fill(place, sequences))
    }
}

impl Memory {
    fn new(
        residents: Residents,
        options: &BootOptions,
        cards: &Cards,
        copier: Copier,
        (weights, regions): (Vec<DeviceBuffer>, Vec<Region>),
        sampling: SamplingMemory,
    ) -> Result<Self, HostError> {
        let (devices, kv_capacity) = (cards.devices(), residents.kv_capacity);
        let block = Arc::new(HostBuffer::zeroed(devices as usize * ring::BYTES)?);
        // SAFETY: the blocks are page-aligned, long enough, declared after the ring in this struct (dropped after it), and shared with
        // the devices alone.
        let ring = unsafe { RingHost::new(block.pointer(), devices, residents.workers) };
        let token_stride = (kv_capacity + 1).next_multiple_of(32);
        let pool = PagePool::new(options.sessions, residents.pages);
        let shape = (options.sessions, kv_capacity);
        let caches = cards.on_each(|device| {
            let own = &residents.devices[device as usize];
            DeviceCaches::new(shape, own.caches.clone(), own.layout)
        })?;
        let pages = PageTables::new(pool, shape, caches);
        // A worker's loader is recorded under the number of its block among those of its GPU.
        let loaders = u64::from(residents.workers * cards.per_card());
        let record_bytes =
            records_bytes(options.records) + loaders * size_of::<LoaderRecord>() as u64;
        let records = cards.on_each(|_| DeviceBuffer::zeroed(record_bytes))?;
        Ok(Self {
            residents,
            pages,
            places: Places::new(),
            arenas: vec![(0, 0); PROGRAMS_MAX],
            regions,
            records,
            tokens: HostBuffer::zeroed(options.sessions as usize * 2 * token_stride as usize * 4)?,
            token_stride,
            copier,
            sampling,
            ring,
            block,
            _weights: weights,
        })
    }
}

impl Resident {
    fn idle(&mut self) -> &mut Idle {
        self.idle
            .as_mut()
            .unwrap_or_else(|| unreachable!("only `stop` takes it, and consumes the machine"))
    }

    /// A handle with which another thread can watch this kernel.
    pub fn monitor(&mut self) -> Monitor {
        let Idle { memory, weight_stream, .. } = self.idle();
        let (block, workers) = (memory.block.clone(), memory.residents.workers);
        let devices = memory.regions.len() as u32;
        let weight_stream = weight_stream.as_ref().map(WeightStream::packed);
        // SAFETY: the block is page-aligned, long enough, kept by the value beside the ring, and shared with the device alone. This end
        // publishes nothing.
        let ring = unsafe { RingHost::new(block.pointer(), devices, workers) };
        Monitor::new(
            ring,
            devices * workers,
            LAUNCHES.load(Ordering::Relaxed),
            block,
            weight_stream,
        )
    }

    /// The kernel variant that is running.
    #[must_use]
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// The current program.
    #[must_use]
    pub fn current(&self) -> Loaded {
        self.current
    }

    /// Loads a program beside the current one. It takes the place that was filled longest ago; a handle of that place becomes invalid.
    ///
    /// # Errors
    /// If the program does not fit.
    pub fn load(&mut self, program: &Verified<Program>) -> Result<Loaded, HostError> {
        self.load_for(program, 1)
    }

    /// The same, for batches of up to this many sequences.
    fn load_for(
        &mut self,
        program: &Verified<Program>,
        sequences: u32,
    ) -> Result<Loaded, HostError> {
        let current = self.current;
        let idle = self.idle();
        let place = idle.memory.places.oldest(Some(current));
        tracing::debug!(place, tasks = program.task_len(), "program loaded beside the running one");
        idle.load_into(place, program, sequences)
    }

    /// Makes a loaded program current.
    ///
    /// # Errors
    /// If its place has been reused, or the device stopped.
    pub fn switch(&mut self, program: Loaded) -> Result<(), HostError> {
        if !self.holds(program) {
            return Err(used_again());
        }
        if program != self.current {
            self.adopt(program)?;
            self.current = program;
        }
        Ok(())
    }

    /// Switches every worker to the program, and drops what each holds of the current one.
    fn adopt(&mut self, program: Loaded) -> Result<(), HostError> {
        let idle = self.idle();
        let address = idle.memory.regions[0].program(program.place);
        let limit = idle.options.deadline * 2 + Duration::from_secs(1);
        let load = Submission {
            command: Command::LoadProgram as u32,
            program: address,
            ..Submission::default()
        };
        let watched = Watched::default();
        self.command(&load, limit, watched).map(|_| ())
    }

    /// Logits of the first `rows` positions of the last command that kept them.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn logits(&mut self, rows: u32) -> Result<Vec<Vec<f32>>, HostError> {
        self.seq_logits(0, rows)
    }

    /// The same into a caller's memory, row after row: as many as fit.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn logits_into(&mut self, out: &mut [f32]) -> Result<(), HostError> {
        let Idle { memory, vocab, .. } = self.idle();
        memory.copier.rows_into(memory.residents.logits, out, *vocab as usize)
    }

    /// The activations of a program as its last step left them: the words of its arena, poison where nothing was stored. They do not change
    /// between two commands.
    ///
    /// # Errors
    /// If the program's place has been reused, or a copy fails.
    pub fn arena(&mut self, program: Loaded) -> Result<Vec<u32>, HostError> {
        if !self.holds(program) {
            return Err(HostError::Request("the program's place has been used again".into()));
        }
        let memory = &self.idle().memory;
        let (address, bytes) = memory.arenas[program.place];
        memory.copier.values(address, bytes as usize / size_of::<u32>())
    }

    /// The records of the traced variant for the last step: of each device those of this many tasks, one after the other.
    ///
    /// # Errors
    /// If there are fewer records, or a copy fails.
    pub fn records(&mut self, tasks: &[usize]) -> Result<Vec<TaskRecord>, HostError> {
        let Idle { memory, options, .. } = self.idle();
        let mut all = Vec::new();
        for (records, &tasks) in memory.records.iter().zip(tasks) {
            enough_records(tasks, options)?;
            all.extend(memory.copier.values::<TaskRecord>(records.address, tasks)?);
        }
        Ok(all)
    }

    /// Makes tasks spin from the next step on, in the variant `Trace::Delays`: cycles before and after the mark of the
    /// products, task by task as in [`records`](Self::records).
    ///
    /// # Errors
    /// If a delay is longer than a millisecond or so, there are more than records, or a copy fails.
    pub fn delay_tasks(&mut self, tasks: &[usize], delays: &[[u32; 2]]) -> Result<(), HostError> {
        const CYCLES_MAX: u32 = 2_000_000;
        let Idle { memory, options, .. } = self.idle();
        if delays.iter().flatten().any(|&cycles| cycles > CYCLES_MAX) {
            return Err(HostError::Request(format!(
                "a task can be delayed by {CYCLES_MAX} cycles at most"
            )));
        }
        let record = |&delays: &[u32; 2]| TaskRecord { delays, ..bytemuck::Zeroable::zeroed() };
        let mut rest = delays;
        for (records, &tasks) in memory.records.iter().zip(tasks) {
            enough_records(tasks, options)?;
            let (here, others) = rest.split_at(tasks.min(rest.len()));
            rest = others;
            let here: Vec<TaskRecord> = here.iter().map(record).collect();
            memory.copier.upload(records.address, bytemuck::cast_slice(&here))?;
        }
        Ok(())
    }

    /// The records of the traced variant for each worker's loader in the last step.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn loader_records(&mut self) -> Result<Vec<LoaderRecord>, HostError> {
        let Idle { memory, options, cards, .. } = self.idle();
        let workers = memory.residents.workers as usize;
        let mut all = Vec::new();
        for (device, records) in (0..).zip(&memory.records) {
            let first = (device % cards.per_card()) as usize * workers * size_of::<LoaderRecord>();
            let source = records.address + records_bytes(options.records) + first as u64;
            all.extend(memory.copier.values::<LoaderRecord>(source, workers)?);
        }
        Ok(all)
    }

    /// Fills the first rows of logits with NaN: those that a command will write and the host will read.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn poison_logits(&mut self, rows: u32) -> Result<(), HostError> {
        self.poison_seq_logits(0, rows)
    }

    /// Whether a handle still names the program that it was given for.
    pub fn holds(&mut self, program: Loaded) -> bool {
        self.idle().holds(program)
    }

    /// Rows of logits that a command may keep.
    pub fn logits_rows(&mut self) -> u32 {
        self.idle().memory.residents.logits_rows
    }

    /// Round-trip time of an empty command, in microseconds.
    ///
    /// # Errors
    /// If the device stopped.
    pub fn ping(&mut self) -> Result<f64, HostError> {
        let limit = self.idle().options.deadline;
        let start = Instant::now();
        self.command(
            &Submission { command: Command::Ping as u32, ..Submission::default() },
            limit,
            Watched::default(),
        )?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn command(
        &mut self,
        submission: &Submission,
        limit: Duration,
        mut watched: Watched<'_>,
    ) -> Result<Completion, HostError> {
        if self.failed {
            return Err(HostError::Request(
                "the device stopped earlier: stop the machine and launch it again".into(),
            ));
        }
        let Idle { memory, compute, weight_stream, .. } = self.idle();
        let weight_stream = weight_stream.as_ref();
        let under_way = weight_stream.is_some_and(WeightStream::under_way);
        if under_way && watched.masked() {
            return Err(HostError::Request(
                "masks while weights are on their way: wait until they have arrived".into(),
            ));
        }
        memory.ring.publish(submission)?;
        if under_way {
            watched.sequences.clear(); // the first step may be void
        }
        let Memory { tokens, sampling, .. } = memory;
        let vocab = sampling.masks.vocab();
        let mut give = |(session, position), allowed: Option<Vec<u32>>| {
            sampling.masks.give(session, position, allowed.as_deref());
        };
        let mut look = || watched.look(vocab, &|at| tokens.word(at), &mut give);
        let answer = wait_for_answer(&mut memory.ring, compute, weight_stream, limit, &mut look);
        let lost = weight_stream.and_then(WeightStream::failure);
        match answer {
            Ok(completion) if completion.trap == abi::Trap::None as u32 => Ok(completion),
            Ok(completion) if completion.trap == abi::Trap::BadCommand as u32 => {
                Err(HostError::Request(
                    "the device refused the command: it is outside what the program was loaded for"
                        .into(),
                ))
            }
            Ok(completion) if completion.trap == abi::Trap::Weights as u32 => {
                Err(lost.unwrap_or(HostError::Left))
            }
            Ok(_) => Err(self.fail_with_status()),
            Err(error) => {
                self.fail();
                Err(error)
            }
        }
    }

    /// Marks the machine as failed: the kernel leaves in the middle of a step, so the counters of every loaded program are invalid.
    fn fail(&mut self) {
        self.failed = true;
        self.idle().memory.places.forget();
    }

    /// Fails after a command that ended in a trap, with the status block's reason.
    fn fail_with_status(&mut self) -> HostError {
        self.fail();
        let status = self.idle().memory.ring.await_status(REPORT_LIMIT).unwrap_or_default();
        HostError::Trapped(Box::new(status))
    }

    /// Ends the kernel and returns the idle machine.
    ///
    /// # Errors
    /// If the kernel does not leave in time; then only ending the process frees the device.
    pub fn stop(mut self) -> Result<Idle, HostError> {
        let Some(mut idle) = self.idle.take() else {
            unreachable!("only `stop` takes it, and consumes the machine")
        };
        let left = end_kernel(&mut idle, self.failed);
        tracing::info!(ok = left.is_ok(), "kernel stopped");
        if let Err(error) = left {
            std::mem::forget(idle); // freeing anything would wait for the kernel forever
            return Err(error);
        }
        Ok(idle)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        if let Some(mut idle) = self.idle.take()
            && end_kernel(&mut idle, self.failed).is_err()
        {
            std::mem::forget(idle); // as in `stop`
        }
    }
}

fn used_again() -> HostError {
    HostError::Request("the program's place has been used again: load it anew".into())
}

/// Whether the kernels of all GPUs have exited.
fn all_done(kernels: &[Stream]) -> Result<bool, HostError> {
    for kernel in kernels {
        if !kernel.is_done()? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes the kernels leave and waits for them, at most a few deadlines long.
fn end_kernel(idle: &mut Idle, failed: bool) -> Result<(), HostError> {
    if failed {
        idle.memory.ring.abort();
    } else {
        let stop = Submission { command: Command::Stop as u32, ..Submission::default() };
        if idle.memory.ring.publish(&stop).is_err() {
            idle.memory.ring.abort();
        }
    }
    let limit = idle.options.deadline * 3 + Duration::from_secs(1);
    let start = Instant::now();
    while !all_done(&idle.compute)? {
        if start.elapsed() > limit / 2 {
            idle.memory.ring.abort();
        }
        if start.elapsed() > limit {
            return Err(HostError::TimedOut { waited: start.elapsed(), alive: false });
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

#[path = "machine_weight_stream.rs"]
mod watermark;
use watermark::{Brought, WEIGHT_STREAM_COUNTS, bring_weights, wait_for_answer};
pub use watermark::{TensorCheck, WeightStreamReport};

#[cfg(debug_assertions)]
#[path = "machine_faults_tests.rs"]
pub mod faults;
#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
#[cfg(test)]
#[path = "machine_weight_stream_tests.rs"]
mod weight_stream_tests;
