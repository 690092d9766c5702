//! Telemetry of a running machine, in a shared stats segment. The process that owns the machine writes the segment,
//! called the page ([`Publisher`]); other processes map and read it ([`Reader`]), as often as they like.
//!
//! **Promises.**
//!
//! - A reader gets a consistent state or none: a sequence lock covers the words ([`Reader::read`]). It maps the page
//!   read-only and takes no lock, so it does not slow the writer.
//! - Reading allocates nothing, and every loop in it is bounded. The contents are trusted only after length, magic and
//!   version are checked.
//! - Writing allocates nothing, never waits for a reader, and records its own cost (`write_ns`).
//! - The last events are in a ring behind the page ([`Tail`]): readers count those that were overwritten before they
//!   read them.
//! - A failure to publish is no error for the process: without a usable folder, only the process itself sees its page.

mod events;
mod find;
mod openmetrics;
pub mod ops;
mod page;
mod rates;
mod sequence;
mod stalls;
mod steps;

pub use events::{Tail, last_of};
pub use find::{Folder, Found, folder};
pub use openmetrics::{MetricFamily, openmetrics, openmetrics_of};
pub use page::{Edit, Page, Publisher, Reader, Unreadable, now_ns, text};
pub use rates::{Rates, Shares};
pub use stalls::{Stalls, Suspect};
pub use steps::{BUCKETS, bucket, quantile_ns, upper_ns};
