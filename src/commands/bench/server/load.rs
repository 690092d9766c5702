//! The load: requests of clients that wait for their answers (closed loop), or at random times (open loop). Both are
//! bounded in requests, in time and in requests in flight.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::client::{Answered, Client};

/// What to send.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) model: String,
    /// Clients, or requests in flight at most.
    pub(super) clients: u32,
    /// Requests per second; none in a closed loop.
    pub(super) rate: Option<f64>,
    pub(super) requests: u32,
    /// After which no request is sent.
    pub(super) duration: Duration,
    pub(super) timeout: Duration,
    pub(super) prompt: u32,
    pub(super) shared: u32,
    pub(super) answer: u32,
    pub(super) vocab: u32,
    pub(super) temperature: f64,
    pub(super) seed: u64,
}

/// What came of all requests.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) answered: Vec<Answered>,
    /// Why the others failed.
    pub(super) failed: Vec<String>,
    /// Arrivals that were not sent, since too many requests were in flight.
    pub(super) dropped: u32,
    pub(super) took: Duration,
}

impl Plan {
    fn random(&self, stream: u64) -> Xoshiro256PlusPlus {
        Xoshiro256PlusPlus::seed_from_u64(self.seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// The body of a request: its first tokens are those of all requests.
    pub(super) fn body(&self, request: u32) -> Value {
        let tokens = |count: u32, stream: u64| {
            let mut random = self.random(stream);
            (0..count).map(|_| random.random_range(0..self.vocab)).collect::<Vec<u32>>()
        };
        let mut prompt = tokens(self.shared.min(self.prompt), u64::MAX);
        prompt.extend(tokens(self.prompt - prompt.len() as u32, u64::from(request) + 1));
        json!({
            "model": self.model, "prompt": prompt, "max_tokens": self.answer, "temperature": self.temperature,
            "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true},
        })
    }

    /// Times of arrivals: those of a Poisson process.
    pub(super) fn arrivals(&self, rate: f64) -> impl Iterator<Item = Duration> {
        let mut random = self.random(0);
        let mut at = 0.0;
        (0..self.requests).map(move |_| {
            let uniform: f64 = random.random();
            at -= (1.0 - uniform).ln() / rate;
            Duration::from_secs_f64(at)
        })
    }

    /// Sends everything and waits for the last answer. It ends at the latest `duration` plus `timeout` from now.
    pub(super) async fn run(self, client: Rc<Client>, done: impl Fn() + 'static) -> Load {
        let began = Instant::now();
        let sender = Rc::new(Sender { plan: self, client, load: RefCell::default(), done });
        match sender.plan.rate {
            None => sender.clone().closed(began).await,
            Some(rate) => sender.clone().open(began, rate).await,
        }
        let mut load = sender.load.take();
        load.took = began.elapsed();
        load
    }
}

struct Sender<F> {
    plan: Plan,
    client: Rc<Client>,
    load: RefCell<Load>,
    done: F,
}

impl<F: Fn() + 'static> Sender<F> {
    async fn send(&self, request: u32, due: Instant) {
        let deadline = Instant::now() + self.plan.timeout;
        let done = self.client.complete(&self.plan.body(request), due, deadline).await;
        let mut load = self.load.borrow_mut();
        match done {
            Ok(answered) => load.answered.push(answered),
            Err(why) => load.failed.push(why),
        }
        (self.done)();
    }

    async fn closed(self: Rc<Self>, began: Instant) {
        let next = Rc::new(Cell::new(0));
        let mut clients = JoinSet::new();
        for _ in 0..self.plan.clients.min(self.plan.requests) {
            let (this, next) = (self.clone(), next.clone());
            clients.spawn_local(async move {
                while next.get() < this.plan.requests && began.elapsed() < this.plan.duration {
                    let request = next.replace(next.get() + 1);
                    this.send(request, Instant::now()).await;
                }
            });
        }
        while clients.join_next().await.is_some() {}
    }

    async fn open(self: Rc<Self>, began: Instant, rate: f64) {
        let mut under_way = JoinSet::new();
        for (request, at) in self.plan.arrivals(rate).enumerate() {
            if at >= self.plan.duration {
                break;
            }
            sleep_until(began + at).await;
            while under_way.try_join_next().is_some() {}
            if under_way.len() >= self.plan.clients as usize {
                self.load.borrow_mut().dropped += 1;
                (self.done)();
                continue;
            }
            let this = self.clone();
            under_way.spawn_local(async move { this.send(request as u32, began + at).await });
        }
        while under_way.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            model: "m".into(),
            clients: 2,
            rate: None,
            requests: 4000,
            duration: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            prompt: 6,
            shared: 4,
            answer: 3,
            vocab: 50,
            temperature: 0.0,
            seed: 1,
        }
    }

    #[test]
    fn prompts_share_their_first_tokens_only_and_follow_from_the_seed() {
        let ids = |plan: &Plan, request| -> Vec<u64> {
            let body = plan.body(request);
            body["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
        };
        let (a, b) = (ids(&plan(), 0), ids(&plan(), 1));
        assert_eq!((a.len(), &a[..4]), (6, &b[..4]));
        assert_ne!(a[4..], b[4..]);
        assert!(a.iter().all(|id| *id < 50));
        assert_eq!(a, ids(&plan(), 0));
        assert_ne!(a[..4], ids(&Plan { seed: 2, ..plan() }, 0)[..4]);
        assert_eq!(ids(&Plan { shared: 90, ..plan() }, 0), ids(&Plan { shared: 6, ..plan() }, 9));
    }

    #[test]
    fn arrivals_have_the_rate_and_the_spread_of_a_poisson_process() {
        let times: Vec<f64> = plan().arrivals(100.0).map(|at| at.as_secs_f64()).collect();
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((0.0094..0.0106).contains(&mean), "{mean}");
        assert!((0.9..1.1).contains(&(variance.sqrt() / mean)), "{variance}");
    }
}
