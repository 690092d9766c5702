//! Several devices in one chunk: what each computes is copied to the others, and none goes on before it has all.
//!
//! A device computes its rows of each matrix and the attention of its heads. The vectors that are multiplied next have the rows of all devices, and
//! so has the residual stream. Between two meetings a device writes only its own piece of a buffer, here and on the others, and reads pieces that
//! were complete at the first.

use std::ops::Range;

use super::part::Run;
use super::{BLOCK_TOKENS, X_COLS, X_ROW_BYTES};
use crate::driver::{Event, Stream};
use crate::error::HostError;

/// The tokens of a chunk that a kernel processes.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) first: u32, // a multiple of 128
    pub(super) count: u32,
}

/// The tokens of a chunk that a layer runs behind its keys and values: in the last layer only the last one's block is needed.
pub(super) fn rows_of_layer(index: usize, layers: usize, count: u32) -> Rows {
    let last = index + 1 == layers;
    let first = if last { count.saturating_sub(1) / BLOCK_TOKENS * BLOCK_TOKENS } else { 0 };
    Rows { first, count: count - first }
}

/// What all devices have whole.
#[derive(Clone, Copy)]
pub(super) enum Shared {
    /// The vectors after the attention.
    Attended,
    /// The residual stream with them.
    Output,
    /// The logits that experts are chosen by.
    ExpertLogits,
    /// The hidden layers of experts.
    Experts,
    /// The hidden layer that every token has.
    Hidden,
    /// The residual stream with it.
    Down,
}

/// Bytes of a buffer: so many rows, `pitch` apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) pitch: u64,
    pub(crate) width: u64,
    pub(crate) rows: u64,
}

/// Bytes before a column of vectors, a multiple of 64.
pub(super) fn columns_before(column: u32, chunk: u32) -> u64 {
    u64::from(column / X_COLS) * u64::from(chunk) * u64::from(X_ROW_BYTES)
}

/// Columns of the vectors of some tokens; both ends are multiples of 64.
pub(super) fn vectors_of(columns: Range<u32>, chunk: u32, rows: Rows) -> Piece {
    let row = u64::from(X_ROW_BYTES);
    Piece {
        offset: columns_before(columns.start, chunk) + u64::from(rows.first) * row,
        pitch: u64::from(chunk) * row,
        width: u64::from(rows.count) * row,
        rows: u64::from((columns.end - columns.start).div_ceil(X_COLS)),
    }
}

/// Columns of some tokens' rows of f32.
pub(super) fn rows_of(columns: Range<u32>, stride: u32, rows: Rows) -> Piece {
    let pitch = u64::from(stride) * 4;
    Piece {
        offset: u64::from(rows.first) * pitch + u64::from(columns.start) * 4,
        pitch,
        width: u64::from(columns.end - columns.start) * 4,
        rows: rows.count.into(),
    }
}

/// Whether devices have whole blocks of 64 columns, if `count` groups of `each` columns are dealt to them.
pub(super) fn whole_blocks(count: u32, each: u32, devices: u32) -> bool {
    (1..devices).all(|device| {
        let before = u64::from(count) * u64::from(device) / u64::from(devices);
        (before * u64::from(each)).is_multiple_of(X_COLS.into())
    })
}

/// The devices' parts of a chunk.
pub(super) struct Runs<'a> {
    pub(super) runs: Vec<Run<'a>>,
    /// Of each device: it has computed its piece, and copied it to the others.
    ended: Vec<Event>,
}

impl<'a> Runs<'a> {
    pub(super) fn new(runs: Vec<Run<'a>>) -> Result<Self, HostError> {
        let event = |run: &Run<'_>| run.stream.owner().within(Event::new);
        let ended = runs.iter().map(event).collect::<Result<_, _>>()?;
        Ok(Self { runs, ended })
    }

    fn each(
        &mut self,
        mut enqueue: impl FnMut(&mut Run<'a>) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        self.runs.iter_mut().try_for_each(&mut enqueue)
    }

    /// Copies each device's piece to the others. What a device enqueues afterwards begins when it has all pieces.
    fn share(&mut self, what: Shared, index: usize, rows: Rows) -> Result<(), HostError> {
        if self.runs.len() == 1 {
            return Ok(());
        }
        for (from, run) in self.runs.iter().enumerate() {
            let (source, piece) = run.part.shared(what, index, rows);
            for (to, other) in self.runs.iter().enumerate().filter(|(to, _)| *to != from) {
                let (target, _) = other.part.shared(what, index, rows);
                debug_assert_ne!((to, target), (from, source), "memory of another device");
                run.stream.copy_rows(target, source, &piece)?;
            }
            self.ended[from].record(run.stream)?;
        }
        for (at, run) in self.runs.iter().enumerate() {
            let mut others = self.ended.iter().enumerate().filter(|(from, _)| *from != at);
            others.try_for_each(|(_, ended)| run.stream.wait_for(ended))?;
        }
        Ok(())
    }

    /// Enqueues a chunk of `count` tokens at `start`.
    pub(super) fn chunk(&mut self, start: u32, count: u32, logits: bool) -> Result<(), HostError> {
        self.embed(count)?;
        (0..self.layers()).try_for_each(|index| self.layer(index, (start, count), logits))
    }

    /// The number of layers.
    pub(super) fn layers(&self) -> usize {
        self.runs.first().map_or(0, |run| run.part.plan.layers.len())
    }

    /// Enqueues the embedding of a chunk of `count` tokens.
    pub(super) fn embed(&mut self, count: u32) -> Result<(), HostError> {
        self.each(|run| run.embed(count))
    }

    /// Enqueues a layer of a chunk: what the next one needs of it stays in the memory of chunks.
    pub(super) fn layer(
        &mut self,
        index: usize,
        (start, count): (u32, u32),
        logits: bool,
    ) -> Result<(), HostError> {
        let layers = self.layers();
        let last = index + 1 == layers;
        self.each(|run| run.keys(index, start, count))?;
        if last && !logits {
            return Ok(());
        }
        let rows = rows_of_layer(index, layers, count);
        self.each(|run| run.attention(index, start, rows))?;
        self.share(Shared::Attended, index, rows)?;
        self.each(|run| run.output(index, rows))?;
        self.share(Shared::Output, index, rows)?;
        self.mlp(index, rows)?;
        if last { self.each(|run| run.logits(rows)) } else { Ok(()) }
    }

    /// The residual stream after a layer's MLP or experts.
    fn mlp(&mut self, index: usize, rows: Rows) -> Result<(), HostError> {
        let router = |run: &Run<'a>| run.part.plan.layers[index].router.as_ref();
        if let Some(router) = self.runs.first().and_then(router) {
            return self.experts(index, rows, router.shared.is_some());
        }
        self.each(|run| run.gate_up(index, rows))?;
        self.share(Shared::Hidden, index, rows)?;
        self.each(|run| run.down(index, rows))?;
        self.share(Shared::Down, index, rows)
    }

    /// The same of experts. All devices have all logits, so they choose the same experts and give choices the same places.
    fn experts(&mut self, index: usize, rows: Rows, shared: bool) -> Result<(), HostError> {
        self.each(|run| run.expert_logits(index, rows))?;
        self.share(Shared::ExpertLogits, index, rows)?;
        self.each(|run| run.experts_up(index, rows))?;
        if shared {
            self.share(Shared::Hidden, index, rows)?;
        }
        self.share(Shared::Experts, index, rows)?;
        self.each(|run| run.experts_down(index, rows))?;
        self.share(Shared::Down, index, rows)
    }

    /// The streams of all devices.
    pub(super) fn streams(&self) -> impl Iterator<Item = &'a Stream> {
        self.runs.iter().map(|run| run.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each byte of a buffer belongs to a piece.
    fn covered(bytes: u64, pieces: &[Piece]) -> Vec<u8> {
        let mut times = vec![0; bytes as usize];
        for piece in pieces {
            for row in 0..piece.rows {
                let at = (piece.offset + row * piece.pitch) as usize;
                times[at..at + piece.width as usize].iter_mut().for_each(|times| *times += 1);
            }
        }
        times
    }

    #[test]
    fn the_pieces_of_all_devices_are_the_tokens_of_the_buffer() {
        let (chunk, rows) = (8, Rows { first: 2, count: 5 });
        let pieces = [0..128, 128..128, 128..320].map(|columns| vectors_of(columns, chunk, rows));
        let row = u64::from(X_ROW_BYTES);
        let times = covered(5 * u64::from(chunk) * row, &pieces);
        for (at, times) in times.iter().enumerate() {
            let token = at as u64 / row % u64::from(chunk);
            assert_eq!(*times == 1, (2..7).contains(&token), "byte {at}");
        }
        let pieces = [0..24, 24..40].map(|columns| rows_of(columns, 40, rows));
        let times = covered(8 * 40 * 4, &pieces);
        let expected: Vec<u8> =
            (0..8 * 160).map(|at| u8::from((2..7).contains(&(at / 160)))).collect();
        assert_eq!(times, expected);
    }

    #[test]
    fn large_models_divide_into_whole_blocks_and_odd_ones_do_not() {
        // Heads and hidden layer of llama-3.1-70b and qwen3-32b, and the hidden layer of smollm2-135m.
        for (count, each) in [(8, 8 * 128), (28672 / 8, 8), (25600 / 8, 8), (1536 / 8, 8)] {
            for devices in [1, 2, 4, 8] {
                assert!(whole_blocks(count, each, devices), "{count} {each} {devices}");
            }
        }
        assert!(whole_blocks(3, 3 * 64, 2), "heads that do not divide evenly");
        assert!(!whole_blocks(2, 2 * 16, 2), "a block of the vectors belongs to two devices");
    }
}
