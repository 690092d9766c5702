//! Tenants: who shares the server, by API key, what each may use, and what it has used. Without a file of them, requests
//! are grouped by the user that they name.

use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::http::StatusCode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use serde_json::{Map, Value};
use sessions::{Priority, SHARE_MAX, Tenant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::refusal::Refusal;
use crate::failure::Failure;
use crate::files;

const FILE_BYTES_MAX: u64 = 1 << 20;

/// The file of `--tenants`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    tenants: Vec<Described>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    name: String,
    key: String,
    #[serde(default = "one")]
    share: u32,
    /// The most requests in the server.
    requests: Option<u32>,
    /// Tokens of prompts and answers.
    tokens_per_minute: Option<u32>,
    /// The highest tier of its requests.
    service_tier: Option<String>,
}

fn one() -> u32 {
    1
}

/// A tenant's terms, and what it has used of them.
#[derive(Debug)]
pub(super) struct Account {
    tenant: Tenant,
    priority: Priority,
    requests: Option<(Arc<Semaphore>, u32)>,
    budget: Option<Mutex<Budget>>,
    admitted: Counter,
    refused: Counter,
    tokens: Counter,
}

/// Tokens that may be used: a minute's at once, then as they come back. It may be overdrawn by the requests that are in
/// the server; the next one waits until that is paid off.
#[derive(Debug)]
struct Budget {
    per_minute: u32,
    left: f64,
    at: Instant,
}

impl Budget {
    fn left(&mut self, now: Instant) -> f64 {
        let most = f64::from(self.per_minute);
        let back = now.duration_since(self.at).as_secs_f64() / 60.0 * most;
        (self.left, self.at) = ((self.left + back).min(most), now);
        self.left
    }
}

type Label = [(&'static str, String); 1];

/// All tenants with their API keys, and their metrics.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    keyed: Vec<(String, Arc<Account>)>,
    admitted: Family<Label, Counter>,
    refused: Family<Label, Counter>,
    tokens: Family<Label, Counter>,
    skew: Family<Label, Gauge<f64, AtomicU64>>,
}

impl Tenants {
    /// Reads the file of `--tenants`.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let list: List = files::read_json(path, FILE_BYTES_MAX)?;
        let mut problems = Vec::new();
        if list.tenants.is_empty() {
            problems.push("`tenants` is empty".to_owned());
        }
        for (at, one) in list.tenants.iter().enumerate() {
            let before = &list.tenants[..at];
            let mut wrong = |what: &str| problems.push(format!("tenants[{at}]: {what}"));
            if one.name.is_empty() || before.iter().any(|other| other.name == one.name) {
                wrong("`name` is empty or that of another; each tenant needs its own");
            }
            if one.key.trim().is_empty() || before.iter().any(|other| other.key == one.key) {
                wrong("`key` is empty or that of another; each tenant needs its own");
            }
            if !(1..=SHARE_MAX).contains(&one.share) {
                wrong(&format!("`share` is {}; legal: 1 to {SHARE_MAX}", one.share));
            }
            if one.requests == Some(0) || one.tokens_per_minute == Some(0) {
                wrong("`requests` or `tokens_per_minute` is 0; legal: 1 or more, or leave it out");
            }
            if one.service_tier.as_deref().is_some_and(|tier| priority_of(tier).is_none()) {
                wrong("`service_tier` is no tier; legal: flex, default or priority");
            }
        }
        if !problems.is_empty() {
            let message = format!("{}: {}", path.display(), problems.join("; "));
            return Err(Failure::usage(message));
        }
        let mut all = Self::default();
        for described in list.tenants {
            let key = described.key.trim().to_owned();
            let account = Arc::new(all.account(described));
            all.keyed.push((key, account));
        }
        Ok(all)
    }

    fn account(&self, described: Described) -> Account {
        let Described { name, share, requests, tokens_per_minute, service_tier, .. } = described;
        let label = [("tenant", name.clone())];
        let counter = |family: &Family<Label, Counter>| family.get_or_create(&label).clone();
        let budget = |per_minute| {
            Mutex::new(Budget { per_minute, left: f64::from(per_minute), at: Instant::now() })
        };
        Account {
            tenant: Tenant { name: name.into(), share },
            priority: service_tier.and_then(|tier| priority_of(&tier)).unwrap_or(Priority::High),
            requests: requests.map(|most| (Arc::new(Semaphore::new(most as usize)), most)),
            budget: tokens_per_minute.map(budget),
            admitted: counter(&self.admitted),
            refused: counter(&self.refused),
            tokens: counter(&self.tokens),
        }
    }

    /// The keys, with whose they are.
    pub(super) fn keys(&self) -> impl Iterator<Item = (&str, Caller)> {
        self.keyed.iter().map(|(key, account)| (key.as_str(), Caller(Some(account.clone()))))
    }

    fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.keyed.iter().map(|(_, account)| &**account)
    }

    /// Adds the metrics of tenants, if there are tenants.
    pub(super) fn register(&self, registry: &mut Registry) {
        if self.keyed.is_empty() {
            return;
        }
        let mut counter = |name: &str, help: &str, family: &Family<Label, Counter>| {
            registry.register(format!("amk_tenant_{name}"), help, family.clone());
        };
        counter("requests", "Requests that were taken", &self.admitted);
        counter("refused", "Requests refused by a limit of the tenant", &self.refused);
        counter("tokens", "Tokens of prompts and answers", &self.tokens);
        let help = "A tenant's part of all tokens over its part of all shares; 1 is fair";
        registry.register("amk_tenant_skew", help, self.skew.clone());
    }

    /// Brings what is derived up to date.
    pub(super) fn update(&self) {
        let tokens: u64 = self.accounts().map(|account| account.tokens.get()).sum();
        let shares: u32 = self.accounts().map(|account| account.tenant.share).sum();
        for account in self.accounts().filter(|_| tokens > 0) {
            let part = account.tokens.get() as f64 / tokens as f64;
            let share = f64::from(account.tenant.share) / f64::from(shares);
            let label = [("tenant", account.tenant.name.to_string())];
            self.skew.get_or_create(&label).set(part / share);
        }
    }
}

/// A priority by OpenAI's name of its tier.
pub(super) fn priority_of(tier: &str) -> Option<Priority> {
    match tier {
        "auto" | "default" | "standard_only" => Some(Priority::Normal),
        "flex" => Some(Priority::Low),
        "priority" => Some(Priority::High),
        _ => None,
    }
}

/// OpenAI's name of the tier of a priority.
pub(super) fn tier_of(priority: Priority) -> &'static str {
    match priority {
        Priority::Normal => "default",
        Priority::Low => "flex",
        Priority::High => "priority",
    }
}

impl Account {
    /// A place among the tenant's requests, if its number is limited.
    fn enter(&self) -> Result<Option<OwnedSemaphorePermit>, Refusal> {
        let name = &self.tenant.name;
        let refused = |message: String, code| {
            self.refused.inc();
            Refusal::new(StatusCode::TOO_MANY_REQUESTS, message).coded(code)
        };
        if let Some(budget) = &self.budget {
            let mut budget = budget.lock().unwrap_or_else(PoisonError::into_inner);
            if budget.left(Instant::now()) <= 0.0 {
                let message = format!(
                    "{name} has used its {} tokens per minute; try again later",
                    budget.per_minute
                );
                return Err(refused(message, "tenant_tokens"));
            }
        }
        let place = match &self.requests {
            None => None,
            Some((places, most)) => {
                let place = places.clone().try_acquire_owned().map_err(|_| {
                    let message = format!(
                        "{name} has {most} requests in the server, its limit; try again later"
                    );
                    refused(message, "tenant_full")
                });
                Some(place?)
            }
        };
        self.admitted.inc();
        Ok(place)
    }
}

/// Whose a request is: that of its key, if tenants have keys.
#[derive(Clone, Debug, Default)]
pub(super) struct Caller(pub(super) Option<Arc<Account>>);

impl Caller {
    /// A place among its requests, if their number is limited.
    pub(super) fn enter(&self) -> Result<Option<OwnedSemaphorePermit>, Refusal> {
        self.0.as_ref().map_or(Ok(None), |account| account.enter())
    }

    /// Counts tokens that it used.
    pub(super) fn used(&self, tokens: usize) {
        let Some(account) = &self.0 else { return };
        account.tokens.inc_by(tokens as u64);
        if let Some(budget) = &account.budget {
            let mut budget = budget.lock().unwrap_or_else(PoisonError::into_inner);
            budget.left -= tokens as f64;
        }
    }

    /// The priority of a request that asks for this one.
    pub(super) fn priority(&self, asked: Priority) -> Priority {
        self.0.as_ref().map_or(asked, |account| asked.min(account.priority))
    }

    /// The tenant of a request with these fields.
    pub(super) fn tenant(&self, fields: &Map<String, Value>) -> Tenant {
        match &self.0 {
            Some(account) => account.tenant.clone(),
            None => user(fields),
        }
    }
}

/// The user that a request names, in one of the fields of the APIs; all that name none are one.
fn user(fields: &Map<String, Value>) -> Tenant {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let id = fields.get("metadata").and_then(|metadata| metadata.get("user_id")?.as_str());
    match text("user").or_else(|| text("safety_identifier")).or(id) {
        // Its hash, so that a long name takes no memory.
        Some(user) => {
            let name = blake3::hash(user.as_bytes()).to_hex();
            Tenant { name: name.as_str().into(), share: 1 }
        }
        None => Tenant::default(),
    }
}

#[cfg(test)]
#[path = "tenants_tests.rs"]
mod tests;
