//! Commands of a machine that samples, alone and in batches, on one that does not: the same tokens, and each altered one
//! is found.

use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::context::Context;
use crate::engine;

fn context() -> Context {
    let device = DeviceChoice::Cpu;
    let place = PlaceArgs { device, kv_capacity: Some(64), ..PlaceArgs::default() };
    Context::load("toy", &place).unwrap()
}

fn sampling(seed: u64) -> Sampling {
    Sampling { temperature: 0.8, seed, ..Sampling::default() }
}

/// The tokens that follow a prompt.
fn continued(context: &Context, prompt: &[u32], seed: u64, count: usize) -> Vec<u32> {
    let mut graph = engine::graph(context, None);
    graph.begin(0, 64, prompt).unwrap();
    let mut tokens = prompt.to_vec();
    let mut row = graph.feed(0, prompt, true).unwrap();
    while tokens.len() < prompt.len() + count {
        let mut seen = Seen::default();
        seen.extend(tokens.iter().copied());
        let token = sampling(seed).choose(&row, &seen, tokens.len() as u32).unwrap();
        tokens.push(token);
        row = graph.feed(0, &[token], true).unwrap();
    }
    tokens.split_off(prompt.len())
}

fn done(tokens: &[u32], ran: usize) -> Said<Done> {
    Said::Ok(Done { tokens: tokens.to_vec(), ran, stopped: false })
}

/// Two sessions of a GPU: the first alone, then both in batches.
fn log(context: &Context) -> Vec<Entry> {
    let prompts = [vec![1, 2, 3, 4, 5], vec![9, 8]];
    let texts = [continued(context, &prompts[0], 1, 8), continued(context, &prompts[1], 2, 6)];
    let mut entries = Vec::new();
    for (place, prompt) in prompts.iter().enumerate() {
        let session = place as u64 + 1;
        entries.push(Entry::Begin {
            session,
            place,
            positions: 20,
            prompt: prompt.clone(),
            said: Said::Ok(0),
        });
        let (settings, said) = (Settings::from(&sampling(session)), Said::Ok(true));
        entries.push(Entry::Sampling { session, place, sampling: settings, stop: vec![], said });
    }
    let advance = |session: u64, position, tokens: &[u32], said| Entry::Advance {
        session,
        place: session as usize - 1,
        position,
        kernel: 0,
        tokens: tokens.to_vec(),
        generate: 16,
        said,
    };
    // A chunk of the prompt, then its rest with tokens; a request that arrives cuts it short.
    entries.push(advance(1, 0, &prompts[0], done(&[], 3)));
    entries.push(advance(1, 3, &prompts[0][3..], done(&texts[0][..2], 3)));
    entries.push(advance(2, 0, &prompts[1], done(&texts[1][..1], 2)));
    for step in 0..2 {
        let at = [(1, 6 + 2 * step, texts[0][1 + 2 * step]), (2, 2 + 2 * step, texts[1][2 * step])];
        let seq = |(session, position, token): (u64, usize, u32)| Seq {
            session,
            place: session as usize - 1,
            position,
            token,
            prompt: Vec::new(),
        };
        let said = vec![
            done(&texts[0][2 + 2 * step..4 + 2 * step], 2),
            done(&texts[1][1 + 2 * step..3 + 2 * step], 2),
        ];
        let seqs = at.map(seq).to_vec();
        entries.push(Entry::Together { seqs, kernel: 0, generate: 16, said: Said::Ok(said) });
    }
    entries.push(Entry::End { session: 1, place: 0 });
    entries.push(Entry::End { session: 2, place: 1 });
    entries
}

fn replayed(context: &Context, entries: &[Entry]) -> (Compared, Option<Halt>) {
    let mut graph = engine::graph(context, None);
    let mut again = Again::new(&mut graph, true);
    let lines = entries.iter().zip(1..);
    let halt = lines
        .map(|(entry, n)| Line { n, at_ns: 0, took_ns: 0, entry: entry.clone() })
        .find_map(|line| again.line(&line).err());
    (again.compared(), halt)
}

#[test]
fn what_a_machine_sampled_is_sampled_again() {
    let context = context();
    let entries = log(&context);
    let (compared, halt) = replayed(&context, &entries);
    assert_eq!(halt, None);
    assert_eq!((compared.tokens, compared.unruled), (2 + 1 + 2 * 4, 0));
}

#[test]
fn the_order_of_a_batch_changes_nothing() {
    let context = context();
    let mut entries = log(&context);
    for entry in &mut entries {
        if let Entry::Together { seqs, said: Said::Ok(said), .. } = entry {
            seqs.reverse();
            said.reverse();
        }
    }
    assert_eq!(replayed(&context, &entries).1, None);
}

#[test]
fn an_altered_token_of_a_batch_is_found_with_its_position() {
    let context = context();
    let mut entries = log(&context);
    let Some(Entry::Together { said: Said::Ok(said), .. }) = entries.get_mut(7) else { panic!() };
    let Said::Ok(second) = &mut said[1] else { panic!() };
    second.tokens[1] ^= 1;
    let altered = second.tokens[1];
    let Some(Halt::Differs(found)) = replayed(&context, &entries).1 else { panic!() };
    // It begins at position 2 with one token, and samples those of positions 3 and 4.
    assert_eq!((found.entry, found.session, found.position), (8, 2, 4));
    assert_eq!((found.what, found.expected), ("token", altered.to_string()));
}

#[test]
fn a_log_that_contradicts_itself_is_no_difference() {
    let context = context();
    let mut entries = log(&context);
    entries.remove(4);
    let (_, halt) = replayed(&context, &entries);
    assert!(matches!(&halt, Some(Halt::Nonsense(why)) if why.contains("entry 5")), "{halt:?}");
    let orphan = [Entry::End { session: 9, place: 0 }, entries[3].clone()];
    assert!(matches!(replayed(&context, &orphan).1, Some(Halt::Nonsense(_))));
}

/// Batches in which the second session reads its prompt; the first of them ends before the prompt does.
#[test]
fn a_prompt_that_was_read_in_batches_is_read_again() {
    let context = context();
    let (first, second) = (vec![1, 2, 3, 4, 5], vec![9, 8]);
    let texts = [continued(&context, &first, 1, 8), continued(&context, &second, 2, 6)];
    let mut entries = log(&context);
    let own = |entry: &Entry| matches!(entry, Entry::Advance { session: 2, .. });
    entries.retain(|entry| !own(entry) && !matches!(entry, Entry::Together { .. }));
    let seq = |session: u64, position, tokens: &[u32]| Seq {
        session,
        place: session as usize - 1,
        position,
        token: tokens[0],
        prompt: tokens[1..].to_vec(),
    };
    let batch = |seqs: [Seq; 2], said: [Said<Done>; 2]| {
        let (seqs, said) = (seqs.to_vec(), Said::Ok(said.to_vec()));
        Entry::Together { seqs, kernel: 0, generate: 16, said }
    };
    let ends = entries.len() - 2;
    let read = batch(
        [seq(1, 6, &texts[0][1..2]), seq(2, 0, &second)],
        [done(&texts[0][2..3], 1), done(&[], 1)],
    );
    let went_on = batch(
        [seq(1, 7, &texts[0][2..3]), seq(2, 1, &second[1..])],
        [done(&texts[0][3..5], 2), done(&texts[1][..2], 2)],
    );
    entries.splice(ends..ends, [read, went_on]);
    let (compared, halt) = replayed(&context, &entries);
    assert_eq!(halt, None);
    assert_eq!(compared.tokens, 2 + 1 + 4);
    let Entry::Together { seqs, .. } = &mut entries[ends] else { panic!() };
    seqs[1].token ^= 1;
    assert!(matches!(replayed(&context, &entries).1, Some(Halt::Differs(_))));
}
