//! The links between GPUs: whether one can access another's memory, and how long a word takes.

use std::time::Duration;

use crate::card::{Card, PROBE_VARIANT, load_module};
use crate::devices::Cards;
use crate::driver::Stream;
use crate::error::HostError;
use crate::memory::{DeviceBuffer, HostBuffer};

/// Words that are sent there and back.
const ROUNDS: u32 = 10_000;

/// How long the kernels of a measurement wait for each other.
const DEADLINE: Duration = Duration::from_secs(2);

/// Two GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Their numbers.
    pub cards: [u32; 2],
    /// Microseconds that a word takes from a kernel on one to a kernel on the other; `None` if they cannot access each other's memory.
    pub hop_us: Option<f64>,
}

/// Measures the link between each two of the GPUs of this machine. No kernel of ours may be resident.
///
/// # Errors
/// If there are no kernels for a GPU, or a launch fails.
pub fn links() -> Result<Vec<Link>, HostError> {
    let cards: Vec<Card> = (0..).map(Card::new).take_while(|card| card.info().is_ok()).collect();
    let pairs =
        cards.iter().enumerate().flat_map(|(n, &a)| cards[n + 1..].iter().map(move |&b| [a, b]));
    pairs.map(link).collect()
}

fn link(pair: [Card; 2]) -> Result<Link, HostError> {
    let cards = pair.map(Card::ordinal);
    match Cards::open(&pair, 2) {
        Ok(opened) => Ok(Link { cards, hop_us: Some(hop_us(&opened)?) }),
        Err(HostError::NoPeerAccess { .. } | HostError::Request(_)) => {
            Ok(Link { cards, hop_us: None })
        }
        Err(error) => Err(error),
    }
}

/// Half the time of a word there and back.
fn hop_us(cards: &Cards) -> Result<f64, HostError> {
    let info = cards.info()?;
    let modules = cards.on_cards(|| Ok(load_module(&PROBE_VARIANT, &info)?.0))?;
    let streams = cards.on_cards(Stream::new)?;
    let words = cards.on_cards(|| DeviceBuffer::zeroed(256))?;
    let kernels = modules.iter().map(|module| module.function(c"amk_hop"));
    let kernels = kernels.collect::<Result<Vec<_>, _>>()?;
    let out = HostBuffer::zeroed(size_of::<u64>())?;
    for (index, kernel) in kernels.iter().enumerate().rev() {
        let (mut mine, mut theirs) = (words[index].address, words[1 - index].address);
        let (mut first, mut rounds) = (u32::from(index == 0), ROUNDS);
        let (mut deadline, mut out) = (DEADLINE.as_nanos() as u64, out.device);
        let mut arguments: [*mut std::ffi::c_void; 6] = [
            (&raw mut mine).cast(),
            (&raw mut theirs).cast(),
            (&raw mut first).cast(),
            (&raw mut rounds).cast(),
            (&raw mut deadline).cast(),
            (&raw mut out).cast(),
        ];
        streams[index].launch(kernel, 1, 32, 0, &mut arguments)?;
    }
    streams.iter().try_for_each(Stream::synchronize)?;
    let mut bytes = [0; size_of::<u64>()];
    out.read(0, &mut bytes);
    match u64::from_le_bytes(bytes) {
        0 => Err(HostError::TimedOut { waited: DEADLINE, alive: false }),
        ns => Ok(ns as f64 / 1000.0 / f64::from(2 * ROUNDS)),
    }
}
