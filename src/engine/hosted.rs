//! The engines without a GPU: the graph, and the lowered program on the reference VM. The host samples.

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use reference_vm::Order;
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use telemetry::now_ns;

use super::shared_pages::{Cached, SharedPages};
use super::{Account, Broken, Engine, clamped, refused, unknown};
use crate::context::Context;

/// Machines on the host, one per place, each with the tokens that it has run.
pub(super) struct Hosted<S, B, R> {
    begin: B,
    run: R,
    pub(super) sequences: BTreeMap<usize, (S, Vec<u32>)>,
    pub(super) shared: Option<SharedPages>,
    pub(super) account: Account,
    /// The number of the kernel that sequences begin with.
    kernel: usize,
    /// The position at which the last window began.
    pub(super) window_at: usize,
}

impl<S, B, R> Hosted<S, B, R> {
    fn new(begin: B, run: R, shared: Option<SharedPages>) -> Self {
        let account = Account::default();
        Self { begin, run, sequences: BTreeMap::new(), shared, account, kernel: 0, window_at: 0 }
    }
}

/// The graph, with no schedule: `--device eval`.
pub(crate) fn graph(context: &Context, shared: Option<SharedPages>) -> impl Engine {
    let (graph, weights) = (context.graph(), &*context.model.weights);
    let begin = move |_: usize| {
        let evaluator = Evaluator::new(graph, weights).map_err(|error| error.to_string())?;
        Ok(evaluator.with_capacity(context.kv_capacity))
    };
    let run = |evaluator: &mut Evaluator<'_>, tokens: &[u32], logits: Logits| {
        evaluator.run(tokens, logits).map_err(|error| error.to_string())
    };
    Hosted::new(begin, run, shared)
}

/// The lowered program on the reference VM: `--device cpu`.
pub(crate) fn reference<'a>(
    context: &'a Context,
    program: &'a Verified<Program>,
    shared: Option<SharedPages>,
) -> impl Engine + 'a {
    reference_of(context, move |_| program, shared)
}

/// The same with the programs of kernels by their numbers. A sequence ends on the kernel that it began with.
pub(crate) fn reference_of<'a>(
    context: &'a Context,
    programs: impl Fn(usize) -> &'a Verified<Program> + 'a,
    shared: Option<SharedPages>,
) -> impl Engine + 'a {
    let (graph, weights) = (context.graph(), &*context.model.weights);
    let begin = move |kernel: usize| {
        Machine::new(programs(kernel), graph, weights).map_err(|error| error.to_string())
    };
    let run = |machine: &mut Machine<'a>, tokens: &[u32], _: Logits| match machine
        .run(tokens, Order::Waves)
        .map_err(|error| error.to_string())?
    {
        Run::Finished(outputs) => Ok(outputs.logits),
        halted @ (Run::Trapped(_) | Run::Stuck { .. }) => {
            Err(search::Rejection::Halted(halted).to_string())
        }
    };
    Hosted::new(begin, run, shared)
}

impl<S, B, R> Hosted<S, B, R>
where
    S: Cached,
    R: Fn(&mut S, &[u32], Logits) -> Result<Vec<Vec<f32>>, String>,
{
    fn run(
        &mut self,
        place: usize,
        tokens: &[u32],
        logits: Logits,
    ) -> Result<Vec<Vec<f32>>, Broken> {
        let (sequence, fed) = self.sequences.get_mut(&place).ok_or_else(|| unknown(place))?;
        let began = now_ns();
        let rows = (self.run)(sequence, tokens, logits).map_err(Broken::Sequence)?;
        self.account.last = Some([began, now_ns()]);
        self.account.passes[0] += tokens.len() as u64;
        if let Some(shared) = &mut self.shared {
            fed.extend(tokens);
            shared.ran(place, sequence, fed).map_err(refused)?;
        }
        Ok(rows)
    }
}

impl<S, B, R> Engine for Hosted<S, B, R>
where
    S: Cached,
    B: Fn(usize) -> Result<S, String>,
    R: Fn(&mut S, &[u32], Logits) -> Result<Vec<Vec<f32>>, String>,
{
    fn has_room(&mut self, positions: u64, prompt: &[u32]) -> bool {
        self.shared.as_ref().is_none_or(|shared| shared.has_room(clamped(positions), prompt))
    }

    fn begin(&mut self, place: usize, positions: u64, prompt: &[u32]) -> Result<usize, Broken> {
        let mut sequence = (self.begin)(self.kernel).map_err(Broken::Sequence)?;
        let mut has = 0;
        if let Some(shared) = &mut self.shared {
            has = shared.begin(place, clamped(positions), prompt).map_err(refused)?;
            shared.restore(place, &mut sequence, has).map_err(refused)?;
        }
        self.sequences.insert(place, (sequence, prompt[..has].to_vec()));
        Ok(has)
    }

    fn shares(&self) -> bool {
        self.shared.is_some()
    }

    fn reuse(&mut self, place: usize, ran: usize, prompt: &[u32]) -> Result<usize, Broken> {
        let Some(shared) = &mut self.shared else { return Ok(ran) };
        let (sequence, fed) = self.sequences.get_mut(&place).ok_or_else(|| unknown(place))?;
        let has = shared.reuse(place, ran, prompt);
        if has > ran {
            shared.restore(place, sequence, has).map_err(refused)?;
            fed.extend(&prompt[ran..has]);
        }
        Ok(has)
    }

    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken> {
        let rows = self.run(place, tokens, if read { Logits::Last } else { Logits::Skip })?;
        Ok(rows.into_iter().next_back().unwrap_or_default())
    }

    fn rows(&mut self, place: usize, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Broken> {
        self.run(place, tokens, Logits::All)
    }

    fn window(&self) -> usize {
        S::WINDOW
    }

    fn window_rows(&mut self, place: usize, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Broken> {
        self.rows_of_window(place, tokens)
    }

    fn keep(&mut self, place: usize, tokens: &[u32]) -> Result<(), Broken> {
        self.keep_of_window(place, tokens)
    }

    fn rewind(&mut self, place: usize, positions: usize) -> Result<(), Broken> {
        self.rewound(place, positions)
    }

    fn kernel(&self) -> usize {
        self.kernel
    }

    fn switch(
        &mut self,
        number: usize,
        _: &Arc<Verified<Program>>,
        _: &KernelConfig,
    ) -> Result<(), String> {
        self.kernel = number;
        self.account.passes[0] = 0; // those of another program
        Ok(())
    }

    fn account(&self) -> Account {
        self.account
    }

    fn end(&mut self, place: usize) {
        self.sequences.remove(&place);
        self.shared.iter_mut().for_each(|shared| shared.end(place));
    }
}
