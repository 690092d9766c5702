//! Shared pages on the host: sequences get the bits that they get without sharing.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::context::Context;

const PAGE: usize = abi::KV_PAGE as usize;
const PLACES: usize = 3;
const CAPACITY: u32 = 512;

fn context() -> Context {
    let device = DeviceChoice::Cpu;
    let place = PlaceArgs { device, kv_capacity: Some(CAPACITY), ..PlaceArgs::default() };
    Context::load("toy", &place).unwrap_or_else(|failure| panic!("{}", failure.message))
}

fn pages(context: &Context) -> Option<SharedPages> {
    Some(SharedPages::new(PLACES, CAPACITY, context.graph().layers.len()))
}

/// A sequence under way: its place, its tokens, and how many have run.
struct Text {
    tokens: Vec<u32>,
    ran: usize,
}

/// Runs random sequences whose beginnings are few, side by side in pieces, with and without sharing. Returns how many
/// positions sharing saved.
fn histories(shared: &mut dyn Engine, plain: &mut dyn Engine, seed: u64, turns: usize) -> usize {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut texts: BTreeMap<usize, Text> = BTreeMap::new();
    let mut saved = 0;
    for _ in 0..turns {
        let place = random.random_range(0..PLACES);
        let Some(text) = texts.get_mut(&place) else {
            let blocks = (0..random.random_range(1..4)).map(|_| random.random_range(1..3));
            let mut tokens: Vec<u32> = blocks.flat_map(|block| [block; PAGE]).collect();
            tokens.truncate(tokens.len() - random.random_range(0..PAGE / 2));
            let positions = tokens.len() as u64 + 40;
            let ran = shared.begin(place, positions, &tokens).unwrap();
            assert_eq!(plain.begin(place, positions, &tokens), Ok(0));
            if ran > 0 {
                plain.feed(place, &tokens[..ran], false).unwrap();
            }
            saved += ran;
            texts.insert(place, Text { tokens, ran });
            continue;
        };
        let had = text.ran;
        text.ran = shared.reuse(place, had, &text.tokens).unwrap();
        if text.ran > had {
            plain.feed(place, &text.tokens[had..text.ran], false).unwrap();
            saved += text.ran - had;
        }
        // Turns of a scheduler: pieces of a page.
        let next = &text.tokens[text.ran..(text.ran + 64).min(text.tokens.len())];
        let rows = [shared.feed(place, next, true), plain.feed(place, next, true)];
        let [got, want] =
            rows.map(|row| row.unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        assert_eq!(got, want, "place {place}, after position {}", text.ran + next.len());
        text.ran += next.len();
        if text.ran == text.tokens.len() {
            shared.end(place);
            plain.end(place);
            texts.remove(&place);
        }
    }
    saved
}

#[test]
fn sequences_that_share_pages_have_the_bits_of_those_that_do_not() {
    let context = context();
    let config = crate::schedule_choice::reproducible(&context, CAPACITY);
    let program = Arc::new(context.lowered(&config).unwrap_or_else(|f| panic!("{}", f.message)));
    let mut machines = [pages(&context), None].map(|shared| reference(&context, &program, shared));
    let [shared, plain] = &mut machines;
    let saved = histories(shared, plain, 3, 40);
    assert!(saved >= 4 * PAGE, "only {saved} positions were shared");
    let mut graphs = [pages(&context), None].map(|shared| graph(&context, shared));
    let [shared, plain] = &mut graphs;
    let saved = histories(shared, plain, 4, 120);
    assert!(saved >= 12 * PAGE, "only {saved} positions were shared");
}

/// What a sequence finds depends on its own tokens: a page of another's keys would change the logits.
#[test]
fn a_beginning_that_differs_in_its_first_token_shares_nothing() {
    let context = context();
    let mut engine = graph(&context, pages(&context));
    let prompt = vec![5; 2 * PAGE + 1];
    assert_eq!(engine.begin(0, 300, &prompt), Ok(0));
    engine.feed(0, &prompt, false).unwrap();
    assert_eq!(engine.begin(1, 300, &prompt), Ok(2 * PAGE), "beside the one that runs");
    let other = [&[6], &prompt[1..]].concat();
    assert_eq!(engine.begin(2, 300, &other), Ok(0));
    engine.end(0);
    engine.end(1);
    assert_eq!(engine.begin(0, 300, &prompt[..PAGE]), Ok(0), "its last token has to run");
    assert_eq!(engine.begin(0, 300, &prompt[..=PAGE]), Ok(PAGE), "and after they have ended");
}
