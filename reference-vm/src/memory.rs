//! The memory of a program: constants, the key/value caches, the logits, and the arena and counters of each device. Which
//! device has a row of a cache is recorded: another one that reads it faults.
//!
//! The arena is one array of words at the offsets that the program chose. Plain words and logits are poisoned before
//! every step: a read of a word that no task of this step has written is a fault instead of a stale value.

use abi::BufferKind;
use ir::program::{Buffer, BufferSource, Dims, Program};
use ir::{BufferId, CounterId, Graph, KvDtype, MatrixId, Weights};

use crate::math::make_room;
use crate::packed::{Packed, vector};
use crate::trap::{Fault, MachineError};

/// A signalling NaN that no arithmetic produces.
const POISON: u32 = 0x7fa5_a5a5;

/// Most bytes of an arena: far more than the activations of one token need.
const ARENA_BYTES_MAX: u64 = 1 << 32;

/// The run-time values of a step, as a device sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) token: u32,
    pub(crate) position: u32,
    pub(crate) epoch: u32,
    /// The device whose memory is accessed.
    pub(crate) device: u32,
    /// The sequence whose scratch is accessed, and how many of those directly before it run the positions before this one,
    /// in the same window.
    pub(crate) seq: u32,
    pub(crate) before: u32,
}

/// Words `start..start + len` of a buffer, of a sequence's copy of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) buffer: BufferId,
    pub(crate) start: u32,
    pub(crate) len: u32,
    pub(crate) seq: u32,
}

enum Place {
    /// First word in the arena, one word per element.
    Plain(usize),
    /// First word in the arena, one word per element; its tag is in a separate table.
    FlagInData(usize),
    Constant(Vec<f32>),
    /// One row of a packed matrix.
    Embedding {
        matrix: MatrixId,
        cols: u32,
    },
    /// A layer's cache.
    KvCache(usize),
    Logits,
}

/// Keys and values of one layer, `[positions, kv_heads * head_dim]`.
#[derive(Default)]
pub(crate) struct Cache {
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    /// `[positions, kv_heads]`: who has the row.
    holder: Vec<Holder>,
}

/// Whose memory has a row of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// Nobody's.
    None,
    /// A device's.
    Device(u32),
    /// Every device's: the row was not computed here.
    All,
}

/// What each device has for itself, per sequence of a window: the arena; and the counters, which are those of sequence 0.
#[derive(Default)]
struct Local {
    arena: Vec<u32>,
    /// The step that wrote each flag-in-data word of the arena; the device stores its lowest bits in the word.
    tags: Vec<u32>,
    counters: Vec<u64>,
}

/// All memory of a program and one sequence.
pub(crate) struct Memory<'a> {
    program: &'a Program,
    places: Vec<Place>,
    /// By sequence, then by device.
    devices: Vec<Local>,
    /// By sequence.
    logits: Vec<Vec<u32>>,
    caches: Vec<Cache>,
}

impl<'a> Memory<'a> {
    pub(crate) fn new(
        program: &'a Program,
        graph: &Graph,
        weights: &'a dyn Weights,
    ) -> Result<Self, MachineError> {
        let bytes = program.arena_bytes;
        if bytes > ARENA_BYTES_MAX {
            return Err(MachineError::Arena { bytes, max: ARENA_BYTES_MAX });
        }
        let buffers = program
            .buffers
            .iter()
            .enumerate()
            .map(|(index, buffer)| (BufferId(index as u32), buffer));
        let places = buffers
            .map(|buffer| place(program, graph, weights, buffer))
            .collect::<Result<_, _>>()?;
        let mut memory = Self {
            program,
            places,
            devices: Vec::new(),
            logits: Vec::new(),
            caches: (0..program.dims.layers).map(|_| Cache::default()).collect(),
        };
        memory.reset();
        Ok(memory)
    }

    /// Resets memory to its state after loading: no step has run.
    pub(crate) fn reset(&mut self) {
        self.devices.clear();
        self.logits.clear();
        self.make_room(1);
        self.truncate(0);
    }

    /// Makes room for the scratch of this many sequences.
    fn make_room(&mut self, seqs: usize) {
        let words = self.program.arena_bytes as usize / 4;
        let local = || Local {
            arena: vec![0; words],
            tags: vec![0; words],
            counters: vec![0; self.program.counters as usize],
        };
        let seqs = seqs.max(self.logits.len());
        self.devices.resize_with(seqs * self.program.topology.devices as usize, local);
        self.logits.resize_with(seqs, || vec![POISON; self.program.dims.vocab as usize]);
    }

    /// Drops all but the first keys and values.
    pub(crate) fn truncate(&mut self, positions: usize) {
        let heads = self.program.dims.kv_heads as usize;
        let width = heads * self.program.dims.head_dim as usize;
        for cache in &mut self.caches {
            cache.keys.truncate(positions * width);
            cache.values.truncate(positions * width);
            cache.holder.truncate(positions * heads);
        }
    }

    /// Replaces all keys and values by those of the first positions; false if those of a layer do not fill exactly
    /// these positions.
    pub(crate) fn fill(&mut self, positions: usize, layers: &[(Vec<f32>, Vec<f32>)]) -> bool {
        let heads = self.program.dims.kv_heads as usize;
        let words = positions * heads * self.program.dims.head_dim as usize;
        let whole =
            |(keys, values): &(Vec<f32>, Vec<f32>)| [keys.len(), values.len()] == [words; 2];
        if layers.len() != self.caches.len() || !layers.iter().all(whole) {
            return false;
        }
        for (cache, (keys, values)) in self.caches.iter_mut().zip(layers) {
            cache.keys.clone_from(keys);
            cache.values.clone_from(values);
            cache.holder = vec![Holder::All; positions * heads];
        }
        true
    }

    /// Makes room for the keys and values of a step of `seqs` positions from `step` on, and poisons the words of earlier steps.
    pub(crate) fn begin(&mut self, step: Step, seqs: usize) {
        self.make_room(step.seq as usize + seqs);
        for (buffer, place) in self.program.buffers.iter().zip(&self.places) {
            if let Place::Plain(first) = *place {
                let words = first..first + buffer.words as usize;
                self.devices.iter_mut().for_each(|local| local.arena[words.clone()].fill(POISON));
            }
        }
        self.logits.iter_mut().for_each(|row| row.fill(POISON));
        let heads = self.program.dims.kv_heads as usize;
        let width = heads * self.program.dims.head_dim as usize;
        let positions = step.position as usize + seqs;
        for cache in &mut self.caches {
            cache.keys.resize(positions * width, 0.0);
            cache.values.resize(positions * width, 0.0);
            cache.holder.resize(positions * heads, Holder::None);
        }
    }

    fn buffer(&self, span: Span) -> Result<(&Buffer, &Place), Fault> {
        let id = span.buffer;
        let bad = Fault::BadBuffer(id);
        let (buffer, place) =
            (self.program.buffers.get(id.index()).ok_or(bad)?, &self.places[id.index()]);
        let words = if let Place::Embedding { cols, .. } = *place { cols } else { buffer.words };
        let end = u64::from(span.start) + u64::from(span.len);
        if end > u64::from(words) {
            return Err(Fault::Bounds { buffer: id, start: span.start, end, words });
        }
        Ok((buffer, place))
    }

    /// The first word of `span`, from its word `from` on, that does not have its tag yet, with the tag that it has.
    pub(crate) fn missing_tag(
        &self,
        span: Span,
        from: u32,
        step: Step,
    ) -> Result<Option<(u32, u32)>, Fault> {
        let (_, place) = self.buffer(span)?;
        let Place::FlagInData(first) = *place else { return Ok(None) };
        let need = step.epoch;
        let tags = &self.local(step.device, span.seq).tags[first + span.start as usize..]
            [..span.len as usize];
        let rest = tags.get(from as usize..).unwrap_or_default();
        let missing = find(rest, |tag| tag != need).map(|word| from + word as u32);
        Ok(missing.map(|word| (word, tags[word as usize])))
    }

    /// The words of `span` as numbers. `packed` are the program's matrices.
    pub(crate) fn read(
        &self,
        span: Span,
        step: Step,
        packed: &[Packed<'_>],
    ) -> Result<Vec<f32>, Fault> {
        let (buffer, place) = self.buffer(span)?;
        let (id, start, len) = (span.buffer, span.start as usize, span.len as usize);
        match place {
            Place::Plain(first) => {
                let words = &self.local(step.device, span.seq).arena[first + start..][..len];
                if let Some(word) = find(words, |word| word == POISON) {
                    return Err(Fault::Unwritten { buffer: id, word: span.start + word as u32 });
                }
                Ok(words.iter().map(|&word| f32::from_bits(word)).collect())
            }
            Place::FlagInData(first) => {
                let local = self.local(step.device, span.seq);
                let tags = &local.tags[first + start..][..len];
                let need = step.epoch;
                if let Some(word) = find(tags, |tag| tag != need) {
                    return Err(Fault::Tag {
                        buffer: id,
                        word: span.start + word as u32,
                        have: tags[word],
                        need,
                    });
                }
                let words = &local.arena[first + start..][..len];
                Ok(words.iter().map(|&word| f32::from_bits(word)).collect())
            }
            Place::Constant(values) => Ok(values[start..][..len].to_vec()),
            Place::Embedding { matrix, .. } => {
                let mut out = vec![0f32; len];
                packed[matrix.index()].decode(step.token, start, &mut out);
                Ok(out)
            }
            Place::KvCache(_) | Place::Logits => Err(Fault::Kind { buffer: id, kind: buffer.kind }),
        }
    }

    pub(crate) fn write(
        &mut self,
        buffer: BufferId,
        start: u32,
        words: &[u32],
        step: Step,
    ) -> Result<(), Fault> {
        let span = Span { buffer, start, len: words.len() as u32, seq: step.seq };
        let (kind, start) = (self.buffer(span)?.0.kind, start as usize);
        let (place, devices) = (&self.places[buffer.index()], self.program.topology.devices);
        let first = (step.seq * devices) as usize;
        // A store to a replicated buffer goes to every device.
        let to = match self.program.topology.is_replicated(buffer) {
            true => &mut self.devices[first..first + devices as usize],
            false => std::slice::from_mut(&mut self.devices[first + step.device as usize]),
        };
        match *place {
            Place::Plain(first) => to.iter_mut().for_each(|local| {
                local.arena[first + start..][..words.len()].copy_from_slice(words);
            }),
            Place::FlagInData(first) => {
                for local in to {
                    local.tags[first + start..][..words.len()].fill(step.epoch);
                    for (stored, &word) in local.arena[first + start..].iter_mut().zip(words) {
                        *stored = make_room(word);
                    }
                }
            }
            Place::Logits => {
                self.logits[step.seq as usize][start..][..words.len()].copy_from_slice(words)
            }
            Place::Constant(_) | Place::Embedding { .. } | Place::KvCache(_) => {
                return Err(Fault::Kind { buffer, kind });
            }
        }
        Ok(())
    }

    fn local(&self, device: u32, seq: u32) -> &Local {
        &self.devices[(seq * self.program.topology.devices + device) as usize]
    }

    pub(crate) fn dims(&self) -> Dims {
        self.program.dims
    }

    /// Element type of the caches.
    pub(crate) fn kv_dtype(&self) -> KvDtype {
        self.program.kv_dtype()
    }

    /// Number of words of a buffer; 0 for a buffer that does not exist.
    pub(crate) fn words(&self, buffer: BufferId) -> u32 {
        self.program.buffers.get(buffer.index()).map_or(0, |buffer| buffer.words)
    }

    fn cache(&self, buffer: BufferId) -> Result<usize, Fault> {
        match self.places.get(buffer.index()).ok_or(Fault::BadBuffer(buffer))? {
            Place::KvCache(layer) => Ok(*layer),
            Place::Plain(_)
            | Place::FlagInData(_)
            | Place::Constant(_)
            | Place::Embedding { .. }
            | Place::Logits => {
                Err(Fault::Kind { buffer, kind: self.program.buffers[buffer.index()].kind })
            }
        }
    }

    pub(crate) fn key_value(
        &self,
        buffer: BufferId,
        kv_head: u32,
        position: u32,
        step: Step,
    ) -> Result<(&[f32], &[f32]), Fault> {
        let cache = &self.caches[self.cache(buffer)?];
        let head = position as usize * self.program.dims.kv_heads as usize + kv_head as usize;
        let holder = cache.holder.get(head).copied().unwrap_or(Holder::None);
        if ![Holder::All, Holder::Device(step.device)].contains(&holder) {
            return Err(Fault::NoKey { buffer, kv_head, position });
        }
        let head_dim = self.program.dims.head_dim as usize;
        Ok((
            &cache.keys[head * head_dim..][..head_dim],
            &cache.values[head * head_dim..][..head_dim],
        ))
    }

    /// A row of a cache, whether this step has written it or not: what the window's mistakes read.
    pub(crate) fn stale(
        &self,
        buffer: BufferId,
        kv_head: u32,
        position: u32,
    ) -> Result<(&[f32], &[f32]), Fault> {
        let cache = &self.caches[self.cache(buffer)?];
        let head = position as usize * self.program.dims.kv_heads as usize + kv_head as usize;
        let words = head * self.program.dims.head_dim as usize;
        let row = words..words + self.program.dims.head_dim as usize;
        Ok((&cache.keys[row.clone()], &cache.values[row]))
    }

    pub(crate) fn append(&mut self, append: &Append, step: Step) -> Result<(), Fault> {
        let Append { buffer, kv_head, .. } = *append;
        let layer = self.cache(buffer)?;
        let cache = &mut self.caches[layer];
        let position = step.position;
        let head = position as usize * self.program.dims.kv_heads as usize + kv_head as usize;
        let mine = Holder::Device(step.device);
        if std::mem::replace(&mut cache.holder[head], mine) != Holder::None {
            return Err(Fault::KeyTwice { buffer, kv_head, position });
        }
        let head_dim = self.program.dims.head_dim as usize;
        cache.keys[head * head_dim..][..head_dim].copy_from_slice(&append.key);
        cache.values[head * head_dim..][..head_dim].copy_from_slice(&append.value);
        Ok(())
    }

    pub(crate) fn counter(&self, counter: CounterId, step: Step) -> Result<u64, Fault> {
        let counters = &self.local(step.device, 0).counters;
        counters.get(counter.index()).copied().ok_or(Fault::BadCounter(counter))
    }

    pub(crate) fn signal(&mut self, counter: CounterId, step: Step) -> Result<(), Fault> {
        let counters = &mut self.devices[step.device as usize].counters;
        *counters.get_mut(counter.index()).ok_or(Fault::BadCounter(counter))? += 1;
        Ok(())
    }

    /// The logits of a sequence of the last step; poison is NaN.
    pub(crate) fn logits(&self, seq: usize) -> Vec<f32> {
        self.logits[seq].iter().map(|&word| f32::from_bits(word)).collect()
    }

    pub(crate) fn layer(&self, layer: usize) -> Option<&Cache> {
        self.caches.get(layer)
    }

    /// Words stored in a buffer, as a reader sees them.
    pub(crate) fn as_read(&self, buffer: BufferId, words: &[u32]) -> Vec<f32> {
        let flag_in_data = matches!(self.places.get(buffer.index()), Some(Place::FlagInData(_)));
        let read = |&word: &u32| f32::from_bits(if flag_in_data { make_room(word) } else { word });
        words.iter().map(read).collect()
    }

    /// Contents of a plain or flag-in-data buffer on the first device after the last step.
    pub(crate) fn contents(&self, buffer: BufferId) -> Option<Vec<f32>> {
        let arena = &self.devices.first()?.arena;
        let words = self.words(buffer) as usize;
        match *self.places.get(buffer.index())? {
            Place::Plain(first) | Place::FlagInData(first) => {
                Some(arena[first..][..words].iter().map(|&w| f32::from_bits(w)).collect())
            }
            Place::Constant(_) | Place::Embedding { .. } | Place::KvCache(_) | Place::Logits => {
                None
            }
        }
    }
}

/// The first word that matches `is`. Matches are rare, so whole chunks are tested without an early exit.
fn find(words: &[u32], is: impl Fn(u32) -> bool) -> Option<usize> {
    let mut chunks = words.chunks(64).enumerate();
    let found = |chunk: &[u32]| chunk.iter().fold(false, |any, &word| any | is(word));
    let (index, chunk) = chunks.find(|(_, chunk)| found(chunk))?;
    chunk.iter().position(|&word| is(word)).map(|word| index * 64 + word)
}

/// A key and a value for the step's position.
pub(crate) struct Append {
    pub(crate) buffer: BufferId,
    pub(crate) kv_head: u32,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
}

/// The place of a buffer's words, if its source, kind, words and offset are consistent.
fn place(
    program: &Program,
    graph: &Graph,
    weights: &dyn Weights,
    (id, buffer): (BufferId, &Buffer),
) -> Result<Place, MachineError> {
    let misfit = MachineError::Buffer(id);
    let when = |fits: bool, place: Place| if fits { Ok(place) } else { Err(misfit) };
    let words = buffer.words as usize;
    let in_arena = || {
        let end = buffer.offset.checked_add(buffer.arena_bytes()).ok_or(misfit)?;
        let fits = buffer.offset % 8 == 0 && end <= program.arena_bytes / 4 * 4;
        if fits { Ok(buffer.offset as usize / 4) } else { Err(misfit) }
    };
    match (buffer.kind, &buffer.source) {
        (BufferKind::Plain, BufferSource::Scratch) => Ok(Place::Plain(in_arena()?)),
        (BufferKind::FlagInData, BufferSource::Scratch) => Ok(Place::FlagInData(in_arena()?)),
        (BufferKind::Logits, BufferSource::Scratch) => {
            when(buffer.words == program.dims.vocab, Place::Logits)
        }
        (BufferKind::Constant, BufferSource::Rotary(number)) => {
            let other = |n: u32| graph.rotary.get(n as usize);
            let table = number.checked_sub(1).map_or(Some(&graph.inv_freq), other);
            let table = table.filter(|table| table.len() == words).ok_or(misfit)?;
            Ok(Place::Constant(table.clone()))
        }
        (BufferKind::Constant, BufferSource::Vector(map)) => {
            let values = vector(map, graph, weights)?.ok_or(misfit)?;
            when(values.len() == words, Place::Constant(values))
        }
        (BufferKind::KvCache | BufferKind::KvCacheE4m3, BufferSource::KvCache { layer }) => {
            when(*layer < program.dims.layers, Place::KvCache(*layer as usize))
        }
        (BufferKind::Embedding, BufferSource::Embedding(matrix)) => {
            let cols = program.matrices.get(matrix.index()).ok_or(misfit)?.cols;
            Ok(Place::Embedding { matrix: *matrix, cols })
        }
        _ => Err(misfit),
    }
}
