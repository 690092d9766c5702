//! Fair admission: whose request gets the next place.
//!
//! Each tenant has a line of its own and an account of what it was given, in tokens by its share. The tenant with the
//! least goes first; among equals, the request that came first. Who was idle begins where the others are, so nobody
//! saves up a claim. A request is paid for when it gets its place, and what it did not use is paid back.
//!
//! Nothing starves: every request costs at least one token, so the others pass a waiting tenant after finitely many.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The greatest share.
pub const SHARE_MAX: u32 = 1000;
/// Tenants without a request whose accounts are kept, so that leaving for a moment does not clear a debt.
const IDLE_MAX: usize = 1024;

/// Who a request is of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tenant {
    /// Its name.
    pub name: Arc<str>,
    /// Its part of the machine in comparison with others', from 1 to [`SHARE_MAX`].
    pub share: u32,
}

impl Default for Tenant {
    fn default() -> Self {
        Self { name: "".into(), share: 1 }
    }
}

#[derive(Debug)]
struct Line<T> {
    /// What it was given: tokens by share, in thousandths.
    given: u64,
    /// Requests that have a place.
    inside: usize,
    /// Those that wait, each with the number of its arrival.
    waiting: VecDeque<(u64, Tenant, T)>,
}

impl<T> Line<T> {
    fn is_idle(&self) -> bool {
        self.inside == 0 && self.waiting.is_empty()
    }
}

/// Waiting requests by tenant.
#[derive(Debug)]
pub struct Fair<T> {
    lines: BTreeMap<Arc<str>, Line<T>>,
    /// Where an idle tenant begins: what the one that was admitted last had been given.
    level: u64,
    arrived: u64,
}

impl<T> Default for Fair<T> {
    fn default() -> Self {
        Self { lines: BTreeMap::new(), level: 0, arrived: 0 }
    }
}

impl<T> Fair<T> {
    /// Puts a request at the end of its tenant's line.
    pub fn push(&mut self, tenant: Tenant, request: T) {
        let level = self.level;
        let new = || Line { given: level, inside: 0, waiting: VecDeque::new() };
        let line = self.lines.entry(tenant.name.clone()).or_insert_with(new);
        if line.is_idle() {
            line.given = line.given.max(level);
        }
        line.waiting.push_back((self.arrived, tenant, request));
        self.arrived += 1;
    }

    /// Number of requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lines.values().map(|line| line.waiting.len()).sum()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.values().all(|line| line.waiting.is_empty())
    }

    fn next(&self) -> Option<&Arc<str>> {
        let heads = self.lines.iter().filter_map(|(name, line)| {
            let (arrival, ..) = line.waiting.front()?;
            Some((line.given, *arrival, name))
        });
        heads.min().map(|(.., name)| name)
    }

    /// The request that gets the next place.
    #[must_use]
    pub fn first(&self) -> Option<&T> {
        self.lines[self.next()?].waiting.front().map(|(.., request)| request)
    }

    /// Gives the place to that request: its tenant pays `tokens`, which [`left`](Self::left) settles.
    pub fn admit(&mut self, tokens: u64) -> Option<(Tenant, T)> {
        let name = self.next()?.clone();
        let line = self.lines.get_mut(&name)?;
        let (_, tenant, request) = line.waiting.pop_front()?;
        self.level = self.level.max(line.given);
        line.given += price(tokens, tenant.share);
        line.inside += 1;
        Some((tenant, request))
    }

    /// A request has left its place after `used` of the `tokens` that were paid for it.
    pub fn left(&mut self, tenant: &Tenant, tokens: u64, used: u64) {
        let Some(line) = self.lines.get_mut(&tenant.name) else { return };
        let back = price(tokens, tenant.share).saturating_sub(price(used, tenant.share));
        line.given = line.given.saturating_sub(back);
        line.inside = line.inside.saturating_sub(1);
        self.forget();
    }

    /// Removes the waiting requests that `keep` does not accept.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        for line in self.lines.values_mut() {
            line.waiting.retain(|(.., request)| keep(request));
        }
        self.forget();
    }

    /// Takes all waiting requests, in no order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        let lines = std::mem::take(&mut self.lines).into_values();
        lines.flat_map(|line| line.waiting.into_iter().map(|(.., request)| request))
    }

    /// Forgets idle tenants: all that owe nothing, and of the others those that owe least, beyond [`IDLE_MAX`].
    fn forget(&mut self) {
        let level = self.level;
        self.lines.retain(|_, line| !line.is_idle() || line.given > level);
        let idle = self.lines.iter().filter(|(_, line)| line.is_idle());
        let mut idle: Vec<_> = idle.map(|(name, line)| (line.given, name.clone())).collect();
        if idle.len() > IDLE_MAX {
            idle.sort();
            for (_, name) in idle.drain(..).rev().skip(IDLE_MAX) {
                self.lines.remove(&name);
            }
        }
    }
}

/// What tokens cost a tenant; at least one token is paid for.
fn price(tokens: u64, share: u32) -> u64 {
    let share = u64::from(share.clamp(1, SHARE_MAX));
    tokens.max(1).saturating_mul(u64::from(SHARE_MAX)) / share
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str, share: u32) -> Tenant {
        Tenant { name: name.into(), share }
    }

    /// Serves for `turns`, `places` requests at a time, one token each a turn; each tenant offers so many requests of so
    /// many tokens in each turn. Returns the tokens of each.
    fn served(tenants: &[(Tenant, usize, u64)], places: usize, turns: usize) -> Vec<u64> {
        let mut fair = Fair::default();
        let mut inside: Vec<(usize, Tenant, u64, u64)> = Vec::new();
        let mut tokens = vec![0; tenants.len()];
        for _ in 0..turns {
            for (at, (tenant, each, length)) in tenants.iter().enumerate() {
                (0..*each).for_each(|_| fair.push(tenant.clone(), (at, *length)));
            }
            while inside.len() < places
                && let Some(&(at, length)) = fair.first()
            {
                let (tenant, _) = fair.admit(2 * length).unwrap();
                inside.push((at, tenant, length, 0));
            }
            for (at, _, _, ran) in &mut inside {
                *ran += 1;
                tokens[*at] += 1;
            }
            for (_, tenant, length, _) in inside.extract_if(.., |(.., length, ran)| ran == length) {
                fair.left(&tenant, 2 * length, length);
            }
        }
        tokens
    }

    #[test]
    fn equal_shares_are_equal_whatever_is_offered() {
        let tokens = served(&[(tenant("a", 1), 10, 7), (tenant("b", 1), 1, 7)], 8, 4000);
        let part = tokens[1] as f64 / (tokens[0] + tokens[1]) as f64;
        assert!((0.475..0.525).contains(&part), "{tokens:?}");
    }

    #[test]
    fn shares_count_tokens_and_not_requests() {
        let tokens = served(&[(tenant("a", 3), 9, 5), (tenant("b", 1), 2, 60)], 8, 8000);
        let part = tokens[0] as f64 / (tokens[0] + tokens[1]) as f64;
        assert!((0.7125..0.7875).contains(&part), "{tokens:?}");
    }

    #[test]
    fn one_tenant_is_served_in_order() {
        let mut fair = Fair::default();
        (0..5).for_each(|i| fair.push(Tenant::default(), i));
        let order: Vec<_> = std::iter::from_fn(|| fair.admit(9).map(|(_, i)| i)).collect();
        assert_eq!(order, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn an_idle_tenant_saves_nothing_and_keeps_its_debt() {
        let (a, b) = (tenant("a", 1), tenant("b", 1));
        let mut fair = Fair::default();
        // `a` is served alone, then `b` comes: it does not get all that `a` had first.
        for _ in 0..100 {
            fair.push(a.clone(), 'a');
            fair.admit(10);
            fair.left(&a, 10, 10);
        }
        (0..4).for_each(|_| fair.push(b.clone(), 'b'));
        (0..4).for_each(|_| fair.push(a.clone(), 'a'));
        let order: String = std::iter::from_fn(|| fair.admit(10).map(|(_, it)| it)).collect();
        assert_eq!(order, "bbababaa", "what `a` had last is its debt, and no more");
    }

    #[test]
    fn accounts_of_idle_tenants_are_limited() {
        let mut fair = Fair::default();
        for i in 0..3 * IDLE_MAX {
            let tenant = tenant(&i.to_string(), 1);
            fair.push(tenant.clone(), ());
            fair.admit(5);
            fair.left(&tenant, 5, 5);
        }
        assert!(fair.lines.len() <= IDLE_MAX && fair.is_empty());
    }

    #[test]
    fn a_flood_that_uses_nothing_still_passes_others_on() {
        let (a, b) = (tenant("a", 1), tenant("b", 1));
        let mut fair = Fair::default();
        fair.push(b.clone(), 'b');
        fair.admit(50);
        fair.push(b, 'b');
        for passed in 0.. {
            fair.push(a.clone(), 'a');
            let (tenant, who) = fair.admit(1000).unwrap();
            if who == 'b' {
                break;
            }
            fair.left(&tenant, 1000, 0);
            assert!(passed < 51, "50 tokens of debt are 50 requests");
        }
    }
}
