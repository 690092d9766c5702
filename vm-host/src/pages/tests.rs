//! The pool under any sequence of calls, and the addresses against those of the device's source.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Operations on a pool.
#[derive(Clone, Copy, Debug)]
enum Call {
    Promise(u32, u32),
    Grow(u32, u32),
    Release(u32),
}

fn calls(sessions: u32) -> impl Strategy<Value = Vec<Call>> {
    let positions = 0_u32..20 * KV_PAGE;
    let call = prop_oneof![
        (0..=sessions, positions.clone()).prop_map(|(s, n)| Call::Promise(s, n)),
        (0..=sessions, positions).prop_map(|(s, n)| Call::Grow(s, n)),
        (0..=sessions).prop_map(Call::Release),
    ];
    proptest::collection::vec(call, 0..120)
}

/// Every page is free, idle, or held by as many sessions as it says, and promises hold.
fn check(pool: &PagePool, sessions: u32) {
    let mut holders = vec![0; pool.pages as usize + 1];
    for session in 0..sessions {
        let held = pool.held(session);
        held.iter().for_each(|&page| holders[page as usize] += 1);
        let once: std::collections::BTreeSet<_> = held.iter().collect();
        assert_eq!(once.len(), held.len(), "a page twice: {pool:?}");
    }
    assert_eq!(holders, pool.holders, "{pool:?}");
    let held = holders.iter().filter(|holders| **holders > 0).count() as u32;
    let unheld = pool.free.iter().copied().chain(pool.prefixes.idle_pages());
    let mut all: Vec<u32> =
        unheld.chain((1..=pool.pages).filter(|page| holders[*page as usize] > 0)).collect();
    all.sort_unstable();
    assert!(all.into_iter().eq(1..=pool.pages), "a page is lost or made: {pool:?}");
    assert!(pool.shares.iter().all(|share| share.held.len() <= share.promised as usize));
    let owed: u32 = pool.shares.iter().map(|share| share.promised - share.held.len() as u32).sum();
    assert!(owed == pool.owed && held == pool.held && held + owed <= pool.pages, "{pool:?}");
    let told = Occupancy { pages: pool.pages, held, promised: held + owed };
    assert_eq!(pool.occupancy(), told);
}

proptest! {
    #[test]
    fn no_page_is_lost_made_or_in_two_sessions(
        sessions in 1_u32..6, pages in 0_u32..40, calls in calls(5),
    ) {
        let mut pool = PagePool::new(sessions, pages);
        for call in calls {
            let before = pool.clone();
            let (session, done) = match call {
                Call::Promise(s, n) => (s, pool.promise(s, n)),
                Call::Grow(s, n) => {
                    let grown = pool.grow(s, n);
                    if let Ok(had) = grown {
                        prop_assert_eq!(pool.held(s).len(), had.max(pages_of(n) as usize));
                        prop_assert_eq!(&pool.held(s)[..had], before.held(s), "pages stay");
                    }
                    (s, grown.map(|_| ()))
                }
                Call::Release(s) => {
                    pool.release(s);
                    prop_assert!(pool.held(s).is_empty());
                    (s, Ok(()))
                }
            };
            check(&pool, sessions);
            for other in (0..sessions).filter(|&other| other != session) {
                prop_assert_eq!(pool.held(other), before.held(other), "{:?} is another's", call);
            }
            if let Err(lacking) = done {
                prop_assert_eq!(pool.occupancy(), before.occupancy(), "a refusal changes nothing");
                let known = session < sessions;
                prop_assert!(!known || lacking.wanted > lacking.unpromised, "{}", lacking);
            }
        }
        (0..sessions).for_each(|session| pool.release(session));
        prop_assert_eq!(pool.occupancy(), Occupancy { pages, ..Occupancy::default() });
    }
}

/// A step of a random history of sessions with prompts.
#[derive(Clone, Debug)]
enum Step {
    /// A prompt of whole and partial blocks, and positions for an answer.
    Begin(u32, Vec<u32>, u32),
    Run(u32, u32),
    End(u32),
    Forget,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let session = || 0_u32..4;
    // Few different blocks, so that beginnings meet; the last is cut.
    let prompt = (proptest::collection::vec(0_u32..2, 1..5), 1..=KV_PAGE);
    let prompt = prompt.prop_map(|(blocks, last)| {
        let mut tokens: Vec<u32> = blocks.iter().flat_map(|b| [*b; KV_PAGE as usize]).collect();
        tokens.truncate(tokens.len() - (KV_PAGE - last) as usize);
        tokens
    });
    let begin = (session(), prompt, 0_u32..300).prop_map(|(s, p, n)| Step::Begin(s, p, n));
    let run = (session(), prop_oneof![Just(KV_PAGE), 1_u32..300]);
    let step = prop_oneof![
        4 => begin,
        10 => run.prop_map(|(s, n)| Step::Run(s, n)),
        4 => session().prop_map(Step::End),
        1 => Just(Step::Forget),
    ];
    proptest::collection::vec(step, 0..150)
}

/// A session's tokens, how many were prompt, how many have run, and the most that may.
#[derive(Clone, Debug, Default)]
struct Text {
    tokens: Vec<u32>,
    prompt: usize,
    ran: u32,
    most: u32,
}

/// What each page holds: the tokens from position zero to its end.
type Contents = BTreeMap<u32, Vec<u32>>;

/// Runs positions of a session as the engine does. Returns how many were taken from others.
fn run(pool: &mut PagePool, contents: &mut Contents, (s, n): (u32, u32), text: &mut Text) -> u32 {
    let before = text.ran;
    text.ran = pool.reuse(s, before, &text.tokens[..text.prompt]);
    let reused = text.ran - before;
    let end = (text.ran + n).min(text.most);
    // Answers differ from session to session.
    text.tokens.resize(text.tokens.len().max(end as usize), 100 + s);
    assert!(pool.grow(s, end).is_ok(), "promised: {pool:?}");
    for position in text.ran..end {
        let page = pool.held(s)[(position / KV_PAGE) as usize];
        assert!(pool.is_own(page), "{page} is written while others may have it: {pool:?}");
        contents.insert(page, text.tokens[..=position as usize].to_vec());
    }
    text.ran = end;
    pool.publish(s, &text.tokens[..end as usize]);
    reused
}

proptest! {
    #[test]
    fn shared_pages_hold_what_each_session_would_have_written(pages in 8_u32..30, steps in steps()) {
        let (mut pool, mut contents) = (PagePool::new(4, pages), Contents::new());
        let mut texts: BTreeMap<u32, Text> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Begin(s, tokens, answer) if !texts.contains_key(&s) => {
                    let most = tokens.len() as u32 + answer;
                    let (room, before) = (pool.has_room(most, &tokens), pool.occupancy());
                    let begun = pool.begin(s, most, &tokens);
                    prop_assert_eq!(room, begun.is_ok(), "{:?}", pool);
                    match begun {
                        Ok(ran) => {
                            prop_assert!(ran < tokens.len() as u32, "its last token has to run");
                            texts.insert(s, Text { prompt: tokens.len(), tokens, ran, most });
                        }
                        Err(_) => prop_assert_eq!(pool.occupancy(), before),
                    }
                }
                Step::Run(s, n) => if let Some(text) = texts.get_mut(&s) {
                    run(&mut pool, &mut contents, (s, n), text);
                },
                Step::End(s) => {
                    pool.release(s);
                    texts.remove(&s);
                }
                Step::Forget => {
                    // What follows a lost machine: every session ends.
                    pool.forget();
                    texts.keys().for_each(|s| pool.release(*s));
                    texts.clear();
                    contents.clear();
                }
                Step::Begin(..) => {}
            }
            check(&pool, 4);
            for (s, text) in &texts {
                for (index, page) in (0..text.ran / KV_PAGE).zip(pool.held(*s)) {
                    let end = ((index + 1) * KV_PAGE) as usize;
                    prop_assert_eq!(&contents[page][..], &text.tokens[..end], "page {} of {}", page, s);
                }
            }
        }
    }
}

/// A pool in which a session has run and ended a prompt of this many pages and a token.
fn with_prompt(pages: u32, prompt_pages: u32) -> (PagePool, Vec<u32>) {
    let mut pool = PagePool::new(3, pages);
    let tokens: Vec<u32> = (0..=prompt_pages * KV_PAGE).collect();
    assert_eq!(pool.begin(0, tokens.len() as u32, &tokens), Ok(0), "nothing is known");
    pool.grow(0, tokens.len() as u32).expect("it was promised");
    assert_eq!(pool.publish(0, &tokens).len(), prompt_pages as usize);
    assert!(pool.publish(0, &tokens).is_empty(), "once");
    pool.release(0);
    (pool, tokens)
}

#[test]
fn a_prompt_that_was_there_is_there_again_and_takes_no_second_page() {
    let (mut pool, tokens) = with_prompt(7, 4);
    let all = tokens.len() as u32;
    assert_eq!(pool.occupancy(), Occupancy { pages: 7, held: 0, promised: 0 });
    for (session, held) in [(0, 4), (1, 4)] {
        assert_eq!(pool.begin(session, all, &tokens), Ok(4 * KV_PAGE));
        assert_eq!(pool.held(session).len(), held);
    }
    assert_eq!(pool.held(0), pool.held(1));
    assert_eq!(pool.occupancy(), Occupancy { pages: 7, held: 4, promised: 6 });
    // A third would need one page, as the others; one that shares nothing needs five.
    assert!(pool.has_room(all, &tokens) && !pool.has_room(all, &tokens[1..]));
    // Another first token is another beginning.
    assert_eq!(pool.begin(2, KV_PAGE, &[9; 300]), Ok(0));
    pool.release(0);
    assert_eq!(pool.held(1).len(), 4, "another's end takes nothing");
}

#[test]
fn the_last_token_of_a_prompt_runs_even_if_its_page_is_known() {
    let (mut pool, tokens) = with_prompt(9, 2);
    assert_eq!(pool.begin(0, 400, &tokens[..2 * KV_PAGE as usize]), Ok(KV_PAGE));
}

#[test]
fn idle_pages_are_evicted_when_they_are_needed_the_ends_of_beginnings_first() {
    let (mut pool, tokens) = with_prompt(5, 4);
    let prefix = |pool: &PagePool| pool.prefixes.find(&tokens).len();
    assert_eq!(prefix(&pool), 4);
    pool.grow(1, 3 * KV_PAGE).expect("one is free, two are evicted");
    assert_eq!(prefix(&pool), 2);
    assert_eq!(pool.begin(0, 2 * KV_PAGE + 1, &tokens), Err(pool.refuse(0, 3)), "two are idle");
    pool.release(1);
    assert_eq!(pool.begin(0, 2 * KV_PAGE + 1, &tokens), Ok(2 * KV_PAGE));
}

#[test]
fn sessions_that_run_side_by_side_take_over_what_the_first_has_filled() {
    let (tokens, all) = ((0..1000).collect::<Vec<u32>>(), 1000);
    let mut pool = PagePool::new(2, 20);
    for session in [0, 1] {
        assert_eq!(pool.begin(session, all, &tokens), Ok(0));
    }
    pool.grow(0, 3 * KV_PAGE + 5).expect("promised");
    pool.publish(0, &tokens[..3 * KV_PAGE as usize + 5]);
    assert_eq!(pool.reuse(1, 0, &tokens), 3 * KV_PAGE);
    assert_eq!(pool.held(1), &pool.held(0)[..3]);
    assert_eq!(pool.reuse(1, 3 * KV_PAGE, &tokens), 3 * KV_PAGE, "no more is there");
    pool.grow(1, 3 * KV_PAGE + 1).expect("promised");
    assert_eq!(pool.reuse(1, 3 * KV_PAGE + 1, &tokens), 3 * KV_PAGE + 1, "in the middle of a page");
    pool.forget();
    assert_eq!(pool.prefixes.find(&tokens).len(), 0);
    pool.publish(0, &tokens[..4 * KV_PAGE as usize]);
    assert_eq!(pool.prefixes.find(&tokens).len(), 0, "what was lost is not known again");
}

#[test]
fn what_was_promised_can_be_had_whatever_others_ask() {
    let mut pool = PagePool::new(3, 10);
    pool.promise(0, 6 * KV_PAGE).expect("six of ten");
    let error = pool.promise(1, 4 * KV_PAGE + 1).expect_err("five of four");
    let lacking = NoPages { session: 1, wanted: 5, unpromised: 4, pages: 10 };
    assert_eq!(error, lacking);
    let said = error.to_string();
    assert!(said.contains("5 more pages") && said.contains("4 of 10"), "{said}");
    pool.grow(2, 4 * KV_PAGE).expect("the rest, unpromised");
    assert!(pool.grow(2, 4 * KV_PAGE + 1).is_err());
    assert_eq!(pool.grow(0, 6 * KV_PAGE), Ok(0), "promised");
    pool.release(2);
    pool.promise(1, 4 * KV_PAGE).expect("given back");
}

#[test]
fn pools_are_as_large_as_they_are_asked_to_be() {
    let (capacity, page) = (1000, u64::from(KV_PAGE));
    assert_eq!(pool_pages(KvPool::Full, (3, capacity), 24, 2), Ok(24));
    assert_eq!(pool_pages(KvPool::Full, (3, capacity), 23, 2), Err(24));
    assert_eq!(pool_pages(KvPool::Fitting, (3, capacity), 23, 2), Ok(21));
    assert_eq!(pool_pages(KvPool::Fitting, (3, capacity), 7, 2), Err(8), "one session at least");
    assert_eq!(pool_pages(KvPool::Positions(page + 1), (3, capacity), 99, 2), Ok(2));
    assert_eq!(pool_pages(KvPool::Positions(0), (3, capacity), 99, 2), Ok(1));
    assert_eq!(
        pool_pages(KvPool::Positions(1 << 40), (3, capacity), 99, 2),
        Ok(24),
        "no more than all"
    );
    let most = u64::from(KV_PAGES_MAX - 1);
    assert_eq!(pool_pages(KvPool::Full, (64, 1 << 18), 1 << 40, 2), Ok(most as u32), "16 bits");
    assert_eq!((row_words(1), row_words(7 * KV_PAGE), row_words(8 * KV_PAGE)), (8, 8, 16));
}

/// Addresses that the device's source gives to rows, for heads of this many elements.
fn device_says(compiler: &str, head_dim: u32, spoil: Option<(&str, &str)>, asked: &str) -> String {
    let sources = ["amk_abi.h", "keys.cuh", "pages.cuh"];
    let defines = [format!("-DAMK_HEAD_DIM={head_dim}"), "-DAMK_FEATURES=0".to_owned()];
    crate::emulated::run(compiler, "pages", (&sources, &defines), spoil, asked)
}

/// The input of pages.cpp and its expected output: for runs of keys in sessions with pages in any order, each copy that the loader makes.
fn copies(layout: PageLayout) -> (String, String) {
    use rand::{RngExt, SeedableRng};
    use std::fmt::Write as _;
    let mut random = rand::rngs::Xoshiro256PlusPlus::seed_from_u64(21);
    let (sessions, capacity) = (5, 40 * KV_PAGE - 3);
    let stride = row_words(capacity);
    let mut pool = PagePool::new(sessions, 120);
    for _ in 0..400 {
        let session = random.random_range(0..sessions);
        match random.random_range(0..8) {
            0 => pool.release(session),
            _ => drop(pool.grow(session, random.random_range(1..=capacity))),
        }
    }
    let (mut asked, mut said) = (String::new(), String::new());
    let (kv_heads, values) = (layout.kv_heads, layout.values());
    let _ = writeln!(asked, "{sessions} {stride} {values}");
    for session in 0..sessions {
        let mut row = pool.held(session).to_vec();
        row.resize(stride as usize, 0);
        let words: Vec<String> = row.iter().map(u32::to_string).collect();
        let _ = writeln!(asked, "{}", words.join(" "));
    }
    for _ in 0..300 {
        let session = random.random_range(0..sessions);
        let held = pool.held(session);
        if held.is_empty() {
            continue;
        }
        let end = random.random_range(1..=capacity.min(held.len() as u32 * KV_PAGE));
        let first = random.random_range(0..end);
        let head = u64::from(random.random_range(0..kv_heads) * layout.head_bytes());
        let _ = writeln!(asked, "{session} {first} {} {head}", end - first);
        // Row by row, from the definition: whole tiles, and page zero after the last page.
        for block in (first..end).step_by(KV_PAGE as usize) {
            let rows = (end - block).min(KV_PAGE).next_multiple_of(32);
            for position in block..block + rows {
                let page = held.get((position / KV_PAGE) as usize).copied().unwrap_or(0);
                let row = position % KV_PAGE * layout.row_bytes();
                let at = u64::from(page) * layout.page_bytes() + head + u64::from(row);
                let _ = write!(said, "{at} ");
            }
        }
        said.push('\n');
    }
    (asked, said)
}

#[test]
fn the_device_finds_rows_where_the_host_puts_them() {
    let Some(compiler) = crate::emulated::compiler() else { return };
    for (kv_heads, head_dim) in [(3, 16), (2, 96), (2, 128)] {
        let (asked, said) = copies(PageLayout::new(kv_heads, head_dim, KvDtype::F16));
        let got = device_says(&compiler, head_dim, None, &asked);
        for (got, said) in got.lines().zip(said.lines()) {
            assert_eq!(got.trim(), said.trim(), "{kv_heads} heads of {head_dim}");
        }
        assert_eq!(got.lines().count(), said.lines().count());
    }
    // Mutations that it must detect.
    let (asked, said) = copies(PageLayout::new(3, 16, KvDtype::F16));
    let same = |got: &str| got.lines().map(str::trim).eq(said.lines().map(str::trim));
    for (from, to) in [
        ("key / PAGE_KEYS % (8 * PAGE_LINES)", "key / PAGE_KEYS % 8"),
        ("number % PAGE_LINES", "0"),
        ("PAGE_KEYS - key % PAGE_KEYS", "PAGE_KEYS"),
        ("page * (2 * values)", "page * values"),
        ("session * stride * PAGE_KEYS", "session * PAGE_KEYS"),
        ("i < 2; ++i", "i < 1; ++i"),
        ("PAGE_KEYS % 8 >= 6", "PAGE_KEYS % 8 >= 7"),
        ("if (p.number[place] != number)", "if (p.number[place] == AMK_NONE)"),
    ] {
        let got = device_says(&compiler, 16, Some((from, to)), &asked);
        assert!(!same(&got), "nobody notices {to} for {from}");
    }
}
