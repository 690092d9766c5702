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

/// Free pages and those of all sessions are all pages, each once, and promises hold.
fn check(pool: &PagePool, sessions: u32) {
    let mut owners = BTreeMap::new();
    for session in 0..sessions {
        for &page in pool.held(session) {
            assert!(owners.insert(page, Some(session)).is_none(), "page {page} twice: {pool:?}");
        }
    }
    for &page in &pool.free {
        assert!(owners.insert(page, None).is_none(), "page {page} is free and held: {pool:?}");
    }
    assert!(owners.keys().copied().eq(1..=pool.pages), "a page is lost or made: {pool:?}");
    let promised: u32 = pool.shares.iter().map(|share| share.promised).sum();
    assert!(pool.shares.iter().all(|share| share.held.len() <= share.promised as usize));
    assert!(promised == pool.promised && promised <= pool.pages, "{pool:?}");
    let held = owners.values().flatten().count() as u32;
    let told = Occupancy { pages: pool.pages, held, promised };
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
    let define = format!("-DAMK_HEAD_DIM={head_dim}");
    crate::emulated::run(compiler, "pages", (&sources, &[define]), spoil, asked)
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
                let row = position % KV_PAGE * layout.row_bytes;
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
    for (kv_heads, head_dim) in [(3, 16), (2, 128)] {
        let (asked, said) = copies(PageLayout::new(kv_heads, head_dim));
        let got = device_says(&compiler, head_dim, None, &asked);
        for (got, said) in got.lines().zip(said.lines()) {
            assert_eq!(got.trim(), said.trim(), "{kv_heads} heads of {head_dim}");
        }
        assert_eq!(got.lines().count(), said.lines().count());
    }
    // Mutations that it must detect.
    let (asked, said) = copies(PageLayout::new(3, 16));
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
